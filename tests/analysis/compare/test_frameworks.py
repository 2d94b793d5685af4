"""Batches and losses in every framework, before and after a resume.

Both equal those of the plain loader and loop.
"""

from typing import NamedTuple

import numpy as np
import pytest

import batchloom
from analysis.compare.warm_examples import run_warm, run_warm_in_turn
from batchloom.adapters.requirements import find_requirement_problem
from batchloom.analysis.compare import FRAMEWORKS, iter_expected_entries, run_example
from batchloom.core.errors import TrainError
from batchloom.testing import write_store

SIZES = {"seq_len": 64, "global_batch_size": 8}
# Shorter than a test's own limit, so that a run that hangs is reported with the stacks of its ranks.
MOST_SECONDS = 280
# `tests/adapters` covers each framework; in the fast tier these examples stand for all.
FAST_FRAMEWORKS = ("pytorch", "fsdp2")
by_framework = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)


class Course(NamedTuple):
    """Steps of a run, steps before it is stopped, and steps between checkpoints."""

    steps: int
    stop: int
    every: int


SHORT, LONG = Course(6, 3, 2), Course(50, 20, 7)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(5)
    # A skewed distribution over few ids, so that there is something to learn.
    token_choice = {"a": [5, 17, 99, 180], "p": [0.6, 0.2, 0.1, 0.1]}
    documents = [rng.choice(size=rng.integers(1, 90), **token_choice).tolist() for _ in range(600)]
    # Odd documents are trained completely, even ones in their second half.
    # 300 more fill a row each and are not trained.
    trained = [
        [int(n % 2 or 2 * i >= len(document)) for i in range(len(document))] for n, document in enumerate(documents)
    ]
    documents += [rng.choice(size=64, **token_choice).tolist() for _ in range(300)]
    trained += [[0] * 64] * 300
    built_store = write_store(tmp_path_factory.mktemp("data") / "store", documents, trained=trained)
    loader = batchloom.Loader(built_store, **SIZES, steps=LONG.steps)
    for course, min_count in ((SHORT, 2), (LONG, 5)):
        passes = [micro_batch for step in range(course.steps) for micro_batch in loader[step].split(2)]
        assert sum(bool((micro_batch["labels"] == -100).all()) for micro_batch in passes) > min_count
    return built_store


def compute_plain_losses(run, store, folder, course):
    """Return the losses of an uninterrupted plain loop in one process."""
    job = {"data": str(store.path), "out": str(folder / "out"), **SIZES, "steps": course.steps}
    return run("pytorch", job, folder / "record").losses


@pytest.fixture(scope="module")
def short_losses(store, tmp_path_factory):
    return compute_plain_losses(run_warm, store, tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long_losses(store, tmp_path_factory):
    return compute_plain_losses(run_example, store, tmp_path_factory.mktemp("long"), LONG)


def require_framework(framework):
    if problems := [
        problem for requirement in framework.requirements if (problem := find_requirement_problem(requirement))
    ]:
        pytest.skip(" ".join(problems))


def check_record(record, first, store, losses, processes=1):
    """Check for the plan's batches and the plain losses from step ``first`` on."""
    assert record.first == first
    stop = first + len(record.losses)
    assert len(record.ranks) == processes
    for rank, entries in enumerate(record.ranks):
        loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=processes, steps=stop)
        expected_hashes = [entry["hash"] for entry in iter_expected_entries(loader, stop)]
        assert [entry["hash"] for entry in entries] == expected_hashes[first:]
        assert {entry["passes"] for entry in entries} == {8 // processes // 2}
    assert record.losses == pytest.approx(losses[first:stop], rel=1e-4)


def check_course(course, run_in_turn, framework, store, losses, folder, processes=1):
    """Check a run that is stopped, and the run that resumes from its checkpoint."""
    job = {"data": str(store.path), "out": str(folder / "out"), **SIZES, "save_every": course.every}
    jobs = [{**job, "steps": course.stop}, {**job, "steps": course.steps, "resume": True}]
    before, after = run_in_turn(framework.name, jobs, folder)
    check_record(before, 0, store, losses, processes)
    assert len(before.losses) == course.stop
    # Some frameworks save another checkpoint when they end.
    assert after.first in (course.stop // course.every * course.every, course.stop)
    check_record(after, after.first, store, losses, processes)
    assert after.first + len(after.losses) == course.steps


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(framework, marks=[] if framework.name in FAST_FRAMEWORKS else [pytest.mark.slow])
        for framework in FRAMEWORKS
    ],
    ids=lambda framework: framework.name,
)
def test_a_framework_trains_on_the_plain_loaders_batches(framework, store, short_losses, tmp_path, monkeypatch):
    require_framework(framework)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if framework.name != "ray-train":
        check_course(SHORT, run_warm_in_turn, framework, store, short_losses, tmp_path)
        return
    # Ray's local mode saves no checkpoint.
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "steps": SHORT.stop}
    record = run_warm(framework.name, {**job, "save_every": 2}, tmp_path / "record")
    check_record(record, 0, store, short_losses)
    assert len(record.losses) == SHORT.stop


@pytest.mark.slow
def test_an_example_runs_on_two_processes_of_a_launcher(store, short_losses, tmp_path):
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "steps": SHORT.stop}
    record = run_example("pytorch", job, tmp_path / "record", processes=2)
    check_record(record, 0, store, short_losses, processes=2)
    assert len(record.losses) == SHORT.stop


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@by_framework
def test_a_framework_trains_on_its_batches_under_its_own_launcher(framework, processes, store, long_losses, tmp_path):
    require_framework(framework)

    def run_in_turn(name, jobs, folder):
        options = {"processes": processes, "seconds": MOST_SECONDS}
        return [run_example(name, job, folder / str(number), **options) for number, job in enumerate(jobs)]

    check_course(LONG, run_in_turn, framework, store, long_losses, tmp_path, processes)


@pytest.mark.slow
def test_a_run_that_hangs_is_reported_with_the_stacks_of_its_ranks(store, tmp_path):
    example = tmp_path / "hanging.py"
    example.write_text("import time\n\ndef train(model, job):\n    time.sleep(600)\n")
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "steps": 1}
    with pytest.raises(TrainError, match=r"did not end within 30 s(?s:.*)hanging\.py\", line 4 in train"):
        run_example(str(example), job, tmp_path / "record", seconds=30)
