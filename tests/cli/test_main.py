"""Command line: names from other tools, exit codes and one sentence per error."""

import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import fastokens
import pytest

import batchloom
from batchloom.cli import commands, prepare as prepare_module, run_command_line
from batchloom.cli.commands import normalize_arguments
from batchloom.preparation import Progress
from batchloom.testing import write_store
from batchloom.tokens import train_tokenizer

TEXT = [[*b"it was the best of times, it was the worst of times", 256]] * 20


@pytest.mark.parametrize(
    ("arguments", "normalized"),
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
        (["train", "--dataset_dir=my_store"], ["train", "--data", "my_store"]),
        (
            ["convert", "--csv", "a.csv", "--output", "b.jsonl"],
            ["convert", "a.csv", "--out", "b.jsonl"],
        ),
        (["convert", "--dataset", "org/name", "--out", "b"], ["convert", "org/name", "--out", "b"]),
    ],
)
def test_names_from_other_tools(arguments, normalized):
    assert normalize_arguments(arguments) == normalized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["prepare", "a", "--out", "o", "--tokens-per-shard", "-5"],
            "--tokens-per-shard: '-5' is not a size",
        ),
        (["prepare", "a", "--out", "o", "--val_fraction=2"], "--val-fraction: 2.0 is not in"),
        (
            ["prepare", "a", "--out", "o", "--memory-per-worker=0"],
            "--memory-per-worker: '0' is not a size of at least 67,108,864 bytes",
        ),
        (["prepare", "a", "--out", "o", "--val-fraction", "x"], "batchloom: --val-fraction: 'x' is not a number\n"),
        (["inspect", "s", "--first", "1.5"], "batchloom: --first: '1.5' is not a whole number\n"),
        (["demo", "--steps", "0"], "batchloom: --steps: 0 is less than 1\n"),
        (["train", "--data", "s", "--max-iters", "-2"], "--max-iters: -2 is not a whole number from 1 to"),
    ],
)
def test_a_problem_is_named_as_it_was_typed(arguments, message, capsys):
    assert run_command_line(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "--data", "a", "--data=b"], "--data"),
        (["prepare", "a", "--out", "b", "--dedup", "none", "--no-dedup"], "--dedup"),
        (["prepare", "a", "--out", "b", "--normalize", "--no-normalize"], "--normalize"),
        (["import", "a", "--out", "b", "--out_dir", "c"], "--out"),
        (["convert", "a", "--out", "b", "--force", "--force"], "--force"),
    ],
)
def test_an_option_with_one_value_is_given_once(arguments, option, capsys):
    assert run_command_line(arguments) == 2
    assert f"batchloom: {option}: it is given 2 times" in capsys.readouterr().err


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_help_is_printed_as_it_is_written(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command_line([command, "--help"]) == 0
    output = capsys.readouterr().out
    assert "\\[" not in output
    assert re.search(rf"Examples:\s+(torchrun .*)?batchloom {command}", output)
    assert not re.search("<[a-z]", output)
    if command == "prepare":
        assert output.count("--text-field") == 1
        assert "(org/name[:config][/split][@revision])" in output


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_examples_of_the_help_can_be_parsed(name):
    command = commands.load_command(name)
    for example in command.epilog.splitlines():
        words = shlex.split(example.partition("batchloom ")[2])
        assert words[0] == name
        command.make_context(name, words[1:])


def test_help_lists_the_summary_of_each_command(capsys):
    assert run_command_line(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    summaries = {name: commands.load_command(name).help.partition("\n")[0] for name in commands.COMMANDS}
    assert [line.split(maxsplit=1) for line in lines] == [list(item) for item in summaries.items()]


def test_options_that_may_be_repeated_and_help_are_not_counted(tmp_path, capsys):
    assert run_command_line(["prepare", "--help", "-h"]) == 0
    arguments = ["import", "--out", "o", "--vocab-size", "9", "--val", "a", "--val", "b", "c"]
    assert run_command_line(arguments) == 1
    assert "given 2 times" not in capsys.readouterr().err


def test_a_value_that_is_no_choice_is_refused_with_a_suggestion(capsys):
    assert run_command_line(["inspect", "missing", "--split", "vall"]) == 2
    assert capsys.readouterr().err == ("batchloom: --split: 'vall' is none of train, val, test; did you mean 'val'?\n")


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("prepare", "--num-proc", "Did you mean '--workers'?"),
        ("prepare", "--text_column", "Did you mean '--text-field'?"),
        ("train", "--learning-rate", "Did you mean '--lr'?"),
        ("train", "--max-steps", "Did you mean '--max-iters'?"),
        ("train", "--epochs", "Did you mean '--max-iters'?"),
        ("train", "--seqlen", "Did you mean '--seq-len'?"),
        ("prepare", "--seq-len", "No such option '--seq-len'. It is an option of doctor, inspect, view, plan, train,"),
        ("inspect", "--num-proc", "No such option '--num-proc'"),
    ],
)
def test_an_option_of_another_program_names_ours(command, option, hint, capsys):
    assert run_command_line([command, "a", option, "3"]) == 2
    assert hint in capsys.readouterr().err


def test_a_table_in_a_pipe_is_complete(capsys):
    assert run_command_line(["datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    for entry, line in zip(batchloom.list_datasets(), lines, strict=True):
        assert line.split()[0] == entry["name"]
        assert entry["input"] in line
        assert line.rstrip().endswith(entry["description"])


def test_old_names_work(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("some text\n")
    out = tmp_path / "store"
    arguments = [
        "prepare",
        "--input_files",
        str(tmp_path / "in.txt"),
        "--out_dir",
        str(out),
        "--tokenization",
        "bytes",
    ]
    assert run_command_line([*arguments, "--tokens_per_shard", "1000", "--no_dedup", "--no_normalize"]) == 0
    assert (out / "dataset_metadata.json").exists()
    capsys.readouterr()


def test_check_distinguishes_sound_faulty_and_misuse(tmp_path, capsys):
    write_store(tmp_path / "s", TEXT)
    assert run_command_line(["check", str(tmp_path / "s")]) == 0
    assert "sound" in capsys.readouterr().out
    (tmp_path / "s/train/shard_00000.bin").write_bytes(b"\0" * 2080)
    assert run_command_line(["check", str(tmp_path / "s"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["sound"] is False
    assert "checksum" in report["faults"][0]
    assert run_command_line(["check", str(tmp_path / "nothing")]) == 1
    assert run_command_line(["check"]) == 2
    assert run_command_line(["check", str(tmp_path), "--nonsense"]) == 2
    assert run_command_line(["frobnicate"]) == 2
    capsys.readouterr()


def test_check_of_raw_files(tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"text": "a"}\n{"text": "b"}\n')
    bad.write_text('{"text": "a"}\n\n{"text": 5}\n{"text": "b"\n')
    assert run_command_line(["check", str(good)]) == 0
    assert "2 documents, 0 empty, 0 bad" in capsys.readouterr().out
    assert run_command_line(["check", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "line 3" in out
    assert "Invalid JSON on line 4 in bad.jsonl, column 13: " in out
    (tmp_path / "plain.txt").write_text("hello")
    assert run_command_line(["check", str(tmp_path / "plain.txt")]) == 0
    capsys.readouterr()
    bad.unlink()
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    assert run_command_line(["check", str(tmp_path)]) == 0
    assert f"note:        Left out of {tmp_path.name}: 1 .pdf." in capsys.readouterr().out


def test_inspect_shows_the_store(tmp_path, capsys):
    write_store(tmp_path / "s", [*TEXT, [1] * 300])
    assert run_command_line(["inspect", str(tmp_path / "s"), "--seq-len", "128"]) == 0
    out = capsys.readouterr().out
    assert "21 documents, 1,340 tokens (uint16) in 1 shard\n" in out
    assert "best_fit" in out
    assert "it was the best of times" in out
    assert run_command_line(["inspect", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 300
    assert run_command_line(["inspect", str(tmp_path / "s"), "--first", "-1"]) == 2
    assert "--first: -1 is not a number of documents" in capsys.readouterr().err


def test_inspect_reports_how_a_loader_handles_long_conversations(tmp_path, capsys):
    rows = [{"question": "?" * n, "answer": "!"} for n in (1, 500)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    assert run_command_line(["inspect", str(tmp_path / "s"), "--seq-len", "128"]) == 0
    assert "1 document is longer than 128 tokens: overlong='split' cuts, 'drop' (the default" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert "no document is longer than 2,048 tokens" in capsys.readouterr().out


def test_a_setting_is_named_as_it_was_typed(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    arguments = ["prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "s")]
    assert run_command_line([*arguments, "--overlong", "split", "--train-on", "asistant"]) == 2
    message_lines = capsys.readouterr().err.removeprefix("batchloom: ").splitlines()
    assert [line.partition(":")[0] for line in message_lines] == ["--train-on", "--overlong"]


def test_an_error_is_one_sentence_without_a_traceback(tmp_path, capsys):
    for arguments in (
        ["inspect", "no/such/store"],
        ["train", "--data", "no/such/store"],
        ["prepare", "nope.txt", "--out", str(tmp_path / "o")],
    ):
        assert run_command_line(arguments) in (1, 2)
        sentence = capsys.readouterr().err
        assert sentence.startswith("batchloom: ")
        assert len(sentence.strip().splitlines()) == 1
        assert "Traceback" not in sentence


@pytest.mark.parametrize("words", [["--help"], pytest.param(["frobnicate"], marks=pytest.mark.slow)])
def test_the_module_works_like_the_command(words):
    script = Path(sys.executable).with_name("batchloom")
    by_script, by_module = (
        subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        for command in ([str(script)], [sys.executable, "-m", "batchloom"])
    )
    assert (by_module.returncode, by_module.stdout, by_module.stderr) == (
        by_script.returncode,
        by_script.stdout,
        by_script.stderr,
    )
    assert "python -m" not in by_module.stdout + by_module.stderr
    assert "batchloom" in by_module.stdout + by_module.stderr


@pytest.mark.parametrize(
    "redirections",
    [
        "<&- >&- 2>&-",
        *(pytest.param(redirection, marks=pytest.mark.slow) for redirection in ("<&-", ">&-", "2>&-")),
    ],
)
def test_closed_streams_do_no_harm(tmp_path, redirections):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 3)
    arguments = "prepare a.jsonl --out s --tokenizer bytes"
    completed = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m batchloom {arguments} {redirections}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, "Traceback" in completed.stderr) == (0, False)
    assert run_command_line(["check", str(tmp_path / "s")]) == 0


def list_loaded_modules(*arguments):
    """Run a command in a new process; return the modules that it loaded."""
    script = (
        "import json, sys; from batchloom.cli.main import run_command_line;"
        f"code = run_command_line({arguments!r}); print(json.dumps(sorted(sys.modules))); sys.exit(code)"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(completed.stdout.splitlines()[-1]))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_few_modules(option):
    loaded = list_loaded_modules(option)
    assert {name for name in loaded if name.startswith("batchloom.")} == {
        "batchloom.cli",
        *(f"batchloom.cli.{name}" for name in ("commands", "main", "options", "terminal")),
        "batchloom.core",
        *(f"batchloom.core.{name}" for name in ("errors", "files", "settings", "slow_loads", "wording")),
    }
    assert loaded & {"torch", "numpy", "pydantic", "pyarrow", "fsspec", "jinja2", "rich", "yaml"} == set()


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        (
            "check",
            {"batchloom.preparation", "batchloom.sources.listing", "batchloom.plan", "batchloom.batches", "rich"},
        ),
        ("inspect", {"batchloom.preparation.settings", "batchloom.sources", "batchloom.batches"}),
        ("log", {"batchloom.preparation", "batchloom.sources", "batchloom.plan", "batchloom.batches", "tokenizers"}),
    ],
)
def test_a_command_for_a_store_loads_few_modules(tmp_path, command, unneeded):
    write_store(tmp_path / "s", TEXT)
    loaded = list_loaded_modules(command, str(tmp_path / "s"))
    common = {"torch", "transformers", "fastokens", "pydantic", "pyarrow", "fsspec", "jinja2", "yaml", "numpy.ma"}
    unneeded |= {"multiprocessing", "asyncio", "batchloom.chat", "batchloom.text"}
    assert loaded & (common | unneeded) == set()


def test_the_garbage_collector_runs_in_a_command_and_skips_modules(tmp_path):
    write_store(tmp_path / "s", TEXT)
    script = (
        "import atexit, gc, sys\n"
        "from batchloom.cli.main import main\n"
        "atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 10_000))\n"
        "main()\n"
    )
    for arguments, state in ((["log", "s"], "True True"), (["--help"], "False True")):
        command = [sys.executable, "-c", script, *arguments]
        completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert completed.stdout.splitlines()[-1] == state


def write_tokenizer(folder):
    """Write a small tokenizer.json."""
    tokenizer = train_tokenizer(["some text and some more"], 258)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.state()["tokenizer"]))


# Loads a tokenizer as slowly as its standard input says.
SLOW_TOKENIZER = """
import sys, fastokens
from batchloom.cli.main import main

class SlowTokenizer:
    @staticmethod
    def from_json_str(text, load=fastokens.Tokenizer.from_json_str):
        sys.stdin.readline()
        return load(text)

fastokens.Tokenizer = SlowTokenizer
sys.argv = ["batchloom", "doctor", "in.jsonl", "--tokenizer", "tokenizer.json"]
main()
"""


@pytest.mark.slow
def test_a_spinner_names_what_loads_slowly_on_a_terminal(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "some text"}\n')
    write_tokenizer(tmp_path)
    words = [sys.executable, "-c", SLOW_TOKENIZER]
    environment = {**os.environ, "TERM": "xterm"}
    options = {"cwd": tmp_path, "env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    reader, terminal = pty.openpty()
    output = b""
    with subprocess.Popen(words, stderr=terminal, **options) as process:
        os.close(terminal)
        while b"Loading" not in output:
            output += os.read(reader, 1 << 16)
        process.stdin.write(b"\n")
        process.stdin.close()
        with suppress(OSError):  # the end of a terminal's output
            while chunk := os.read(reader, 1 << 16):
                output += chunk
    os.close(reader)
    assert process.returncode == 0
    assert b"Loading tokenizer tokenizer.json ..." in output
    # The spinner's line is erased, and the cursor is visible again.
    assert output.index(b"\x1b[2K", output.index(b"Loading")) > 0
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"Loading")


def test_no_spinner_is_shown_in_a_pipe(tmp_path, monkeypatch, capfd):
    class SlowTokenizer:
        @staticmethod
        def from_json_str(text, load=fastokens.Tokenizer.from_json_str):
            # Longer than the spinner waits on a terminal.
            time.sleep(0.7)
            return load(text)

    (tmp_path / "in.jsonl").write_text('{"text": "some text"}\n')
    write_tokenizer(tmp_path)
    monkeypatch.setattr(fastokens, "Tokenizer", SlowTokenizer)
    words = ["doctor", str(tmp_path / "in.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run_command_line(words) == 0
    assert capfd.readouterr().err == ""


def test_version(capsys):
    import batchloom

    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"batchloom {batchloom.__version__}\n"


@pytest.mark.parametrize(("command", "advice"), [("prepare", "the same command again"), ("doctor", "")])
def test_a_stop_advises_to_go_on_only_where_something_is_written(command, advice, monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "execute", interrupt)
    assert run_command_line([command, "x"]) == 130
    error = capsys.readouterr().err
    assert error == "batchloom: Stopped.\n" or (advice and advice in error)


MAIN = "import batchloom.cli.main as m; m.main()"


@pytest.mark.parametrize(
    ("module", "entry"),
    [
        ("click", "-m"),
        ("batchloom.core.errors", MAIN),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(("numpy", "rich.console"), ("-m", MAIN))
        ),
        pytest.param("click", MAIN, marks=pytest.mark.slow),
        pytest.param("batchloom.core.errors", "-m", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_the_command_is_being_loaded(module, entry):
    """SIGINT during any import stops the command with exit code 130."""
    script = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['batchloom', 'prepare', 'a', '--out', 'b']\n"
    )
    script += "runpy.run_module('batchloom', run_name='__main__')\n" if entry == "-m" else entry
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 130
    assert completed.stderr.startswith("batchloom: Stopped.")
    assert completed.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "remedy"), [("prepare", "1 GiB"), ("train", "--batch-size"), ("check", "more")])
def test_the_remedy_for_little_memory_fits_the_command(command, remedy, monkeypatch, capsys):
    def raise_memory_error(arguments):
        raise MemoryError

    monkeypatch.setattr(commands, "execute", raise_memory_error)
    assert run_command_line([command]) == 1
    message = capsys.readouterr().err
    assert remedy in message
    assert ("--batch-size" in message) == (command == "train")


def test_names_are_printed_as_they_are(tmp_path, capsys):
    """Markup and emoji codes in a path are printed literally."""
    (tmp_path / "a.txt").write_text(":smile: [bold]")
    out = tmp_path / "[bold]:smile:[" / "]"
    assert run_command_line(["prepare", str(tmp_path / "a.txt"), "--out", str(out), "--tokenizer", "bytes"]) == 0
    assert str(out) in capsys.readouterr().out
    assert run_command_line(["check", str(out)]) == 0
    assert f"{out}: sound" in capsys.readouterr().out
    assert run_command_line(["inspect", str(out)]) == 0
    assert "document 0 begins ':smile: [bold]" in capsys.readouterr().out


def test_a_name_that_is_no_utf8_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    words = [
        "prepare",
        "a.txt",
        "--out",
        os.fsdecode(b"out\xff"),
        *["--tokenizer", "bytes", "--val-fraction=0", "--no-dedup"],
    ]
    command = [sys.executable, "-m", "batchloom", *words]
    completed = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert (completed.returncode, completed.stderr) == (0, b"")
    assert run_command_line([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "out\ufffd"


def test_output_that_cannot_be_printed_is_one_sentence(tmp_path):
    write_store(tmp_path / "s", TEXT)
    # Buffered output is written twice: by the command, and again at exit.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        completed = subprocess.run(
            [sys.executable, "-m", "batchloom", "check", "s"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment,
            text=True,
            timeout=300,
            check=False,
        )
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[0].startswith("batchloom: The system refused [ENOSPC]: the disk")
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 5000 + ".5G", "10000G"])
def test_sizes_of_thousands_of_digits(size, capsys):
    assert run_command_line(["prepare", "a", "--out", "b", "--tokens-per-shard", size]) == 2
    assert len(capsys.readouterr().err) < 500


def test_the_displayed_speed_counts_from_the_start_of_the_phase(capsys, monkeypatch):
    """Work of an earlier run, and work before the first report, do not count."""
    clock = [0.0]
    monkeypatch.setattr(prepare_module.time, "monotonic", lambda: clock[0])
    display = prepare_module.ProgressDisplay()
    clock[0] = 100.0
    display.show(Progress("write", 600_000_000, 1_200_000_000, 500_000_000, 1, 2, 0))
    first_line = capsys.readouterr().err
    assert "50%, 600.0 MB of 1,200.0 MB" in first_line
    assert "/s" not in first_line
    clock[0] = 110.0
    display.show(Progress("write", 700_000_000, 1_200_000_000, 500_000_000, 1, 2, 0))
    assert "10.0 MB/s, 50 s left" in capsys.readouterr().err


def test_ingest_settings_are_named_by_their_option(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("{}")
    arguments = ["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert run_command_line([*arguments, "--split-on", "lines", "--text-field", ""]) != 0
    message = capsys.readouterr().err
    assert "--text-field: '' is not a text" in message
    assert "--split-on: 'lines' is not known" in message


def test_control_characters_in_names_and_templates_are_escaped(tmp_path, capsys):
    hostile_folder = tmp_path / "\x1b[31mevil\u202e"
    hostile_folder.mkdir()
    (hostile_folder / "in.jsonl").write_text('{"prompt": "q", "response": "a"}\n' * 20 + "no\n")
    (hostile_folder / "t.jinja").write_text("{{ raise_exception('no \x1b[31mway\x07') }}")
    (hostile_folder / "cut.csv").write_text('text\n"open')
    input_file, options = str(hostile_folder / "in.jsonl"), ["--tokenizer", "bytes"]
    store = str(hostile_folder / "out")
    assert run_command_line(["prepare", input_file, "--out", store, *options]) == 0
    assert run_command_line(["prepare", input_file, "--out", store, *options]) == 0
    for arguments in (["check", store], ["inspect", store], ["check", input_file]):
        run_command_line(arguments)
    assert (
        run_command_line(
            [
                "prepare",
                input_file,
                "--out",
                str(hostile_folder / "2"),
                *options,
                "--template",
                str(hostile_folder / "t.jinja"),
            ]
        )
        == 1
    )
    for name in ("cut.csv", "gone.jsonl"):
        assert (
            run_command_line(["prepare", str(hostile_folder / name), "--out", str(hostile_folder / "3"), *options]) == 1
        )
    assert run_command_line(["doctor", input_file, "--map", "\x1b[31m=x"]) == 2
    output = "".join(capsys.readouterr())
    assert r"\x1b[31mevil\u202e" in output
    assert not {"\x1b", "\u202e", "\x07"}.intersection(output)
