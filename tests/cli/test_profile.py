"""Profile of ``prepare --profile``, and the page of a store in ``inspect``."""

import json

import pytest

from batchloom.cli import run_command_line
from batchloom.store import PAGE_NAME


@pytest.fixture
def prepare_arguments(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(50)))
    return ["prepare", str(path), "--out", str(tmp_path / "s"), "--tokenizer", "bytes"]


def test_a_profile_names_stages_with_their_share_and_speed(prepare_arguments, tmp_path, capsys):
    assert run_command_line(prepare_arguments) == 0
    path = tmp_path / "s" / "report.json"
    report = json.loads(path.read_text())
    report |= {"seconds": 4.0, "seconds_by_phase": {"tokenize": 3.5}, "workers": 2, "executor": "pool"}
    report["content"]["stages"] = {
        "read": {"seconds": 1.0, "bytes": 10**8, "documents": 500},
        "\x1b[31m": {"seconds": 3.0, "bytes": 0, "documents": 0},
    }
    path.write_text(json.dumps(report))

    def print_profile():
        capsys.readouterr()
        assert run_command_line([*prepare_arguments, "--profile"]) == 0
        return " ".join(capsys.readouterr().out.split())

    output = print_profile()
    assert "4.0 s in all: tokenize 3.5 s; 2 workers (pool)" in output
    assert "read 1.00 25% 100.0 MB/s 500" in output
    assert r"\x1b[31m 3.00 75%" in output
    path.unlink()
    assert "in report.json next to the store" in print_profile()


def test_prepare_prints_a_profile(prepare_arguments, capsys):
    assert run_command_line([*prepare_arguments, "--profile"]) == 0
    assert "in all: list" in capsys.readouterr().out
    # With JSON on standard output, the profile goes to standard error.
    assert run_command_line([*prepare_arguments, "--profile", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["already_done"] is True
    assert "in all: list" in output.err


def test_inspect_prints_the_path_of_the_page(prepare_arguments, tmp_path, capsys):
    assert run_command_line(prepare_arguments) == 0
    (tmp_path / "s" / PAGE_NAME).write_text("<!DOCTYPE html>")
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert f"report: {tmp_path / 's' / PAGE_NAME}" in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "s" / PAGE_NAME).unlink()
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert "report:" not in capsys.readouterr().out
