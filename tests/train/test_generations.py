"""Runs on stores whose generations change between start and resume."""

import json
from pathlib import Path

import pytest

from batchloom.cli import run_command_line
from batchloom.store import compact_store, remove_documents
from batchloom.testing import append_documents
from train.runs import BASE_SETTINGS, counting_documents, read_steps, small_store


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path / "s").path


@pytest.fixture
def args(store, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps({**BASE_SETTINGS, "steps": 6}))
    return ["--data", store, "--config-file", tmp_path / "small.json"]


def train(*args):
    return run_command_line(["train", "--device", "cpu", *map(str, args)])


def grow(store):
    append_documents(store, {"train": counting_documents(60, 7), "val": counting_documents(9, 8)})


def test_a_run_resumes_with_the_generation_it_was_begun_on(store, args, tmp_path, capsys):
    reference, resumed = tmp_path / "whole", tmp_path / "halves"
    assert train(*args, "--out", reference) == 0
    assert train(*args, "--out", resumed, "--stop-at", 3) == 0
    grow(store)
    remove_documents(store, sources=["given"])
    capsys.readouterr()
    assert train("--data", store, "--out", resumed, "--resume") == 0
    output = capsys.readouterr().out
    assert f"The run was started on generation 1 of {store} and continues with it; the newest is 3." in output
    assert "150 documents" in output
    assert read_steps(resumed) == read_steps(reference)


def test_a_run_on_a_generation_that_was_compacted_away_is_refused(store, args, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    grow(store)
    compact_store(store)
    assert train("--data", store, "--out", out, "--resume") == 1
    error = capsys.readouterr().err
    assert "Generation 1 of" in error
    assert "was compacted away when generation 3 was made" in error


def test_a_generation_can_be_asked_for(store, args, tmp_path, capsys):
    grow(store)
    assert train(*args, "--out", tmp_path / "new", "--stop-at", 2) == 0
    assert "210 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "new/run.json").read_text())["data"]["generation"] == 2
    assert train(*args, "--out", tmp_path / "old", "--stop-at", 2, "--generation", 1) == 0
    assert "150 documents" in capsys.readouterr().out
    assert train(*args, "--out", tmp_path / "old", "--resume") == 0
    # Resuming finds its generation, and refuses another one.
    assert train(*args, "--out", tmp_path / "old", "--resume", "--generation", 2) == 1
    assert "data.fingerprint was" in capsys.readouterr().err
    assert train(*args, "--out", tmp_path / "other", "--generation", 7) == 1
    assert "has no generation 7; it has: 1, 2" in capsys.readouterr().err


def test_a_run_keeps_its_val_subset_when_only_val_changed(store, args, tmp_path, capsys):
    assert train(*args, "--out", tmp_path / "one", "--stop-at", 3) == 0
    append_documents(store, {"val": counting_documents(9, 8)})
    assert train(*args, "--out", tmp_path / "two", "--stop-at", 3) == 0
    capsys.readouterr()
    assert train("--data", store, "--out", tmp_path / "one", "--resume") == 0
    assert "was started on generation 1" in capsys.readouterr().out
    assert train("--data", store, "--out", tmp_path / "two", "--resume") == 0
    assert "was started on" not in capsys.readouterr().out


def test_generations_are_of_stores(args, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    assert train("--input-file", tmp_path / "a.txt", "--generation", 1) == 2
    assert "--generation: 1 requires --data" in capsys.readouterr().err
    assert train("--data", Path("dummy"), "--generation", 1, "--out", tmp_path / "r") == 2
    assert "only stores have generations" in capsys.readouterr().err
