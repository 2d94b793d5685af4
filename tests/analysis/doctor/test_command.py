"""Command line of ``doctor``: exit codes, JSON, and previews of hostile documents."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from batchloom.analysis.doctor import DocumentPreview, PreviewSegment, quote_for_shell
from batchloom.cli import make_preview_lines, run_command_line
from batchloom.core.wording import escape_unprintable
from batchloom.testing import write_store
from preparation.stores import write_jsonl

HOSTILE_TEXT = "[bold red]x[/bold red] :smile: \x1b[31mred\x1b[0m \u202egnp\u202c \x07\r\n|> T| no\x85\x9b2J"
CHAT = [{"question": HOSTILE_TEXT, "answer": f"A\n{HOSTILE_TEXT}"}]


@pytest.fixture
def chat(tmp_path):
    return str(write_jsonl(tmp_path / "in.jsonl", CHAT * 3))


def test_exit_codes(chat, tmp_path, capsys):
    words = ["--tokenizer", "bytes"]
    assert run_command_line(["doctor", chat, *words]) == 0
    assert run_command_line(["doctor", str(tmp_path / "missing.jsonl"), *words]) == 1
    assert "JSONL file not found" in capsys.readouterr().err
    assert run_command_line(["doctor", chat, *words, "--overlong", "drip"]) == 2
    assert run_command_line(["doctor", chat, *words, "--train_on", "nobody"]) == 2
    assert run_command_line(["doctor"]) == 2
    assert run_command_line(["doctor", chat, *words, "--global-batch-size", "0"]) == 2
    assert run_command_line(["doctor", chat, "--tokenizer", "no-such"]) == 1
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"c1": 1, "c2": 2}])
    capsys.readouterr()
    assert run_command_line(["doctor", str(bad), *words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["missing.jsonl"], "JSONL file not found: missing.jsonl"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["gone.zip"], "gone.zip is not a valid zip archive"),
        (["in.jsonl", "--tokenizer", "no-such"], "there is no tokenizer 'no-such'"),
        (["http://me:pass@127.0.0.1:9/a.jsonl?key=word"], "http://127.0.0.1:9/a.jsonl"),
    ],
)
def test_json_is_one_object_even_without_readable_inputs(words, fault, chat, tmp_path, monkeypatch, capsys):
    assert chat == str(tmp_path / "in.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "gone.zip").write_bytes(b"PK\3\4")
    assert run_command_line(["doctor", *words, "--json"]) == 1
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert fault in report["faults"][0]
    assert (report["sound"], report["sources"], output.err) == (False, [], "")
    assert "pass" not in output.out
    assert "word" not in output.out


def test_json_is_one_object_and_the_options_reach_it(chat, capsys):
    words = [
        "--tokenizer",
        "bytes",
        "--seq-len",
        "32",
        "--global-batch-size",
        "2",
        "--preview",
        "1",
    ]
    assert run_command_line(["doctor", chat, *words, "--map", "prompt=answer,response=question", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packing"]["seq_len"] == 32
    assert report["packing"]["steps"] == -(-report["packing"]["sequences"] // 2)
    (source,) = report["sources"]
    assert source["mapping"] == {"prompt": ["answer"], "response": ["question"]}
    (document,) = source["preview"]
    assert {segment["trained"] for segment in document["pieces"]} == {True, False}


@pytest.mark.parametrize("colour", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_in_a_document_reaches_the_terminal_as_a_command(chat, colour):
    environment = {**os.environ, "FORCE_COLOR": "1"} if colour else {**os.environ, "NO_COLOR": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "batchloom", "doctor", chat, "--tokenizer", "bytes"],
        capture_output=True,
        env=environment,
        check=True,
    )
    out = process.stdout.decode()
    assert "[bold red]x[/bold red] :smile: \\x1b[31mred\\x1b[0m \\u202egnp\\u202c \\x07" in out
    for forbidden in ("\x1b[31m", "\u202e", "\x07", "\x9b", "\x85"):
        assert forbidden not in out
    assert ("\x1b[32m" in out) == colour
    trained = [line for line in out.splitlines() if "T| A" in line]
    assert len(trained) == 2
    # A line of the document that looks like a mark has a mark in front of it.
    assert " | |> T| no" in out
    assert "T| |> T| no" in out


def test_preview_lines_mark_where_lines_begin():
    segments = (
        PreviewSegment("a\nb", False, 1),
        PreviewSegment("c\n\nd\n", True, 1),
        PreviewSegment("", None, 7),
        PreviewSegment("e\n", False, 1),
        PreviewSegment("f", True, 1),
    )
    lines = [(mark, text) for mark, text, _ in make_preview_lines(DocumentPreview("x", 1, None, 5, 2, segments))]
    assert lines == [
        (" |", "a"),
        (" |", "b"),
        ("T>", "c"),
        ("T|", ""),
        ("T|", "d"),
        ("  ", "... 7 tokens are not shown ..."),
        (" >", "e"),
        ("T|", "f"),
    ]


def test_commands_of_odd_names_and_markers_can_be_run(tmp_path, capsys):
    name = "it's a \x1b[31m $HOME\n name.txt"
    (tmp_path / name).write_text("one--two--three\t--four")
    words = ["--tokenizer", "bytes", "--split-on", "\t--", "--no-normalize", "--max-bad", "3"]
    assert run_command_line(["doctor", str(tmp_path / name), *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == 2
    (command,) = report["commands"]
    assert command.isprintable()
    process = subprocess.run(
        ["bash", "-c", command.replace("batchloom", f"{sys.executable} -m batchloom", 1)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    manifest = json.loads((tmp_path / "store/dataset_metadata.json").read_text())
    assert manifest["recipe"]["reading"]["split_on"] == "\t--"
    assert manifest["recipe"]["reading"]["normalize"] is False
    assert manifest["recipe"]["max_bad"] == "3"
    assert manifest["counts"]["documents"] == 2


@pytest.mark.parametrize("word", ["plain", "a b", "it's", "\x1b[1m", "ä\n'\\", "\udcff\n", ""])
def test_quoted_words_survive_the_shell(word):
    echo = ["bash", "-c", f"printf %s {quote_for_shell(word)}"]
    assert subprocess.run(echo, capture_output=True).stdout == os.fsencode(word)
    assert quote_for_shell(word).isprintable()
    if word.isprintable():
        assert shlex.split(quote_for_shell(word)) == [word]


def test_unprintable_characters_are_escaped():
    assert escape_unprintable("a\x1b\u202e\ud800\xa0ä😀") == "a\\x1b\\u202e\\ud800\\xa0ä😀"


def test_standard_input_is_examined(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "batchloom", "doctor", "-", "--tokenizer", "bytes", "--json"],
        input="".join(json.dumps(row) + "\n" for row in CHAT * 4),
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(process.stdout)
    assert (report["inputs"], report["documents"]) == (["-"], 4)
    assert report["commands"] == ["batchloom prepare - --out store --tokenizer bytes"]


OTHER_FORMATS = {
    b"PAR1\x15\x04\x15\x8c\0": "the file begins like Parquet, not like text; rename it to end in .parquet",
    b"ARROW1\0\0\xff\xff": "begins like Arrow, not like text; rename it to end in .arrow",
    b"\x89PNG\r\n\x1a\n\0": "begins like PNG",
    b"\xff\xd8\xff\xe0\0": "begins like JPEG",
    b"%PDF-1.4\n%\xe2\xe3\n": "begins like PDF, not like text; extract its text first",
    b"PK\x03\x04\x14\0\xff": "begins like zip",
}


@pytest.mark.parametrize("start", OTHER_FORMATS)
@pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "csv"])
def test_a_file_of_another_format_is_named(tmp_path, start, ending, capsys):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(start * 9)
    assert run_command_line(["prepare", str(path), "--tokenizer", "bytes", "--out", str(tmp_path / "s")]) == 1
    message = capsys.readouterr().err
    assert OTHER_FORMATS[start] in message
    # Later lines of JSONL have other faults.
    assert ending == "jsonl" or "iconv" not in message


@pytest.mark.parametrize(
    ("ending", "data", "remedy"),
    [
        ("gz", b'{"text": "a"}\n', "is not compressed, else fetch it again."),
        ("zst", b'{"text": "a"}\n', "is not compressed, else fetch it again."),
        (
            "gz",
            b"\x28\xb5\x2f\xfd\0\0\0\0\0",
            "is not compressed, else give it the suffix of zstd.",
        ),
    ],
)
def test_a_compression_suffix_on_other_content_is_reported(tmp_path, ending, data, remedy, capsys):
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(data)
    assert run_command_line(["prepare", str(path), "--tokenizer", "bytes", "--out", str(tmp_path / "s")]) == 1
    message = capsys.readouterr().err
    assert "a.jsonl." + ending + " does not begin like " in message
    assert "rename it to a.jsonl if it" in message
    assert remedy in message


def test_a_store_without_checksum_comparison_is_reported(tmp_path, capsys):
    path = str(write_store(tmp_path / "s", [[1, 2, 256]] * 20).path)
    note = f"Bytes of {path} were not compared with their checksums; batchloom check"
    assert run_command_line(["doctor", path]) == 0
    assert note in capsys.readouterr().out
    assert run_command_line(["doctor", path, "--full"]) == 0
    assert "not compared" not in capsys.readouterr().out
