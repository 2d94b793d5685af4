"""The public interface: ``batchloom.prepare`` and the command line."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import batchloom
from batchloom.cli import run_command_line
from batchloom.cli.commands import load_command
from batchloom.preparation import Note, Progress
from batchloom.preparation.settings import parse_token_count
from preparation.stores import hash_store_files, write_jsonl

RUNNER = CliRunner()
COMMAND = load_command("prepare")


def run_prepare_command(*arguments):
    return RUNNER.invoke(COMMAND, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def input_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(200)])
    with path.open("a") as file:
        file.write('{"text":" "}\nbad\n')
    return path


def test_python(tmp_path, input_file):
    events = []
    result = batchloom.prepare(
        input_file, out=tmp_path / "out", tokenizer="bytes", val_fraction=0.1, progress=events.append
    )
    assert (result.path, result.already_done, result.dtype) == (tmp_path / "out", False, "uint16")
    assert (result.counts.records, result.counts.documents) == (202, 200)
    assert (result.counts.quarantined, result.counts.dropped) == (1, {"empty": 1})
    assert sum(subset.documents for subset in result.subsets.values()) == 200
    assert sum(subset.tokens for subset in result.subsets.values()) == result.counts.tokens
    last = [event for event in events if isinstance(event, Progress) and event.phase == "tokenize"][-1]
    assert (last.bytes_done, last.bytes_total) == (input_file.stat().st_size, input_file.stat().st_size)
    assert (last.documents, last.tokens, last.quarantined) == (200, result.counts.tokens, 1)


def test_python_stays_a_function_after_its_modules_are_loaded(tmp_path, input_file):
    code = (
        "import batchloom, batchloom.preparation.settings.recipe\n"
        "from batchloom import Recipe\n"
        f"batchloom.prepare({str(input_file)!r}, out={str(tmp_path / 'out')!r}, tokenizer='bytes')\n"
        f"assert batchloom.prepare([{str(input_file)!r}], out={str(tmp_path / 'out')!r}, tokenizer='bytes').already_done\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_python_without_a_listener_logs_what_is_left_out(tmp_path, caplog):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.pdf"):
        (tmp_path / "in" / name).write_text("text")
    batchloom.prepare(tmp_path / "in", out=tmp_path / "out", tokenizer="bytes", val_fraction=0, allow_skipped=True)
    default_note, left_out = caplog.messages
    assert default_note.startswith("Removing exact duplicates, ")
    assert left_out == "Left out of in: 1 .pdf."


@pytest.mark.parametrize(("model", "lossy"), [({}, True), ({"unk_token": "a"}, False)])
def test_a_tokenizer_that_loses_characters_says_so(tmp_path, input_file, model, lossy):
    definition = {"type": "BPE", "vocab": {"a": 0, "<eos>": 1}, "merges": [], **model}
    control = {"id": 1, "content": "<eos>", "special": True}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": definition, "added_tokens": [control]}))
    result = batchloom.prepare(input_file, out=tmp_path / "out", tokenizer=str(path))
    notes = [note for note in result.notes if "not counted" in note]
    assert bool(notes) is lossy


def test_the_command_reports_inputs_and_outputs(tmp_path, input_file):
    out = tmp_path / "out"
    first = run_prepare_command(
        input_file,
        "--out",
        out,
        "--tokenizer",
        "bytes",
        "--val-fraction",
        "0.1",
        "--tokens-per-shard",
        "1K",
    )
    assert first.exit_code == 0
    table = " ".join(first.stdout.split())
    assert "records read 202" in table
    assert "dropped: empty 1" in table
    assert "quarantined (see" in table
    assert "documents kept 200" in table
    assert "subset documents tokens shards train" in table
    second = run_prepare_command(
        input_file,
        "--out",
        out,
        "--tokenizer",
        "bytes",
        "--val-fraction",
        "0.1",
        "--tokens-per-shard",
        "1_000",
    )
    assert second.exit_code == 0
    assert "is finished already; nothing to do" in second.stdout
    batchloom.prepare(input_file, out=tmp_path / "same", tokenizer="bytes", val_fraction=0.1, tokens_per_shard=1000)
    assert hash_store_files(out) == hash_store_files(tmp_path / "same")


def test_json_is_one_object_on_standard_output(tmp_path, input_file):
    (tmp_path / "b.pdf").write_text("x")
    options = ("--tokenizer", "bytes", "--json", "--allow-skipped")
    result = run_prepare_command(tmp_path, "--out", tmp_path / "out", *options)
    facts = json.loads(result.stdout)
    assert facts["counts"] == {
        "records": 202,
        "documents": 200,
        "tokens": facts["subsets"]["train"]["tokens"] + facts["subsets"]["val"]["tokens"],
        "quarantined": 1,
        "dropped": {"empty": 1},
    }
    assert facts["notes"][1:] == [f"Left out of {tmp_path.name}: 1 .pdf."]
    assert facts["notes"][0].startswith("Removing exact duplicates, ")
    for note in facts["notes"]:
        assert note in result.stderr


def test_options_that_are_misused(tmp_path, input_file):
    assert run_prepare_command(input_file).exit_code == 2
    assert (
        run_command_line(["prepare", str(input_file), "--out", str(tmp_path / "out"), "--tokens-per-shard", "many"])
        == 2
    )
    assert run_prepare_command("--out", tmp_path / "out").exit_code == 2


def test_a_marker_can_hold_a_newline(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\n")
    result = run_prepare_command(
        tmp_path / "a.txt",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--split-on",
        r"\n---\n",
        "--json",
    )
    assert json.loads(result.stdout)["counts"]["documents"] == 2


@pytest.mark.parametrize(
    ("size_text", "size"),
    [
        ("100M", 10**8),
        ("1G", 10**9),
        ("100_000", 100_000),
        ("1,000", 1000),
        ("2.5k", 2500),
        ("7", 7),
    ],
)
def test_sizes(size_text, size):
    assert parse_token_count(size_text) == size


def test_plain_lines_report_progress(capsys, monkeypatch):
    from batchloom.cli import prepare as module

    monkeypatch.setattr(module, "_PROGRESS_SECONDS", 0.0)
    with module.ProgressDisplay() as display:
        display.show(Note("Left out: [bold]."))
        display.show(Progress("sample", 0, 10**6, 0, 0, 0, 0))
        display.show(Progress("tokenize", 5 * 10**5, 10**7, 0, 1, 1, 0))
        display.show(Progress("tokenize", 25 * 10**5, 10**7, 0, 1234, 56_789, 2))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Left out: [bold]."
    assert lines[1] == "sampling: 0%, 1.0 MB of input"
    assert lines[3].startswith("tokenizing: 25%, 2.5 MB of 10.0 MB, 1,234 documents, 56,789 tokens, ")
    assert lines[3].endswith(" left, 2 quarantined")
