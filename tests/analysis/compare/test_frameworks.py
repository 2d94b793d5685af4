"""In every framework the model is given the plain loader's batches, before and after a resume, and learns the same."""

from typing import NamedTuple

import numpy as np
import pytest

import batchloom
from analysis.compare.warm import run_warm
from batchloom.adapters.requirements import find_requirement_problem
from batchloom.analysis.compare import FRAMEWORKS, iter_expected_entries, run_example
from batchloom.testing import write_store

SIZES = {"seq_len": 64, "global_batch_size": 8}
by_framework = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.name)


class Course(NamedTuple):
    """The steps of a run, those before it is stopped, and those between two checkpoints."""

    steps: int
    stop: int
    every: int


SHORT, LONG = Course(12, 6, 4), Course(50, 20, 7)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(5)
    # Words of a small vocabulary, so that there is something to learn.
    words = {"a": [5, 17, 99, 180], "p": [0.6, 0.2, 0.1, 0.1]}
    documents = [rng.choice(size=rng.integers(1, 90), **words).tolist() for _ in range(600)]
    # Of every other one the second half is trained; some fill a row, and nothing of them is.
    trained = [[int(n % 2 or 2 * i >= len(one)) for i in range(len(one))] for n, one in enumerate(documents)]
    documents += [rng.choice(size=64, **words).tolist() for _ in range(300)]
    trained += [[0] * 64] * 300
    made = write_store(tmp_path_factory.mktemp("data") / "store", documents, trained=trained)
    loader = batchloom.Loader(made, **SIZES, steps=LONG.steps)
    for course, least in ((SHORT, 2), (LONG, 5)):
        passes = [part for step in range(course.steps) for part in loader[step].split(2)]
        assert sum(bool((part["labels"] == -100).all()) for part in passes) > least
    return made


def plain_losses(run, store, folder, course):
    """Losses of the plain loop, undisturbed on one process."""
    job = {"data": str(store.path), "out": str(folder / "out"), **SIZES, "steps": course.steps}
    return run("pytorch", job, folder / "record").losses


@pytest.fixture(scope="module")
def short_losses(store, tmp_path_factory):
    return plain_losses(run_warm, store, tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long_losses(store, tmp_path_factory):
    return plain_losses(run_example, store, tmp_path_factory.mktemp("long"), LONG)


def require_framework(framework):
    if problems := [problem for one in framework.requirements if (problem := find_requirement_problem(one))]:
        pytest.skip(" ".join(problems))


def check(record, first, store, losses, processes=1):
    """Require the plan's batches and the plain losses from a step on."""
    assert record.first == first
    stop = first + len(record.losses)
    assert len(record.ranks) == processes
    for rank, told in enumerate(record.ranks):
        loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=processes, steps=stop)
        wanted = [entry["hash"] for entry in iter_expected_entries(loader, stop)]
        assert [entry["hash"] for entry in told] == wanted[first:]
        assert {entry["passes"] for entry in told} == {8 // processes // 2}
    assert record.losses == pytest.approx(losses[first:stop], rel=1e-4)


def check_course(course, run, framework, store, losses, folder, processes=1):
    """Require them of a run that is stopped, and of the one that goes on from its checkpoint."""
    job = {"data": str(store.path), "out": str(folder / "out"), **SIZES, "save_every": course.every}
    before = run(framework.name, {**job, "steps": course.stop}, folder / "a")
    check(before, 0, store, losses, processes)
    assert len(before.losses) == course.stop
    after = run(framework.name, {**job, "steps": course.steps, "resume": True}, folder / "b")
    # The newest checkpoint, or one that the framework makes when it ends.
    assert after.first in (course.stop // course.every * course.every, course.stop)
    check(after, after.first, store, losses, processes)
    assert after.first + len(after.losses) == course.steps


@by_framework
def test_a_framework_trains_on_the_plain_loaders_batches(framework, store, short_losses, tmp_path, monkeypatch):
    require_framework(framework)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if framework.name != "ray-train":
        check_course(SHORT, run_warm, framework, store, short_losses, tmp_path)
        return
    # Ray's local mode keeps no checkpoint.
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "steps": SHORT.stop}
    record = run_warm(framework.name, {**job, "save_every": 4}, tmp_path / "record")
    check(record, 0, store, short_losses)
    assert len(record.losses) == SHORT.stop


@pytest.mark.slow
def test_an_example_runs_on_two_processes_of_a_launcher(store, short_losses, tmp_path):
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "steps": SHORT.stop}
    record = run_example("pytorch", job, tmp_path / "record", processes=2)
    check(record, 0, store, short_losses, processes=2)
    assert len(record.losses) == SHORT.stop


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@by_framework
def test_a_framework_trains_on_them_under_its_own_launcher(framework, processes, store, long_losses, tmp_path):
    require_framework(framework)

    def run(name, job, record):
        return run_example(name, job, record, processes=processes)

    check_course(LONG, run, framework, store, long_losses, tmp_path, processes)
