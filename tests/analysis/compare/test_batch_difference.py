"""Differences between the batches of a trainer and those of the plan."""

import re

import numpy as np
import pytest

from analysis.compare import broken_examples
from batchloom import Loader
from batchloom.analysis.compare.witness import (
    LOOKAHEAD_STEPS,
    ExpectedBatches,
    RowLocation,
    StepHash,
    explain_difference,
    find_differing_batches,
)
from batchloom.testing import write_store

STEPS, RANKS = 8, 2
SIZES = {"seq_len": 64, "global_batch_size": 8}


def make_store(folder, low, high):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 250, rng.integers(low, high)).tolist() for _ in range(600)]
    return write_store(folder / "store", documents)


def make_rank_loader(store, rank, steps, output="numpy"):
    return Loader(store, **SIZES, rank=rank, world_size=RANKS, steps=steps, output=output, prefetch=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("data"), 5, 90)


@pytest.fixture(scope="module")
def expected(store):
    return ExpectedBatches([make_rank_loader(store, rank, STEPS + LOOKAHEAD_STEPS) for rank in range(RANKS)], STEPS)


def record_batches(store, fault=None, steps=STEPS):
    """Return the recorded batches per rank of a trainer with an optional fault."""
    ranks = []
    for rank in range(RANKS):
        loader, entries = make_rank_loader(store, rank, steps + LOOKAHEAD_STEPS, "torch"), []
        for step in range(steps):
            batch, entry = loader.batch(step), StepHash()
            if fault is not None and step >= broken_examples.FIRST_FAULTY_STEP:
                batch = fault(loader, batch)
            for ids, positions in zip(batch["input_ids"].split(2), batch["position_ids"].split(2), strict=True):
                entry.add(ids, positions)
            entries.append(entry.to_entry())
        ranks.append(entries)
    return ranks


@pytest.mark.parametrize(
    ("fault", "rank", "kind", "message"),
    [
        ("shuffled", 0, "rows", r"its row 0 is row \d of step \d on rank 0"),
        ("leaky", 0, "positions", "do not restart where documents begin: documents of a row see"),
        ("reordered", 0, "order", "its row 0 is the plan's row 3, its row 1 is the plan's row 2"),
        ("late", 0, "batch", "it got the batch of step 4$"),
        ("same", 1, "batch", "it got the batch of rank 0$"),
        ("dropping", 0, "dropped", "rows 2, 3 of the plan did not arrive$"),
        (
            "repeating",
            0,
            "repeated",
            "row 0 of the plan arrived again; row 3 of the plan did not arrive",
        ),
        ("cut", 0, "cut", r"tokens of documents were cut off: its rows are 56 wide; .* 64"),
        ("other", 0, "unknown", "none of its 4 rows is in any step from 0 to 15: other data"),
    ],
)
def test_an_unplanned_batch_is_explained(store, expected, fault, rank, kind, message):
    recorded = record_batches(store, broken_examples.FAULTS[fault])
    locations = find_differing_batches(expected, recorded)
    assert locations[0] == (3, rank)
    assert len(locations) == (STEPS - 3) * (RANKS - rank)
    difference = explain_difference(expected, recorded, *locations[0])
    assert (difference.step, difference.rank, difference.kind) == (3, rank, kind)
    assert re.search(message, difference.sentence), difference.sentence
    # ``planned`` describes the first row that differs, with its documents.
    planned = difference.planned[0]
    assert (planned.step, planned.rank, planned.rank_row) == (3, rank, difference.rows[0])
    assert planned.spans
    if fault == "late":
        assert difference.found[0] == RowLocation(4, 0, 0)
        assert difference.came[0].step == 4


def test_equal_batches_do_not_differ_whatever_the_passes(store, expected):
    assert find_differing_batches(expected, record_batches(store)) == []


def test_removed_padding_is_no_missing_token(tmp_path):
    store = make_store(tmp_path, 52, 53)
    expected = ExpectedBatches([make_rank_loader(store, rank, STEPS + LOOKAHEAD_STEPS) for rank in range(RANKS)], STEPS)
    recorded = record_batches(store, broken_examples.cut_tokens)
    difference = explain_difference(expected, recorded, *find_differing_batches(expected, recorded)[0])
    assert difference.kind == "cut"
    assert difference.sentence.startswith("padding was cut off")


def test_other_wrong_positions_are_not_called_continuous(store, expected):
    def clear_positions(loader, batch):
        return {**batch, "position_ids": batch["position_ids"] * 0}

    recorded = record_batches(store, clear_positions)
    difference = explain_difference(expected, recorded, *find_differing_batches(expected, recorded)[0])
    assert difference.kind == "positions"
    assert difference.sentence.endswith("differ")


@pytest.mark.parametrize(
    ("steps", "kind", "message", "location"),
    [
        (5, "ended", "it made 5 steps of 8", (5, 0)),
        (10, "more", "it made 10 steps; the run has 8", (8, 0)),
    ],
)
def test_another_number_of_steps(store, expected, steps, kind, message, location):
    recorded = record_batches(store, steps=steps)
    assert find_differing_batches(expected, recorded)[0] == location
    difference = explain_difference(expected, recorded, *location)
    assert (difference.kind, difference.sentence) == (kind, message)


def test_a_rank_without_a_record(store, expected):
    recorded = record_batches(store)[:1]
    assert find_differing_batches(expected, recorded) == [(step, 1) for step in range(STEPS)]
    assert explain_difference(expected, recorded, 0, 1).sentence == "this rank recorded nothing"
