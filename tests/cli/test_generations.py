"""Commands ``log``, ``remove`` and ``compact``, and the option ``--generation``."""

import json

import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.store import REPORT_NAME
from batchloom.testing import append_documents, write_store

TEXT = [[*b"it was the best of times", 256]] * 20


@pytest.fixture
def store(tmp_path):
    write_store(tmp_path / "s", TEXT)
    append_documents(tmp_path / "s", [[*b"it was the worst of times", 256]] * 5, source="more/b.jsonl")
    return str(tmp_path / "s")


def test_log_has_a_line_a_generation(store, tmp_path, capsys):
    (tmp_path / "s" / REPORT_NAME).write_text('{"started": "2026-11-21T10:00:00+00:00", "x": 1}')
    (tmp_path / "s" / "report.00002.json").write_text("no report")
    assert run_command_line(["remove", store, "--source", "more/*"]) == 0
    capsys.readouterr()
    assert run_command_line(["log", store]) == 0
    first_line, second_line, third_line = capsys.readouterr().out.splitlines()
    assert first_line.split()[:2] == ["1", "prepared"]
    assert "20 documents, 500 tokens, 1 source added (given), 2026-11-21T10:00:00" in first_line
    assert "25 documents, 630 tokens, 1 source added (more/b.jsonl)" in second_line
    assert "20 documents left, 500 tokens, sources more/*, 20" in third_line
    assert run_command_line(["log", store, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["made"] for entry in entries] == ["prepared", "appended", "removed"]
    assert entries[1]["sources"] == ["more/b.jsonl"]
    assert run_command_line(["log", str(tmp_path / "nothing")]) == 1
    assert "There is no file or folder" in capsys.readouterr().err


def test_remove_and_compact(store, tmp_path, capsys):
    assert run_command_line(["remove", store]) == 2
    assert "sources: missing; name sources (--source NAME)" in capsys.readouterr().err
    assert run_command_line(["remove", store, "--source", "more/b.jsonl", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "5             130 tokens  more/b.jsonl" in output
    assert "would be removed" in output
    (tmp_path / "list").write_text("train:0\ngiven 99\n")
    assert run_command_line(["remove", store, "--documents-file", str(tmp_path / "list")]) == 0
    output = capsys.readouterr().out
    assert "not in the store: given 99" in output
    assert "Older generations and the shards themselves still hold the text" in output
    assert run_command_line(["remove", store, "--documents-file", str(tmp_path / "list")]) == 0
    assert "Nothing to remove" in capsys.readouterr().out
    assert run_command_line(["remove", store, "--source", "a", "--source", "given"]) == 1
    capsys.readouterr()
    assert run_command_line(["compact", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == [1, 2, 3]
    assert run_command_line(["compact", store]) == 0
    assert "Nothing to compact" in capsys.readouterr().out
    assert run_command_line(["check", store]) == 0


def test_other_commands_take_a_generation(store, tmp_path, capsys):
    assert run_command_line(["remove", store, "--source", "given"]) == 0
    for number, documents in (("1", 20), ("2", 25)):
        assert run_command_line(["inspect", store, "--generation", number, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["documents"] == documents
        assert run_command_line(["check", store, "--generation", number]) == 0
        assert f"--generation {number} reads the {documents} documents" in capsys.readouterr().out
        folder = str(tmp_path / number)
        assert run_command_line(["export", store, "--to", "flat", "--out", folder, "--generation", number]) == 0
        capsys.readouterr()
    assert run_command_line(["inspect", store]) == 0
    assert "20 documents of these removed" in capsys.readouterr().out
    assert run_command_line(["check", store, "--generation", "9"]) == 1
    assert "has no generation 9; it has: 1, 2, 3" in capsys.readouterr().err


def test_remove_reports_duplicates_without_a_document(tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "told twice"}\n')
    batchloom.prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], out=tmp_path / "s", tokenizer="bytes")
    (tmp_path / "list").write_text("b.jsonl 0\nb.jsonl 9\n")
    assert run_command_line(["remove", str(tmp_path / "s"), "--documents-file", str(tmp_path / "list")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "not in the store: b.jsonl 9 read, but without a document in the store: b.jsonl 0." in output
    assert "the hash of the text (32 hex digits of XXH3-128)" in output
    assert "Nothing to remove; the store stays as it is." in output
