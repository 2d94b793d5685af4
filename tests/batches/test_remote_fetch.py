"""Prefetching of remote stores through transient errors and edits."""

import logging
import threading
import time

import numpy as np
import pytest

from batchloom import Edit, InputError, Loader, Mixture, Plan, open_store
from batchloom.batches.loading import remote_fetch as fetching_module
from batchloom.batches.loading.remote_fetch import RemotePrefetcher
from batchloom.testing import write_store
from store.remote_stores import copy_to_memory
from waiting import LIMIT_S, wait_until

# A document is a block of the store, so that fetched bytes count steps.
TOKENS, ROWS = 2048, 16
STEP = 2 * TOKENS * ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the stores "a" and "b"."""
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    for name in "ab":
        write_store(folder / name, rng.integers(0, 250, (1000, TOKENS)).tolist())
    return folder


@pytest.fixture(scope="module")
def urls(folder):
    return {name: copy_to_memory(folder / name, f"{folder.name}-{name}") for name in "ab"}


@pytest.fixture
def stores(urls, tmp_path):
    """Stores in memory, of which nothing is cached."""
    return {name: open_store(url, cache=tmp_path / "cache", cache_limit=4_000_000) for name, url in urls.items()}


def test_fetching_goes_on_after_errors_that_pass_and_logs_them_once(stores, caplog):
    loader = Loader(stores["a"], seq_len=TOKENS, global_batch_size=ROWS, rank=0, world_size=1, output="numpy")
    faults, tried, reached = {2, 9}, [], [-1]

    def rows(step):
        begun = reached[-1]
        tried.append(step)
        if step in faults:
            faults.remove(step)
            if step == 9:
                # The next step is reached before the error.
                wait_until(lambda: reached[-1] > begun, "the next step")
            raise InputError("s3://bucket answered 503 eight times.")
        positions = np.arange(step * ROWS, (step + 1) * ROWS)
        return loader.plan.rows(int(positions[0]), int(positions[-1]) + 1), positions

    fetching = RemotePrefetcher([stores["a"]], loader.plan, 0, rows, lambda _step: TOKENS * ROWS)
    try:
        with caplog.at_level(logging.WARNING, "batchloom"):
            for step in range(30):
                fetching.reach(step)
                reached.append(step)
                # After an error the thread goes on once the next step is reached.
                wait_until(lambda step=step: max(tried, default=-1) >= step, f"a fetch of step {step}")
    finally:
        fetching.end()
    assert not faults
    # Threads of earlier tests may log other messages.
    assert sum("answered 503" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
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
    # At most steps 6 to 9 are built; the others are fetched ahead.
    wait_until(lambda: stores["b"].reader.fetched_bytes > 10 * STEP, "steps of b are fetched ahead")
    before = stores["a"].reader.fetched_bytes
    while next(batches, None):
        # Time to fetch steps that are no longer in the plan.
        time.sleep(0.002)
    # One group of steps may have been in flight.
    assert stores["a"].reader.fetched_bytes <= before + 8 * STEP


def make_loader(store, rows, **settings):
    defaults = {"seq_len": TOKENS, "steps": 200, "rank": 0, "world_size": 1, "output": "numpy"}
    return Loader(store, **{**defaults, "global_batch_size": rows, "prefetch": 2, **settings})


def test_an_edit_during_the_start_of_an_iteration_applies_to_it(stores, folder, monkeypatch):
    loader, edit = make_loader(stores["a"], 2, steps=30), Edit(step=20, seq_len=64, skip=5)
    started, edited, original_copy = threading.Event(), threading.Event(), Plan.__copy__

    def copy_slowly(plan):
        copied = original_copy(plan)
        if not started.is_set():
            started.set()
            # The edit may wait for the end of this copy.
            edited.wait(0.2)
        return copied

    monkeypatch.setattr(Plan, "__copy__", copy_slowly)
    batches = []
    thread = threading.Thread(target=lambda: batches.extend(loader))
    thread.start()
    assert started.wait(LIMIT_S)
    loader.edit(edit)
    edited.set()
    thread.join(LIMIT_S)
    expected_loader = make_loader(open_store(folder / "a"), 2, steps=30)
    expected_loader.edit(edit)
    for actual, expected in zip(batches, expected_loader, strict=True):
        assert np.array_equal(actual["input_ids"], expected["input_ids"]), actual.step


def test_an_edit_to_smaller_steps_while_larger_ones_are_looked_up(stores, monkeypatch):
    fetch, fetches, edited = fetching_module.fetch_rows, [], threading.Event()

    def fetch_after_the_edit(*args):
        fetches.append(args)
        assert edited.wait(LIMIT_S)
        fetch(*args)

    monkeypatch.setattr(fetching_module, "fetch_rows", fetch_after_the_edit)
    faults = []
    monkeypatch.setattr(threading, "excepthook", lambda event: faults.append(event.exc_value))
    loader = make_loader(stores["a"], ROWS, steps=40)
    batches = iter(loader)
    next(batches)
    wait_until(lambda: fetches, "the thread has looked up later steps")
    loader.edit(Edit(step=loader.first_editable_step, global_batch_size=2))
    edited.set()
    assert len(list(batches)) == 39
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_the_lookahead_follows_the_sizes_of_steps(stores, folder, monkeypatch, resumed):
    """Steps have 1 sequence, then 32; a quarter of the cache holds 7 of these."""
    fetch, edited = fetching_module.fetch_rows, threading.Event()
    # Before the edit, the quarter of the cache would be filled with steps of 1 sequence.
    monkeypatch.setattr(fetching_module, "fetch_rows", lambda *args: edited.wait(LIMIT_S) and fetch(*args))
    loader = make_loader(open_store(folder / "a") if resumed else stores["a"], 1)
    batches = iter(loader)
    next(batches)
    loader.edit(Edit(step=6, global_batch_size=32))
    edited.set()
    if resumed:
        state, loader = loader.state_dict(), make_loader(stores["a"], 1)
        batches.close()
        loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
    else:
        # All allowed batches may have been built before the edit; taking more lets the thread build more.
        for _ in range(3):
            next(batches)
    wait_until(lambda: stores["a"].reader.fetched_bytes > 600_000, "the first steps of 32 sequences are fetched ahead")
    # A thread that looks further ahead would go on.
    time.sleep(0.1)
    # Includes lengths, checksums and blocks in flight at the time of the edit.
    assert stores["a"].reader.fetched_bytes < 1_300_000
    batches.close()


@pytest.mark.slow
def test_steps_that_do_not_fit_are_passed_over(stores, tmp_path, caplog):
    """The cache does not hold two of some steps: logged when these are built."""
    small = open_store(stores["a"].location.name, cache=tmp_path / "small", cache_limit=100_000)
    loader = make_loader(small, 1, steps=40)
    for step, rows in ((10, 32), (20, 2)):
        loader.edit(Edit(step=step, global_batch_size=rows))
    fetching_module._warn_cache_too_small.cache_clear()
    with caplog.at_level(logging.WARNING, "batchloom"):
        for batch in loader:
            # The producer thread may be 3 steps ahead.
            assert batch.step > 6 or not caplog.text
    assert caplog.text.count("are not fetched ahead: a step of this rank has 131,072 bytes") == 1
