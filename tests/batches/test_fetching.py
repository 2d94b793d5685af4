"""The thread that has coming steps of remote stores fetched: through errors that pass, and through edits."""

import logging
import time

import numpy as np
import pytest

from batchloom import Edit, Loader, Mixture, open_store
from batchloom.batches.fetching import Fetching
from batchloom.core.errors import InputError
from batchloom.testing.stores import write_store
from store.far import to_memory

# A document is a block of the store, so that bytes tell steps.
TOKENS, ROWS = 2048, 16
STEP = 2 * TOKENS * ROWS


@pytest.fixture
def stores(tmp_path):
    rng = np.random.default_rng(0)
    found = {}
    for name in "ab":
        write_store(tmp_path / name, rng.integers(0, 250, (1000, TOKENS)).tolist())
        url = to_memory(tmp_path / name, f"{tmp_path.name}-{name}")
        found[name] = open_store(url, cache=tmp_path / "cache", cache_limit=4_000_000)
    return found


def reaches(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_fetching_goes_on_after_errors_that_pass_and_tells_them_once(stores, caplog):
    loader = Loader(
        stores["a"], seq_len=TOKENS, global_batch_size=ROWS, rank=0, world_size=1, output="numpy"
    )
    faults, asked = {2, 9}, []

    def rows(step):
        if step in faults:
            faults.remove(step)
            raise InputError("s3://bucket answered 503 eight times.")
        asked.append(step)
        positions = np.arange(step * ROWS, (step + 1) * ROWS)
        return loader.plan.rows(int(positions[0]), int(positions[-1]) + 1), positions

    fetching = Fetching([stores["a"]], [1], rows, 0, TOKENS * ROWS)
    try:
        with caplog.at_level(logging.WARNING, "batchloom"):
            for step in range(30):
                fetching.reach(step)
                assert reaches(lambda step=step: max(asked, default=-1) >= step + 1), step
    finally:
        fetching.end()
    assert not faults
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 1
    assert "answered 503" in told[0]


def test_an_edit_turns_the_thread_to_the_new_order(stores):
    loader = Loader(
        Mixture({"a": 1}, stores=stores),
        seq_len=TOKENS,
        global_batch_size=ROWS,
        steps=60,
        rank=0,
        world_size=1,
        output="numpy",
        prefetch=2,
    )
    batches = iter(loader)
    next(batches)
    loader.edit(Edit(step=6, weights={"b": 1}))
    while next(batches).step < 6:
        pass
    # Made are steps 6 to 9 at most, the others are fetched ahead.
    assert reaches(lambda: stores["b"].fetched_bytes > 10 * STEP)
    before = stores["a"].fetched_bytes
    while next(batches, None):
        time.sleep(0.002)
    # One group of steps may have been on its way.
    assert stores["a"].fetched_bytes <= before + 8 * STEP
