"""Exit codes: one for each meaning in the table, of commands and of real processes."""

import json
import signal
import subprocess
import sys

import pytest

from batchloom.cli import run_command_line
from batchloom.core.errors import ExitCode
from batchloom.testing import write_store
from waiting import wait_until

TEXT = [[*b"it was the best of times, it was the worst of times", 256]] * 20


def run_batchloom(*words, cwd):
    command = [sys.executable, "-m", "batchloom", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "s", TEXT)
    write_store(tmp_path / "faulty", TEXT)
    shard = tmp_path / "faulty/train/shard_00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    (tmp_path / "bad.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "recipe.yaml").write_text("tokeniser: bytes\n")
    for name, losses in (("a", [3.0, 2.0]), ("b", [3.0, 2.5])):
        entries = [{"kind": "step", "step": step, "loss": loss, "trained": 9} for step, loss in enumerate(losses, 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["check", "s"], ExitCode.DONE),
        (["--version"], ExitCode.DONE),
        (["check", "faulty"], ExitCode.FAILED),
        (["check", "missing"], ExitCode.FAILED),
        (["doctor", "bad.jsonl"], ExitCode.FAILED),
        (["inspect", "missing"], ExitCode.FAILED),
        (["compare", "--runs", "a.jsonl", "b.jsonl", "--tolerance", "0.01"], ExitCode.FAILED),
        ([], ExitCode.USAGE),
        (["frobnicate"], ExitCode.USAGE),
        (["check"], ExitCode.USAGE),
        (["inspect", "s", "--seq-len", "many"], ExitCode.USAGE),
        (["prepare", "bad.jsonl", "--out", "o", "--dedup", "fuzzy"], ExitCode.USAGE),
        (["prepare", "bad.jsonl", "--out", "o", "--recipe", "recipe.yaml"], ExitCode.USAGE),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else value.name,
)
def test_a_command_ends_with_its_exit_code(folder, words, code, capfd):
    returned = run_command_line(words)
    output = capfd.readouterr()
    assert returned == code, output.err
    assert "Traceback" not in output.err
    assert (output.out == "") == (code is ExitCode.USAGE or words[0] == "inspect")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["check", "faulty"], ExitCode.FAILED),
        (["inspect", "s", "--seq-len", "many"], ExitCode.USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_a_process_ends_with_the_exit_code_and_output_of_its_command(folder, words, code, capfd):
    result = run_batchloom(*words, cwd=folder)
    assert result.returncode == code == run_command_line(words)
    assert (result.stdout, result.stderr) == capfd.readouterr()


# A process inherits ignored signals: SIGHUP under nohup, SIGINT in the background of a shell.
START_WITH_DEFAULT_SIGNALS = """
import signal
import sys

for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

from batchloom.cli.main import main

sys.argv[0] = "batchloom"
main()
"""


@pytest.mark.parametrize(
    ("signal_number", "exit_code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        pytest.param(signal.SIGTERM, ExitCode.TERMINATED, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, ExitCode.HUNG_UP, marks=pytest.mark.slow),
    ],
)
def test_a_stop_in_the_middle_of_the_work(tmp_path, signal_number, exit_code):
    """A signal during the work stops the command with its exit code."""
    # It takes far longer to prepare them all than to stop.
    (tmp_path / "a.txt").write_bytes(b"a line of the text\n" * 3_000_000)
    arguments = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", START_WITH_DEFAULT_SIGNALS, *arguments, "--tokenizer", "bytes"]
    units = tmp_path / "out" / ".work" / "units"
    with subprocess.Popen([*command, "--split-on", "line"], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: units.exists() or process.poll() is not None, "the first unit")
        assert process.poll() is None
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == exit_code
    assert errors.strip().splitlines()[-1].startswith("batchloom: Stopped.")
    assert "Traceback" not in errors
