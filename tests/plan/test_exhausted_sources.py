"""Exhausted sources: sequences are served once per epoch for any lanes and edits."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.plan import SourceSpec, find_document_positions, with_journal
from batchloom.plan.order import RowPart
from plan.length_stores import LengthStore
from plan.test_mixture import list_rows, make_stores
from plan.test_plan_caching import CountingStore
from tiers import examples

CHANGES = [
    {"weights": {"a": 3, "b": 1, "c": 1}},
    {"weights": {"a": 1, "b": 1, "c": 4}},
    {"seq_len": 16},
    {"seq_len": 40},
    {"seq_len": 8},
]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def count_served(plan, spans):
    """Count the occurrences of each token of each source in spans."""
    counts = []
    for number, name in enumerate(plan.names):
        lengths = plan.stores[name].lengths.take(np.arange(plan.stores[name].lengths.size))
        counts_by_document = [np.zeros(n, int) for n in lengths]
        for source, document, start, length in spans:
            if source == number:
                counts_by_document[document][start : start + length] += 1
        counts.append(np.concatenate(counts_by_document))
    return counts


@given(
    lengths=st.tuples(LENGTHS, LENGTHS, LENGTHS),
    exhausted=st.sampled_from(["stop", "redistribute"]),
    lanes=st.sampled_from([1, 2, 4, 8]),
    overlong=st.sampled_from(["split", "drop"]),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_lanes_serve_all_of_a_source_that_runs_out(lengths, exhausted, lanes, overlong, data):
    epochs = data.draw(st.integers(1, 2))
    weights = dict(zip("abc", data.draw(st.permutations([1, 2, 5])), strict=True))
    max_length = 40 if overlong == "split" else 16
    lengths = [[min(n, max_length) for n in source_lengths] for source_lengths in lengths]
    spec = PlanSpec(seq_len=16, global_batch_size=8, pool_size=4, lanes=lanes, overlong=overlong, seed=epochs)

    def make_plan(edits=()):
        """Make a plan without cached state."""
        sources = {"a": SourceSpec(epochs=epochs)}
        mixture = Mixture(weights, stores=make_stores(*lengths), exhausted=exhausted, sources=sources)
        return Plan(mixture, spec, edits)

    plan = make_plan()
    for _ in range(data.draw(st.integers(0, 2))):
        step = data.draw(st.integers(plan.edits[-1].step if plan.edits else 0, plan.steps))
        change = data.draw(st.sampled_from(CHANGES if overlong == "split" else CHANGES[:-1]))
        plan = plan.edited(Edit(step=step, **change))
    steps = [list_rows(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]
    rows = [row for step in steps for row in step][: plan.positions]
    counts = count_served(plan, [span for row in rows for span in row])
    exhausted_sources = [n for n in range(3) if n in plan.serve_until(plan.positions + 1).exhausted]
    for number, count in enumerate(counts):
        source_epochs = epochs if number == 0 else 1
        assert count.max(initial=0) <= source_epochs
        if number in exhausted_sources:
            assert (count == source_epochs).all()
    assert exhausted_sources == [0, 1, 2] if exhausted == "redistribute" else len(exhausted_sources) >= 1
    assert all(rows)

    step = data.draw(st.integers(0, plan.steps - 1))
    start, stop = plan.positions_of(step)
    state = json.loads(json.dumps(plan.state(start)))
    resumed = with_journal(make_plan(), state)
    assert resumed.resume(state) == start
    copied = copy.copy(resumed)
    for other_plan in (make_plan(plan.edits), resumed, copied):
        assert list_rows(other_plan.rows(start, stop)) == list_rows(plan.rows(start, stop))
        for later_step in range(step + 1, min(step + 6, plan.steps)):
            assert list_rows(other_plan.rows(*other_plan.positions_of(later_step))) == steps[later_step]
    earlier_step = data.draw(st.integers(0, step))
    first, last = plan.positions_of(earlier_step)
    assert list_rows(resumed.rows(first, last)) == list_rows(plan.rows(first, last))
    rank_rows = [list_rows(plan.rows(start, stop, RowPart(rank, lanes))) for rank in range(lanes)]
    assert {len(rank_share) for rank_share in rank_rows} == {8 // lanes}
    assert sorted(row for rank_share in rank_rows for row in rank_share) == sorted(list_rows(plan.rows(start, stop)))

    number = data.draw(st.integers(0, 2))
    document = data.draw(st.integers(0, len(lengths[number]) - 1))
    expected_positions = {
        position
        for position, row in enumerate(rows)
        if any(source == number and row_document == document for source, row_document, *_ in row)
    }
    assert {
        at.position for at in find_document_positions(make_plan(plan.edits), number, document, plan.steps)
    } == expected_positions


def test_lanes_leave_no_sequence_empty():
    """Lanes that share a source unequally, as in a real run, serve all of it."""
    sizes = {"a": 20_000, "b": 60_000}
    stores = {name: LengthStore([9] * size, name) for name, size in sizes.items()}
    mixture = Mixture({"a": 1, "b": 2.3}, stores=stores, exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=9, global_batch_size=64, lanes=64, pool_size=256))
    rows = plan.rows(0, plan.positions)
    for number, size in enumerate(sizes.values()):
        served = rows.documents[rows.sources == number]
        assert np.array_equal(np.bincount(served, minlength=size), np.ones(size))
    assert len(rows) == len(rows.documents)
    # Nearly all pools are served by their own lane.
    order = plan.orders.order(0)
    pool_of = np.zeros(sizes["a"], int)
    for pool in range(order.pools.count):
        pool_of[order.pools.members(pool)] = pool
    is_first_source = rows.sources == 0
    lanes = np.repeat(np.arange(len(rows)) % 64, np.diff(rows.pointers))
    assert (pool_of[rows.documents[is_first_source]] % 64 == lanes[is_first_source]).mean() > 0.8


@pytest.mark.parametrize(("overlong", "edits"), [("drop", []), ("truncate", []), ("split", [Edit(step=3, seq_len=24)])])
def test_the_first_steps_count_few_pools_of_a_source_that_runs_out(overlong, edits):
    stores = {name: CountingStore([5, 9, 13, 16] * 100_000, name) for name in ("a", "b")}
    mixture = Mixture({"a": 1, "b": 1}, stores=stores, exhausted="stop")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=64, overlong=overlong, steps=1000)
    plan = Plan(mixture, spec, edits)
    for step in range(8):
        plan.rows(*plan.positions_of(step))
    assert sum(store.reads for store in stores.values()) < 300_000
    plan.state(plan.positions_of(8)[0])


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_a_run_that_ends_before_an_edit_can_be_counted(lanes):
    mixture = Mixture({"a": 1}, stores={"a": LengthStore([16] * 36, "a")}, exhausted="stop")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=2, lanes=lanes, steps=100)
    plan = Plan(mixture, spec, [Edit(step=50, seq_len=32)])
    plan.orders.count_all()
    assert plan.steps == 9
    assert sum(store.lengths.size for store in plan.stores.values()) == 36


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    lanes=st.sampled_from([1, 2, 4, 8]),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([8, 12, 16, 40])), min_size=1, max_size=3),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_every_token_of_one_store_is_served_once_per_epoch(lengths, lanes, cuts, epochs, seed, data):
    spec = PlanSpec(seq_len=16, global_batch_size=8, pool_size=4, lanes=lanes, epochs=epochs, seed=seed)
    edits = [Edit(step=step, seq_len=seq_len) for step, seq_len in sorted(cuts)]

    def make_plan(edits=()):
        return Plan(LengthStore(lengths), spec, edits)

    plan = make_plan(edits)
    steps = [list_rows(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]
    if plan.steps > edits[-1].step:
        (count,) = count_served(plan, [span for step in steps for row in step for span in row])
        assert (count == epochs).all()
        assert all(row for step in steps[:-1] for row in step)
    step = data.draw(st.integers(0, plan.steps - 1))
    state = json.loads(json.dumps(plan.state(plan.positions_of(step)[0])))
    resumed = with_journal(make_plan(), state)
    resumed.resume(state)
    counted = make_plan(edits)
    counted.orders.count_all()
    for other_plan in (make_plan(edits), resumed, counted):
        for later_step in range(step, min(step + 4, plan.steps)):
            assert list_rows(other_plan.rows(*other_plan.positions_of(later_step))) == steps[later_step]
    document = data.draw(st.integers(0, len(lengths) - 1))
    expected = {
        (step, row)
        for step, rows in enumerate(steps)
        for row, spans in enumerate(rows)
        if any(row_document == document for _, row_document, *_ in spans)
    }
    actual = {(at.step, at.row) for at in find_document_positions(make_plan(edits), 0, document, plan.steps)}
    assert actual == expected
