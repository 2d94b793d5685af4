"""A batch that is not the plan's is found, and it is said what came instead."""

import re

import numpy as np
import pytest

from analysis.compare import broken_examples
from batchloom import Loader
from batchloom.analysis.compare.batch_difference import (
    LOOKAHEAD_STEPS,
    ExpectedBatches,
    RowLocation,
    explain_difference,
    find_differing_batches,
)
from batchloom.analysis.compare.witness import StepHash
from batchloom.testing import write_store

STEPS, RANKS = 8, 2
SIZES = {"seq_len": 64, "global_batch_size": 8}


def made_store(folder, low, high):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 250, rng.integers(low, high)).tolist() for _ in range(600)]
    return write_store(folder / "store", documents)


def loader_of(store, rank, steps, output="numpy"):
    return Loader(store, **SIZES, rank=rank, world_size=RANKS, steps=steps, output=output, prefetch=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made_store(tmp_path_factory.mktemp("data"), 5, 90)


@pytest.fixture(scope="module")
def wanted(store):
    return ExpectedBatches([loader_of(store, rank, STEPS + LOOKAHEAD_STEPS) for rank in range(RANKS)], STEPS)


def told_of(store, fault=None, steps=STEPS):
    """What witnesses tell of a trainer that has a fault from its third step on."""
    ranks = []
    for rank in range(RANKS):
        loader, told = loader_of(store, rank, steps + LOOKAHEAD_STEPS, "torch"), []
        for step in range(steps):
            batch, entry = loader.batch(step), StepHash()
            if fault is not None and step >= broken_examples.FAULTY:
                batch = fault(loader, batch)
            for ids, positions in zip(batch["input_ids"].split(2), batch["position_ids"].split(2), strict=True):
                entry.add(ids, positions)
            told.append(entry.to_entry())
        ranks.append(told)
    return ranks


@pytest.mark.parametrize(
    ("fault", "rank", "kind", "said"),
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
def test_what_came_is_told(store, wanted, fault, rank, kind, said):
    came = told_of(store, broken_examples.FAULTS[fault])
    places = find_differing_batches(wanted, came)
    assert places[0] == (3, rank)
    assert len(places) == (STEPS - 3) * (RANKS - rank)
    found = explain_difference(wanted, came, *places[0])
    assert (found.step, found.rank, found.kind) == (3, rank, kind)
    assert re.search(said, found.sentence), found.sentence
    # The plan's own documents are told, of the first row that did not come as it is.
    planned = found.planned[0]
    assert (planned.step, planned.rank, planned.rank_row) == (3, rank, found.rows[0])
    assert planned.spans
    if fault == "late":
        assert found.found[0] == RowLocation(4, 0, 0)
        assert found.came[0].step == 4


def test_equal_batches_differ_nowhere_however_they_are_cut_into_passes(store, wanted):
    assert find_differing_batches(wanted, told_of(store)) == []


def test_padding_that_is_cut_off_is_no_lost_token(tmp_path):
    store = made_store(tmp_path, 52, 53)
    wanted = ExpectedBatches([loader_of(store, rank, STEPS + LOOKAHEAD_STEPS) for rank in range(RANKS)], STEPS)
    came = told_of(store, broken_examples.cut)
    found = explain_difference(wanted, came, *find_differing_batches(wanted, came)[0])
    assert found.kind == "cut"
    assert found.sentence.startswith("padding was cut off")


def test_positions_that_are_wrong_otherwise_are_not_called_running_on(store, wanted):
    def ones(loader, batch):
        return {**batch, "position_ids": batch["position_ids"] * 0}

    came = told_of(store, ones)
    found = explain_difference(wanted, came, *find_differing_batches(wanted, came)[0])
    assert found.kind == "positions"
    assert found.sentence.endswith("differ")


@pytest.mark.parametrize(
    ("steps", "kind", "said", "place"),
    [
        (5, "ended", "it made 5 steps of 8", (5, 0)),
        (10, "more", "it made 10 steps; the run has 8", (8, 0)),
    ],
)
def test_another_number_of_steps(store, wanted, steps, kind, said, place):
    came = told_of(store, steps=steps)
    assert find_differing_batches(wanted, came)[0] == place
    found = explain_difference(wanted, came, *place)
    assert (found.kind, found.sentence) == (kind, said)


def test_a_rank_that_told_of_nothing(store, wanted):
    came = told_of(store)[:1]
    assert find_differing_batches(wanted, came) == [(step, 1) for step in range(STEPS)]
    assert explain_difference(wanted, came, 0, 1).sentence == "this rank recorded nothing"
