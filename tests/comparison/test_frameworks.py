"""In every framework the model is given the plain loader's batches, before and after a resume, and learns the same."""

import numpy as np
import pytest

import batchloom
from batchloom.comparison.frameworks import FRAMEWORKS, missing
from batchloom.comparison.launch import run_example
from batchloom.comparison.witness import expected
from batchloom.testing.stores import write_store

STEPS, STOP, EVERY = 50, 20, 7
SIZES = {"seq_len": 64, "global_batch_size": 8}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(5)
    # Words of a small vocabulary, so that there is something to learn.
    words = {"a": [5, 17, 99, 180], "p": [0.6, 0.2, 0.1, 0.1]}
    documents = [rng.choice(size=rng.integers(1, 90), **words).tolist() for _ in range(600)]
    # Of every other one the second half is trained; some fill a row, and nothing of them is.
    trained = [
        [int(n % 2 or 2 * i >= len(one)) for i in range(len(one))]
        for n, one in enumerate(documents)
    ]
    documents += [rng.choice(size=64, **words).tolist() for _ in range(300)]
    trained += [[0] * 64] * 300
    made = write_store(tmp_path_factory.mktemp("data") / "store", documents, trained=trained)
    loader = batchloom.Loader(made, **SIZES, steps=STEPS)
    passes = [part for step in range(STEPS) for part in loader[step].split(2)]
    assert sum(bool((part["labels"] == -100).all()) for part in passes) > 5
    return made


@pytest.fixture(scope="module")
def plain_losses(store, tmp_path_factory):
    """What the plain loop comes to, undisturbed on one process."""
    folder = tmp_path_factory.mktemp("plain")
    job = {"data": str(store.path), "out": str(folder / "out"), **SIZES, "steps": STEPS}
    return run_example("pytorch", job, folder / "record").losses


def hashes(store, processes, rank):
    loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=processes, steps=STEPS)
    return [entry["hash"] for entry in expected(loader, STEPS)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.name)
def test_a_framework_trains_on_the_plain_loaders_batches(
    framework, processes, store, plain_losses, tmp_path
):
    if problems := missing(framework):
        pytest.skip(" ".join(problems))
    job = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "save_every": EVERY}
    before = run_example(
        framework.name, {**job, "steps": STOP}, tmp_path / "a", processes=processes
    )
    after = run_example(
        framework.name, {**job, "steps": STEPS, "resume": True}, tmp_path / "b", processes=processes
    )
    assert before.first == 0
    # The newest checkpoint, or one that the framework makes when it ends.
    assert after.first in (STOP // EVERY * EVERY, STOP)
    assert len(before.ranks) == len(after.ranks) == processes
    for rank in range(processes):
        wanted = hashes(store, processes, rank)
        assert [entry["hash"] for entry in before.ranks[rank]] == wanted[:STOP]
        assert [entry["hash"] for entry in after.ranks[rank]] == wanted[after.first :]
        assert {entry["passes"] for entry in after.ranks[rank]} == {8 // processes // 2}
    assert before.losses == pytest.approx(plain_losses[:STOP], rel=1e-4)
    assert after.losses == pytest.approx(plain_losses[after.first :], rel=1e-4)
