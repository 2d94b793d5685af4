"""The command ``batchloom demo``, with few steps."""

import io
import re
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from batchloom import open_store
from batchloom.cli import run_command_line
from batchloom.train import load_named_config

# Enough steps to get below the unigram entropy; the default is six times as many.
FEW_STEPS = 40


def run_demo(folder, steps, *options):
    """Run the command; return its exit code, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        code = run_command_line(["demo", "--out", str(folder), "--steps", str(steps), *options])
    return code, printed.getvalue(), errors.getvalue()


def check_stages(folder, steps, printed):
    """Require that every stage was printed and wrote its files."""
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
    """Folder of a demo of one step, and the result of ``run_small_demo``."""
    library = tmp_path_factory.mktemp("library")
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.stat().st_size)
    for file in [file for file in modules if file.stat().st_size > 1000][:60]:
        (library / file.name).write_bytes(file.read_bytes())
    folder = library.with_name(f"{library.name}-demo")
    return folder, library, run_small_demo(folder, library)


def run_small_demo(folder, library):
    """Run a demo of one step with a small folder as Python's library; return as ``run_demo``."""
    get_path = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(library) if name == "stdlib" else get_path(name))
        return run_demo(folder, 1)


def test_it_shows_every_stage_and_is_too_short_to_learn(demo):
    folder, _, (code, printed, errors) = demo
    assert code == 1
    check_stages(folder, 1, printed)
    assert "is not below the unigram entropy" in errors
    assert "Traceback" not in errors
    assert "Removing exact duplicates" in printed
    assert "Removing exact duplicates" not in errors
    store = open_store(folder / "store")
    topics = sum(store[n].provenance.source.endswith(".txt") for n in range(len(store)))
    modules = sum(store[n].provenance.source.endswith(".py") for n in range(len(store)))
    assert min(topics, modules) > 50
    assert topics + modules == len(store)


@pytest.mark.slow
def test_again_in_its_own_folder(demo):
    folder, library, _ = demo
    code, printed, _ = run_small_demo(folder, library)
    assert code == 1
    assert "The store is already finished" in printed
    assert "The run of an earlier demo is replaced" in printed


@pytest.mark.slow
def test_it_learns_real_text(tmp_path):
    assert load_named_config("tiny")["steps"] > FEW_STEPS
    code, printed, _ = run_demo(tmp_path / "demo", FEW_STEPS)
    assert code == 0
    check_stages(tmp_path / "demo", FEW_STEPS, printed)
    code, printed, errors = run_demo(tmp_path / "demo", FEW_STEPS, "--quiet")
    assert (code, errors) == (0, "")
    assert re.fullmatch(r".*/demo: val loss \d\.\d{3}, unigram entropy \d\.\d{3}\n", printed)


def test_a_folder_of_another_run_is_left_unchanged(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert run_command_line(["demo", "--out", str(tmp_path)]) == 1
    assert "not from the demo" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["run", "run.json"]
