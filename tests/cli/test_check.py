"""``batchloom check``: real, synthetic or absent, what would be used, and the exit code."""

import json

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.testing import write_store


@pytest.fixture
def here(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("path", "data", "code", "used"), CASES)
def test_what_it_is_and_what_would_be_used(here, capsys, path, data, code, used):
    assert run_command_line(["check", path, "--json"]) == code
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert list(found) == ["path", "kind", "sound", "data", "used", "faults", "facts", "sample"]
    assert (found["data"], found["sound"], found["path"]) == (data, code == 0, path)
    assert used in found["used"]
    assert bool(found["faults"]) == bool(code)
    assert not said.err

    assert run_command_line(["check", path]) == code
    said = capsys.readouterr()
    assert said.out.splitlines()[0].split() == ["data:", data]
    if code:
        assert said.err.startswith("batchloom: ")
    else:
        assert used in " ".join(said.out.split())


def test_a_damaged_store_is_real_and_nothing_of_it_would_be_used(here, capsys):
    path = here / "store/train/shard_00000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert run_command_line(["check", "store", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["data"], found["used"]) == ("real", "nothing until the faults are fixed")


def test_whether_a_store_without_a_readable_manifest_is_real_is_not_known(here, capsys):
    (here / "made/dataset_metadata.json").write_text("{")
    assert run_command_line(["check", "made", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["data"], found["used"]) == ("unknown", "nothing until the faults are fixed")


def test_what_is_there_and_cannot_be_told_is_an_error(here, capsys):
    (here / "half/.work").mkdir(parents=True)
    assert run_command_line(["check", "half", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "is an unfinished store" in said.err
