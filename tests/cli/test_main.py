"""The command line as people use it: names brought along, exit codes, one sentence an error."""

import json
import subprocess
import sys

import pytest

from batchloom.cli.main import familiar, run
from batchloom.testing.stores import write_store

TEXT = [[*b"it was the best of times, it was the worst of times", 256]] * 20


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        (["prepare", "a", "--tokens_per_shard", "5"], ["prepare", "a", "--tokens-per-shard", "5"]),
        (
            ["prepare", "--input_files", "a", "b", "--out_dir=o"],
            ["prepare", "a", "b", "--out", "o"],
        ),
        (
            ["prepare", "--input-files=a_b", "--tokenization", "gpt2"],
            ["prepare", "a_b", "--tokenizer", "gpt2"],
        ),
        (["prepare", "a", "--no_dedup"], ["prepare", "a", "--dedup", "none"]),
        (["prepare", "--", "--odd_name"], ["prepare", "--", "--odd_name"]),
        (["train", "--data", "my_store"], ["train", "--data", "my_store"]),
    ],
)
def test_names_brought_along(typed, understood):
    assert familiar(typed) == understood


def test_old_names_do_the_job(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("some text\n")
    out = tmp_path / "store"
    words = [
        "prepare",
        "--input_files",
        str(tmp_path / "in.txt"),
        "--out_dir",
        str(out),
        "--tokenization",
        "bytes",
    ]
    assert run([*words, "--tokens_per_shard", "1000", "--no_dedup", "--no_normalize"]) == 0
    assert (out / "dataset_metadata.json").exists()
    capsys.readouterr()


def test_check_tells_sound_from_faulty_from_misuse(tmp_path, capsys):
    write_store(tmp_path / "s", TEXT)
    assert run(["check", str(tmp_path / "s")]) == 0
    assert "sound" in capsys.readouterr().out
    (tmp_path / "s/train/shard_00000.bin").write_bytes(b"\0" * 2080)
    assert run(["check", str(tmp_path / "s"), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["sound"] is False
    assert "checksum" in verdict["faults"][0]
    assert run(["check", str(tmp_path / "nothing")]) == 1
    assert run(["check"]) == 2
    assert run(["check", str(tmp_path), "--nonsense"]) == 2
    assert run(["frobnicate"]) == 2
    capsys.readouterr()


def test_check_of_raw_files(tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"text": "a"}\n{"text": "b"}\n')
    bad.write_text('{"text": "a"}\n\n{"text": 5}\n{"text": "b"\n')
    assert run(["check", str(good)]) == 0
    assert "2 documents, 0 empty, 0 bad" in capsys.readouterr().out
    assert run(["check", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "line 3" in out
    assert "Invalid JSON on line 4 in bad.jsonl, column 13: " in out
    (tmp_path / "plain.txt").write_text("hello")
    assert run(["check", str(tmp_path / "plain.txt")]) == 0
    capsys.readouterr()


def test_inspect_shows_the_store(tmp_path, capsys):
    write_store(tmp_path / "s", [*TEXT, [1] * 300])
    assert run(["inspect", str(tmp_path / "s"), "--seq-len", "128"]) == 0
    out = capsys.readouterr().out
    assert "21 documents, 1,340 tokens (uint16) in 1 shards" in out
    assert "best_fit" in out
    assert "it was the best of times" in out
    assert run(["inspect", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 300


def test_an_error_is_one_sentence_without_a_traceback(tmp_path):
    for words in (
        ["inspect", "no/such/store"],
        ["train", "--data", "no/such/store"],
        ["prepare", "nope.txt", "--out", str(tmp_path / "o")],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "batchloom", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode in (1, 2)
        assert done.stderr.startswith("batchloom: ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr


def test_help_is_quick_and_loads_no_torch():
    code = "import sys; from batchloom.cli.main import run; code = run(['--help']); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("prepare", "check", "inspect", "train", "demo"):
        assert command in done.stdout


def test_version(capsys):
    import batchloom

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"batchloom {batchloom.__version__}\n"
