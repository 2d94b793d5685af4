"""The thread that has coming steps of remote stores fetched: through errors that pass, and through edits."""

import logging
import threading
import time

import numpy as np
import pytest

from batchloom import Edit, InputError, Loader, Mixture, Plan, open_store
from batchloom.batches.loading import remote_fetch as fetching_module
from batchloom.batches.loading.remote_fetch import RemotePrefetcher, StepSizes
from batchloom.testing import write_store
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
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_fetching_goes_on_after_errors_that_pass_and_tells_them_once(stores, caplog):
    loader = Loader(stores["a"], seq_len=TOKENS, global_batch_size=ROWS, rank=0, world_size=1, output="numpy")
    faults, tried = {2, 9}, []

    def rows(step):
        tried.append(step)
        if step in faults:
            faults.remove(step)
            raise InputError("s3://bucket answered 503 eight times.")
        positions = np.arange(step * ROWS, (step + 1) * ROWS)
        return loader.plan.rows(int(positions[0]), int(positions[-1]) + 1), positions

    fetching = RemotePrefetcher([stores["a"]], [1], rows, 0, StepSizes((0,), (TOKENS * ROWS,), (0,)))
    try:
        with caplog.at_level(logging.WARNING, "batchloom"):
            for step in range(30):
                fetching.reach(step)
                # No further: behind an error the thread waits until the next step is made.
                assert reaches(lambda step=step: max(tried, default=-1) >= step), step
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
    assert reaches(lambda: stores["b"].reader.fetched_bytes > 10 * STEP)
    before = stores["a"].reader.fetched_bytes
    while next(batches, None):
        time.sleep(0.002)
    # One group of steps may have been on its way.
    assert stores["a"].reader.fetched_bytes <= before + 8 * STEP


def loader_of(store, rows, **settings):
    plain = {"seq_len": TOKENS, "steps": 200, "rank": 0, "world_size": 1, "output": "numpy"}
    return Loader(store, **{**plain, "global_batch_size": rows, "prefetch": 2, **settings})


def test_tokens_of_steps_are_told_of_each_stretch():
    sizes = StepSizes((0, 3, 10), (5, 2, 7), (0, 15, 29))
    each = [5] * 3 + [2] * 7 + [7] * 20
    before = np.cumsum([0, *each]).tolist()
    assert [sizes.tokens_at(step) for step in range(30)] == each
    assert [sizes.tokens_before(step) for step in range(31)] == before
    for tokens in range(-3, 100):
        assert sizes.find_step(tokens) == np.searchsorted(before, tokens)
    assert [sizes.next_range_start(step) for step in (0, 2, 3, 9, 10)] == [3, 3, 10, 10, None]


def test_an_edit_beside_the_beginning_of_an_iteration_holds_for_it(stores, tmp_path, monkeypatch):
    loader, edit = loader_of(stores["a"], 2, steps=30), Edit(step=20, seq_len=64, skip=5)
    begun, twin = threading.Event(), Plan.__copy__

    def slow(plan):
        found = twin(plan)
        if not begun.is_set():
            begun.set()
            time.sleep(0.2)
        return found

    monkeypatch.setattr(Plan, "__copy__", slow)
    found = []
    thread = threading.Thread(target=lambda: found.extend(loader))
    thread.start()
    assert begun.wait(10)
    loader.edit(edit)
    thread.join(60)
    right = loader_of(open_store(tmp_path / "a"), 2, steps=30)
    right.edit(edit)
    for ours, theirs in zip(found, right, strict=True):
        assert np.array_equal(ours["input_ids"], theirs["input_ids"]), ours.step


def test_an_edit_to_smaller_steps_while_larger_ones_are_looked_up(stores, monkeypatch):
    fetch = fetching_module.fetch_rows

    def slow(*given):
        time.sleep(0.1)
        fetch(*given)

    monkeypatch.setattr(fetching_module, "fetch_rows", slow)
    faults = []
    monkeypatch.setattr(threading, "excepthook", lambda what: faults.append(what.exc_value))
    loader = loader_of(stores["a"], ROWS, steps=40)
    batches = iter(loader)
    next(batches)
    # No batch is made ahead any more, and the thread looks up later steps.
    time.sleep(0.15)
    loader.edit(Edit(step=loader.first_editable_step, global_batch_size=2))
    time.sleep(0.5)
    assert len(list(batches)) == 39
    assert not faults


@pytest.mark.parametrize("resumed", [False, True])
def test_how_far_is_looked_ahead_follows_what_steps_hold(stores, tmp_path, resumed):
    """Steps of one sequence, and of 32 after an edit; a quarter of the cache holds 7 of these."""
    loader = loader_of(open_store(tmp_path / "a") if resumed else stores["a"], 1)
    batches = iter(loader)
    next(batches)
    loader.edit(Edit(step=6, global_batch_size=32))
    if resumed:
        state, loader = loader.state_dict(), loader_of(stores["a"], 1)
        loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
    else:
        # All that may be made ahead can have been made before the edit: then who takes more has more made.
        for _ in range(3):
            time.sleep(0.05)
            next(batches)
    assert reaches(lambda: stores["a"].reader.fetched_bytes > 600_000)
    time.sleep(0.3)
    # With lengths and checksums, and what was on its way when the edit came.
    assert stores["a"].reader.fetched_bytes < 1_300_000
    batches.close()


def test_steps_that_do_not_fit_are_passed_over(stores, tmp_path, caplog):
    """Between others come steps of which the cache does not hold two: told when they are made."""
    small = open_store(stores["a"].location.name, cache=tmp_path / "small", cache_limit=100_000)
    loader = loader_of(small, 1, steps=40)
    for step, rows in ((10, 32), (20, 2)):
        loader.edit(Edit(step=step, global_batch_size=rows))
    fetching_module._warn_cache_too_small.cache_clear()
    with caplog.at_level(logging.WARNING, "batchloom"):
        for batch in loader:
            # The thread that makes batches ahead may be 3 steps further.
            assert batch.step > 6 or not caplog.text
    assert caplog.text.count("are not fetched ahead: a step of this rank has 131,072 bytes") == 1
