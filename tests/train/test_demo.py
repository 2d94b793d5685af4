"""The demo, with few steps."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from batchloom import open_store
from batchloom.cli import run_command_line
from batchloom.train import load_named_config

# Enough to come below the unigram entropy; the real one takes six times as many.
FEW = 40


def run_demo(folder, steps):
    """Run the command; returns its exit code, and what it printed and complained of."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as complaints:
        code = run_command_line(["demo", "--out", str(folder), "--steps", str(steps)])
    return code, printed.getvalue(), complaints.getvalue()


def check_stages(folder, steps, printed):
    """Require that every stage was shown, and left what it makes."""
    for stage in (
        f"$ batchloom prepare {folder}/text --out {folder}/store --tokenizer train:4096",
        f"$ batchloom check {folder}/store",
        ">>> loader = batchloom.Loader(",
        f"$ batchloom train --data {folder}/store --out {folder}/run --max-iters {steps}",
        "the unigram entropy, reached by guessing",
        "def ",
        f"Loss curve: {folder}/run/loss.png",
    ):
        assert stage in printed
    assert (folder / "run" / "loss.png").is_file()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a demo of one step, and what ``run_demo`` returned."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    return folder, run_demo(folder, 1)


def test_it_shows_every_stage_and_is_too_short_to_learn(demo):
    folder, (code, printed, complaints) = demo
    assert code == 1
    check_stages(folder, 1, printed)
    assert "is not below the unigram entropy" in complaints
    assert "Traceback" not in complaints
    store = open_store(folder / "store")
    topics = sum(store[n].provenance.source.endswith(".txt") for n in range(len(store)))
    modules = sum(store[n].provenance.source.endswith(".py") for n in range(len(store)))
    assert min(topics, modules) > 50
    assert topics + modules == len(store)


def test_again_in_its_own_folder(demo):
    folder, _ = demo
    code, printed, _ = run_demo(folder, 1)
    assert code == 1
    assert "The store is already finished" in printed
    assert "The run of an earlier demo is replaced" in printed


@pytest.mark.slow
def test_it_learns_real_text(tmp_path):
    assert load_named_config("tiny")["steps"] > FEW
    code, printed, _ = run_demo(tmp_path / "demo", FEW)
    assert code == 0
    check_stages(tmp_path / "demo", FEW, printed)


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert run_command_line(["demo", "--out", str(tmp_path)]) == 1
    assert "not from the demo" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["run", "run.json"]
