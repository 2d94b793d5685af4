"""Colors, progress and ``--quiet``, in pipes and terminals."""

import functools
import io
import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from batchloom.cli import run_command_line, terminal
from batchloom.testing import write_store
from processes import ProcessResult

TEXT = [[*b"it was the best of times, it was the worst of times", 256]] * 20
RED, ERASE_LINE = b"\x1b[31m", b"\x1b[2K"
COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM")


def make_environment(variables):
    return {name: value for name, value in os.environ.items() if name not in COLOR_VARIABLES} | variables


def read_terminal(reader):
    """Read what a terminal receives until all its writers have closed it."""
    output = b""
    with suppress(OSError):  # the end of a terminal's output
        while chunk := os.read(reader, 1 << 16):
            output += chunk
    os.close(reader)
    return output


def run_process_in_terminal(*words, **variables):
    """Run a process whose output is a terminal; return what the terminal received."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "batchloom", *words]
    # A terminal holds a few kilobytes: a command with more output waits for a reader.
    with subprocess.Popen(command, env=make_environment(variables), stdout=writer, stderr=writer):
        os.close(writer)
        return read_terminal(reader)


@contextmanager
def change_environment(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name in COLOR_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        # A command has one console, which reads the environment when it is made.
        patch.setattr(terminal, "_get_console", functools.cache(terminal.plain_console))
        yield patch


def run_in_terminal(*words, **variables):
    """Run a command whose output is a terminal; return what the terminal received."""
    reader, writer = pty.openpty()
    with ThreadPoolExecutor(1) as pool, change_environment(variables) as patch:
        output = pool.submit(read_terminal, reader)
        with open(writer, "w") as stream:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, stream)
            run_command_line(words)
        return output.result()


def run_in_pipe(*words, **variables):
    """Run a command whose output is a pipe; return its exit code, output and errors."""
    outputs = {}
    with change_environment(variables) as patch:
        for name in ("stdout", "stderr"):
            outputs[name] = io.StringIO()
            patch.setattr(sys, name, outputs[name])
        code = run_command_line(words)
    return ProcessResult(code, *(output.getvalue() for output in outputs.values()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    store = write_store(tmp_path / "s", TEXT)
    (store.path / "train/shard_00000.bin").write_bytes(bytes(2080))
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_colors_follow_the_terminal_and_the_environment(folder):
    output = run_process_in_terminal("check", "s", TERM="xterm")
    assert RED in output
    assert output == run_in_terminal("check", "s", TERM="xterm")
    for variables in ({"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}):
        output = run_in_terminal("check", "s", **variables)
        assert b"FAULT" in output
        assert b"\x1b" not in output
    assert "\x1b" not in run_in_pipe("check", "s", TERM="xterm").stdout
    assert RED.decode() in run_in_pipe("check", "s", TERM="xterm", FORCE_COLOR="1").stdout


def test_progress_is_redrawn_on_a_terminal_only(folder):
    words = ["prepare", "in.jsonl", "--tokenizer", "bytes", "--out"]
    assert ERASE_LINE in run_in_terminal(*words, "a", TERM="xterm")
    assert b"\x1b" not in run_in_terminal(*words, "b", TERM="dumb")
    assert ERASE_LINE not in run_in_terminal(*words, "c", "--quiet", TERM="xterm")
    forced = run_in_pipe(*words, "d", TERM="xterm", FORCE_COLOR="1")
    assert forced.returncode == 0
    assert ERASE_LINE.decode() not in forced.stderr


@pytest.mark.parametrize(
    ("words", "result", "warnings"),
    [
        (
            ["prepare", "in.jsonl", "--out", "o", "--tokenizer", "bytes", "--val-fraction", "0"],
            "documents kept",
            ["Removing exact duplicates, keeping the first copy (--no-dedup keeps all)."],
        ),
        (["convert", "in.jsonl", "--out", "-"], '{"text":"two"}', []),
    ],
)
def test_quiet_leaves_only_the_result_and_warnings(folder, words, result, warnings, capfd):
    assert run_command_line(words) == 0
    output = capfd.readouterr()
    assert output.err
    for path in folder.glob("o*"):
        path.rename(folder / "earlier")
    assert run_command_line([*words, "-q"]) == 0
    quiet_output = capfd.readouterr()
    assert quiet_output.err.splitlines() == warnings
    assert result in quiet_output.out
    assert len(quiet_output.out.splitlines()) == len(output.out.splitlines())


def test_quiet_keeps_warnings(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ".hidden.jsonl").write_text("{}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "in" / "m.jsonl").write_text(json.dumps({"messages": turns}))
    words = ["prepare", "in", "--tokenizer", "bytes", "--val-fraction", "0.001", "--no-dedup", "--out"]
    assert run_command_line([*words, "a"]) == 0
    notes = capfd.readouterr().err.splitlines()
    assert run_command_line([*words, "b", "-q"]) == 0
    warnings = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in warnings] == [
        "Left out of in",
        "Tokenizer 'bytes' has no chat template",
        "There is no val subset",
    ]
    assert set(warnings) < set(notes)


def test_quiet_training_prints_one_line(folder, capfd):
    write_store("fine", TEXT)
    sizes = ["--seq-len", "64", "--global-batch-size", "2", "--max-iters", "2"]
    assert run_command_line(["train", "--data", "fine", *sizes, "--device", "cpu", "--out", "run", "-q"]) == 0
    output = capfd.readouterr()
    assert (output.out, output.err) == ("run: 2 steps\n", "")


def test_quiet_keeps_errors(folder, capfd):
    assert run_command_line(["prepare", "missing.jsonl", "--out", "o", "--quiet"]) == 1
    assert capfd.readouterr().err.startswith("batchloom: ")
