"""Where the time went, as ``prepare --profile`` says it, and where the page lies, as ``inspect`` does."""

import json

import pytest

from batchloom.cli import run_command_line
from batchloom.store import PAGE_NAME


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(50)))
    return ["prepare", str(path), "--out", str(tmp_path / "s"), "--tokenizer", "bytes"]


def test_a_profile_names_stages_with_their_share_and_speed(corpus, tmp_path, capsys):
    assert run_command_line(corpus) == 0
    path = tmp_path / "s" / "report.json"
    report = json.loads(path.read_text())
    report |= {"seconds": 4.0, "seconds_by_phase": {"tokenize": 3.5}, "workers": 2, "crew": "pool"}
    report["content"]["stages"] = {
        "read": {"seconds": 1.0, "bytes": 10**8, "documents": 500},
        "\x1b[31m": {"seconds": 3.0, "bytes": 0, "documents": 0},
    }
    path.write_text(json.dumps(report))

    def printed():
        capsys.readouterr()
        assert run_command_line([*corpus, "--profile"]) == 0
        return " ".join(capsys.readouterr().out.split())

    words = printed()
    assert "4.0 s in all: tokenize 3.5 s; 2 at work (pool)" in words
    assert "read 1.00 25% 100.0 MB/s 500" in words
    assert r"\x1b[31m 3.00 75%" in words
    path.unlink()
    assert "in report.json beside the store" in printed()


def test_prepare_says_where_the_time_went(corpus, capsys):
    assert run_command_line([*corpus, "--profile"]) == 0
    assert "in all: list" in capsys.readouterr().out
    # With JSON on standard output, people read on the other one.
    assert run_command_line([*corpus, "--profile", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["already_done"] is True
    assert "in all: list" in told.err


def test_inspect_says_where_the_page_lies(corpus, tmp_path, capsys):
    assert run_command_line(corpus) == 0
    (tmp_path / "s" / PAGE_NAME).write_text("<!DOCTYPE html>")
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert f"report: {tmp_path / 's' / PAGE_NAME}" in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "s" / PAGE_NAME).unlink()
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert "report:" not in capsys.readouterr().out
