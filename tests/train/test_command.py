"""The command ``batchloom train``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchloom.adapters.logging import read_log
from batchloom.cli import run_command_line
from processes import run_module, start_processes
from train.runs import BASE_SETTINGS, read_steps, small_store, wait_for_step


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps({**BASE_SETTINGS, "steps": 6}))
    return path


def train(*args):
    return run_command_line(["train", "--device", "cpu", *map(str, args)])


def test_options_go_over_the_configuration(store, config, tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--data", store.path, "--config-file", config, "--out", out]
    sizes = ["--seq-len", 64, "--global_batch_size", 8, "--batch-size", 2, "--packing", "wrap"]
    assert train(*args, *sizes, "--lr", 0.5, "--seed", 3, "--eval-batches", 1) == 0
    settings = json.loads((out / "run.json").read_text())
    assert (settings["seq_len"], settings["global_batch_size"]) == (64, 8)
    assert (settings["batch_size"], settings["order"]["packing"], settings["seed"]) == (
        2,
        "wrap",
        3,
    )
    assert settings["optim"]["lr"] == 0.5
    assert settings["data"] == {"name": "s", "path": str(store.path), "fingerprint": store.fingerprint}
    assert "1 rank x 4 passes x 2 rows" in capsys.readouterr().out


def test_noise_applies_to_training_and_not_to_validation(store, config, tmp_path, capsys):
    def losses(out, kind):
        return [line["loss"] for line in read_log(out / "log.jsonl") if line["kind"] == kind]

    plain, noisy, reference = tmp_path / "plain", tmp_path / "noisy", tmp_path / "whole"
    args = [
        "--data",
        store.path,
        "--config-file",
        config,
        "--eval-batches",
        1,
        "--eval-interval",
        1,
    ]
    assert train(*args, "--out", plain, "--stop-at", 1, "--lr", 1e-9) == 0
    assert train(*args, "--out", noisy, "--stop-at", 1, "--lr", 1e-9, "--noise-prob", 0.5) == 0
    assert "50.0% of the trained input tokens are replaced" in capsys.readouterr().out
    assert losses(plain, "step")[0] != losses(noisy, "step")[0]
    assert losses(plain, "val")[0] == pytest.approx(losses(noisy, "val")[0], abs=1e-6)
    assert train("--data", store.path, "--out", noisy, "--resume") == 0
    assert train(*args, "--out", reference, "--lr", 1e-9, "--noise-prob", 0.5) == 0
    assert read_steps(noisy) == read_steps(reference)
    assert train("--data", store.path, "--out", noisy, "--resume", "--noise-prob", 0.1) == 1
    assert "order.noise_prob was 0.5 and is 0.1" in capsys.readouterr().err


def test_resuming_takes_the_runs_own_settings(store, config, tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--data", store.path, "--config-file", config, "--out", out]
    assert train(*args, "--stop-at", 3) == 0
    assert train("--data", store.path, "--out", out, "--resume") == 0
    assert [step for step, *_ in read_steps(out)] == [0, 1, 2, 3, 4, 5]
    assert train("--data", store.path, "--out", out, "--resume", "--seq-len", 16) == 1
    assert "seq_len was 32 and is 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-iters", 1], "--max-iters: 1 is too few, because {} has 2 steps done: give at least 2"),
        (["--stop-at", 1], "--stop-at: 1 is too early, because {} has 2 steps done: give at least 2"),
    ],
)
def test_ending_before_the_steps_done_is_refused(store, config, tmp_path, capsys, args, message):
    out = tmp_path / "run"
    assert train("--data", store.path, "--config-file", config, "--out", out, "--max-iters", 2) == 0
    before = (out / "run.json").read_bytes()
    assert train("--out", out) == 2
    assert f"--resume: missing; {out} holds a run: give --resume" in capsys.readouterr().err
    assert train("--out", out, "--resume", *args) == 2
    assert message.format(out) in capsys.readouterr().err
    assert (out / "run.json").read_bytes() == before
    assert train("--out", out, "--resume", "--max-iters", 3, "--stop-at", 2) == 0
    assert "2 of 3 steps are done already; --stop-at sets the last one" in capsys.readouterr().out


def test_resuming_with_invalid_settings_is_refused(store, config, tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--data", store.path, "--out", out]
    assert train(*args, "--config-file", config, "--max-iters", 1) == 0
    settings = json.loads((out / "run.json").read_text())
    for change, message in (
        ({"steps": "6"}, "steps: '6' is not int"),
        ({"steps": 0}, "steps: 0 is not a whole number from 1 to 281,474,976,710,656"),
        ({"model": []}, "model: [] is not ModelSettings"),
        ({"stepz": 1}, "stepz: unknown setting; did you mean 'steps'?"),
    ):
        (out / "run.json").write_text(json.dumps({**settings, **change}))
        assert train(*args, "--resume") == 1
        error = capsys.readouterr().err
        assert f"{out}/run.json does not hold the settings of a run ({message})" in error
        assert "from the last line of kind start in log.jsonl" in error


def test_a_file_is_prepared_into_a_temporary_store(config, tmp_path, capsys):
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{n} times {n} is {n * n}." for n in range(100)))
    args = ["--input-file", text, "--tokenizer", "bytes", "--config-file", config]
    assert train(*args, "--out", tmp_path / "whole") == 0
    store_path = Path(capsys.readouterr().out.split(" is prepared in ")[1].split(",")[0])
    assert store_path.name == "words"
    assert not store_path.parent.exists()
    assert train(*args, "--out", tmp_path / "cut", "--stop-at", 3) == 0
    assert train(*args, "--out", tmp_path / "cut", "--resume") == 0
    assert read_steps(tmp_path / "cut") == read_steps(tmp_path / "whole")
    entry = read_log(tmp_path / "cut" / "log.jsonl")[1]
    assert entry["origin"].startswith("source=real words/train ")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--data", "s", "--input-file", "f"], 2, "--data and --input-file exclude each other"),
        ([], 2, "--data: missing"),
        (["--data", "s", "--tokenizer", "bytes"], 2, "--tokenizer: bytes requires --input-file"),
        (["--data", "s", "--stop-at", "0"], 2, "--stop-at: 0 is not a number of steps, from 1"),
        (
            ["--data", "s", "--max-iters", "2", "--stop-at", "5"],
            2,
            "--stop-at: 5 is after the end of the run, which has 2",
        ),
        (["--data", "s", "--model-name", "tinny"], 2, "did you mean 'tiny'?"),
        (["--data", "s", "--model-name", "tiny", "--config-file", "c"], 2, "exclude each other"),
        (["--data", "s", "--config-file", "none.json"], 1, "none.json: no such file"),
        (["--data", "s", "--max-iters", "0"], 2, "--max-iters: 0 is not a whole number from 1 to"),
        (["--data", "s", "--packing", "best_fitt"], 2, "did you mean 'best_fit'?"),
        (["--data", "nowhere"], 1, "There is no file or folder nowhere: "),
        (
            ["--input-file", "nowhere.txt"],
            1,
            "--input-file: There is no file or folder nowhere.txt: ",
        ),
        (["--data", "s", "--batch-size", "3"], 1, "cut into micro-batches of 3. Sizes that divide it: 1, 2, 4, 8"),
        (["--data", "s", "--resume"], 1, "holds no run"),
        (["--data", "s", "--device", "tpu"], 1, "none of auto, cpu"),
        (["--data", "s", "--lr", "inf"], 2, "--lr: inf is not a finite number above 0"),
        (["--data", "s", "--lr", "nan"], 2, "--lr: nan is not a finite number above 0"),
        (["--data", "s", "--seq-len", "9" * 5000], 2, "--seq-len"),
        (["--data", "s", "--config-file", "."], 2, ".: cannot be read: "),
        (["--data", "s", "--config-file", "wide"], 1, "needs 1,536.0 TB to train, and this"),
        (
            ["--data", "s", "--global-batch-size", "16777216", "--seq-len", "16777216"],
            1,
            "A batch of 16777216 sequences of 16777216 tokens holds ",
        ),
        (["--data", "s", "--out", "wide"], 1, "wide is not an empty folder and holds no run"),
        (["--data", "s", "--out", "wide/run"], 1, "Cannot write wide/run: a part of the path is a file"),
        (["--data", "s", "--out", "n" * 300], 1, "the path or a name in it is too long; choose a shorter --out"),
        (["--data", "s", "--out", "/proc/run"], 1, "Cannot write /proc/run: "),
        (["--data", "s", "--out", os.fsdecode(b"\xff")], 2, "is not UTF-8"),
        # Refused before the input is prepared, which here would fail.
        (["--input-file", "wide", "--out", "."], 1, ". is not an empty folder"),
    ],
)
def test_refusals_are_one_sentence(store, tmp_path, monkeypatch, capsys, args, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").symlink_to(store.path)
    (tmp_path / "wide").write_text('{"model": {"layers": 8, "heads": 2, "width": 1000000}}')
    assert run_command_line(["train", *args]) == code
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert not (tmp_path / "runs").exists()


def test_a_store_with_an_unprintable_name(store, config, tmp_path):
    """Invalid UTF-8, letters that the font lacks, and matplotlib's math markup."""
    odd = tmp_path / os.fsdecode("$a^$ \u4e2d ".encode() + b"\xff")
    odd.symlink_to(store.path)
    # A process of its own: pytest cannot send a log with this name from one of its processes to another.
    args = ["--data", odd, "--config-file", config, "--out", tmp_path / "run", "--max-iters", 1]
    result = run_module("batchloom", "train", "--device", "cpu", *args)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert "\\udcff/train" in result.stdout
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


SIGNAL_AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from batchloom.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "module",
    ["batchloom.train.loop", "torch.nn", pytest.param("torch.optim", marks=pytest.mark.slow)],
)
def test_ctrl_c_while_torch_is_being_loaded_is_one_sentence(store, config, tmp_path, module):
    args = ["train", "--data", store.path, "--config-file", config, "--out", tmp_path / "run"]
    result = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_IMPORT.format(module=module), *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 130
    assert result.stderr.strip() == "Stopped before the run began; nothing was left behind."
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("interval", "checkpoint_note"),
    [
        ("5", "its newest checkpoint has "),
        ("0", "it has no checkpoint yet, so its steps are lost"),
    ],
)
def test_ctrl_c_prints_one_message_and_the_run_resumes(store, config, tmp_path, interval, checkpoint_note):
    out = tmp_path / "run"
    args = ["train", "--data", store.path, "--config-file", config, "--out", out]
    run_args = [*args, "--max-iters", 100_000, "--save-interval", interval]
    with start_processes("-m", "batchloom", *run_args) as (process,):
        wait_for_step(process, out, 8)
        process.send_signal(signal.SIGINT)
        result = process.wait()
    assert result.returncode == 130
    assert result.stderr.strip().startswith(f"Stopped the run in {out}; {checkpoint_note}")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(out.rglob("*.partial"))
    steps = len(read_steps(out))
    assert train("--data", store.path, "--out", out, "--resume", "--max-iters", steps + 2) == 0
    assert [step for step, *_ in read_steps(out)] == list(range(steps + 2))
