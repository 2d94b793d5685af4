"""Command ``check``: the kind of data, its use and the exit code."""

import json

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.testing import write_store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "store", {"train": [[1, 2, 256], [3, 256]], "val": [[4, 256]]})
    write_store(tmp_path / "unseen", {"val": [[4, 256]]})
    (tmp_path / "raw.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "folder").mkdir()
    batchloom.prepare("dummy:documents=50,vocab=9", out=tmp_path / "made", val_fraction=0.1)
    return tmp_path


CASES = [
    ("store", "real", 0, "train --data store reads the 2 documents of subset train, and evaluates"),
    ("store/train/shard_00000", "real", 0, "reads its 2 documents as they are"),
    ("unseen", "real", 0, "nothing by batchloom train: subset train has no documents"),
    ("raw.jsonl", "real", 0, "batchloom prepare raw.jsonl --out STORE reads 2 documents of it"),
    ("made", "synthetic", 0, "synthetic documents of subset train"),
    ("dummy", "synthetic", 0, "--data dummy generates its 100,000 documents as it runs"),
    ("distributed_dummy:documents=7", "synthetic", 0, "generates its 7 documents as it runs"),
    ("nowhere", "absent", 1, "nothing"),
    ("folder", "absent", 1, "nothing"),
]


@pytest.mark.parametrize(("path", "data", "code", "usage"), CASES)
def test_kind_of_data_and_its_use(folder, capsys, path, data, code, usage):
    assert run_command_line(["check", path, "--json"]) == code
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert list(report) == ["path", "kind", "sound", "data", "used", "faults", "facts", "sample"]
    assert (report["data"], report["sound"], report["path"]) == (data, code == 0, path)
    assert usage in report["used"]
    assert bool(report["faults"]) == bool(code)
    assert not output.err

    assert run_command_line(["check", path]) == code
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split() == ["data:", data]
    if code:
        assert output.err.startswith("batchloom: ")
    else:
        assert usage in " ".join(output.out.split())


def test_a_damaged_store_is_real_and_unused(folder, capsys):
    path = folder / "store/train/shard_00000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert run_command_line(["check", "store", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["data"], report["used"]) == ("real", "nothing until the faults are fixed")


def test_a_store_without_a_readable_manifest_is_unknown(folder, capsys):
    (folder / "made/dataset_metadata.json").write_text("{")
    assert run_command_line(["check", "made", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["data"], report["used"]) == ("unknown", "nothing until the faults are fixed")


def test_an_unfinished_store_is_an_error(folder, capsys):
    (folder / "half/.work").mkdir(parents=True)
    assert run_command_line(["check", "half", "--json"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "is an unfinished store" in output.err
