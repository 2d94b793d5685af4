"""Secrets in URLs on the command line: no message and no file shows them."""

import pytest

from batchloom import InputError, open_store, prepare
from batchloom.cli import run_command_line

URL = "https://somebody:s3cret@127.0.0.1:9/a%s?X-Amz-Signature=s3cret&x=1#s3cret"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["prepare", "IN", "--out", URL % ""], 1),
        (["prepare", "IN", "--out", "OUT", "--tokenizer", URL % ".json"], 1),
        (
            ["prepare", "IN", "--out", "OUT", "--tokenizer", "bytes", "--template", URL % ".jinja"],
            1,
        ),
        (["prepare", "IN", "--out", "OUT", "--text-field", "a", "--map", "text=" + URL % ""], 2),
        (["prepare", "IN", "--out", "OUT", "--dtype", URL % ""], 2),
        (["prepare", "(" + URL % ".jsonl", "--out", "OUT"], 1),
        (["convert", "IN", "--out", URL % ".jsonl"], 1),
        (["convert", "IN", "--out", "OUT.txt" + URL % ".jsonl"], 1),
        (["inspect", URL % ""], 1),
        (["import", URL % ".bin", "--out", "OUT", "--dtype", "uint16", "--vocab-size", "9"], 1),
        (["export", URL % "", "--to", "flat", "--out", "OUT"], 1),
        (["upload", URL % "", "memory://bucket/a"], 1),
        (["train", "--data", URL % ""], 1),
        (["train", "--input-file", URL % ".jsonl", "--tokenizer", "bytes"], 1),
        (["train", "--max-iters", URL % "", "--data", "x"], 2),
        (["prepare", "https://somebody:s3cret@[host/a.jsonl", "--out", "OUT"], 1),
        (["prepare", "https://127.0.0.1:99999/a.jsonl?s3cret", "--out", "OUT"], 1),
    ],
)
def test_no_message_and_no_file_holds_a_secret(tmp_path, monkeypatch, capsys, arguments, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("some text")
    arguments = [argument.replace("IN", "in.txt").replace("OUT", str(tmp_path / "out")) for argument in arguments]
    assert run_command_line(arguments) == code
    output = capsys.readouterr()
    assert "s3cret" not in output.out + output.err
    assert "Traceback" not in output.err
    assert [path.name for path in tmp_path.rglob("*")] == ["in.txt"]


def test_python_errors_hold_no_secret(tmp_path):
    (tmp_path / "in.txt").write_text("some text")
    for call, message in (
        (lambda: open_store(URL % ""), "Failed to download https://127.0.0.1:9/a"),
        (lambda: prepare(tmp_path / "in.txt", out=URL % ""), "is a URL .https://.*cannot be written to"),
    ):
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("argument", "quoted"),
    [
        (URL % "b", "https://...@127.0.0.1:9/ab?...#..."),
        ("s3://key:s3cret@bucket/x", "s3://...@bucket/x"),
        ("a?b", "a?b"),
        ("user@host", "user@host"),
    ],
)
def test_only_secret_parts_of_a_url_are_omitted(argument, quoted, capsys):
    assert run_command_line([argument]) == 2
    assert f"No such command '{quoted}'" in capsys.readouterr().err
