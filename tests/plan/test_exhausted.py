"""Sources that run out: each sequence is served as often as its epochs, whatever the lanes, edits and restarts."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.plan import SourceSpec, find_document_positions, with_journal
from plan.sources import LengthsOnly
from plan.test_known import Watched
from plan.test_mixture import by_row, stores
from tiers import examples

CHANGES = [
    {"weights": {"a": 3, "b": 1, "c": 1}},
    {"weights": {"a": 1, "b": 1, "c": 4}},
    {"seq_len": 16},
    {"seq_len": 40},
    {"seq_len": 8},
]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def often(plan, found):
    """How often each token of each source is in spans."""
    counts = []
    for number, name in enumerate(plan.names):
        lengths = plan.stores[name].lengths.take(np.arange(plan.stores[name].lengths.size))
        held = [np.zeros(n, int) for n in lengths]
        for source, document, start, length in found:
            if source == number:
                held[document][start : start + length] += 1
        counts.append(np.concatenate(held))
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
    most = 40 if overlong == "split" else 16
    lengths = [[min(n, most) for n in own] for own in lengths]
    spec = PlanSpec(seq_len=16, global_batch_size=8, pool_size=4, lanes=lanes, overlong=overlong, seed=epochs)

    def made(edits=()):
        """A plan that knows nothing yet."""
        sources = {"a": SourceSpec(epochs=epochs)}
        mixture = Mixture(weights, stores=stores(*lengths), exhausted=exhausted, sources=sources)
        return Plan(mixture, spec, edits)

    plan = made()
    for _ in range(data.draw(st.integers(0, 2))):
        step = data.draw(st.integers(plan.edits[-1].step if plan.edits else 0, plan.steps))
        change = data.draw(st.sampled_from(CHANGES if overlong == "split" else CHANGES[:-1]))
        plan = plan.edited(Edit(step=step, **change))
    steps = [by_row(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]
    everything = [row for step in steps for row in step][: plan.positions]
    counts = often(plan, [span for row in everything for span in row])
    gone = [n for n in range(3) if plan.orders.timeline.exhausted.get(n, plan.positions + 1) <= plan.positions]
    for number, count in enumerate(counts):
        whole = epochs if number == 0 else 1
        assert count.max(initial=0) <= whole
        if number in gone:
            assert (count == whole).all()
    assert gone == [0, 1, 2] if exhausted == "redistribute" else len(gone) >= 1
    # What is empty is fewer than a group of lanes for each source.
    empty = sum(not row for row in everything)
    assert empty <= 3 * (lanes - 1)

    step = data.draw(st.integers(0, plan.steps - 1))
    start, stop = plan.positions_of(step)
    state = json.loads(json.dumps(plan.state(start)))
    resumed = with_journal(made(), state)
    assert resumed.resume(state) == start
    twin = copy.copy(resumed)
    for other in (made(plan.edits), resumed, twin):
        assert by_row(other.rows(start, stop)) == by_row(plan.rows(start, stop))
        for later in range(step + 1, min(step + 6, plan.steps)):
            assert by_row(other.rows(*other.positions_of(later))) == steps[later]
    earlier = data.draw(st.integers(0, step))
    first, last = plan.positions_of(earlier)
    assert by_row(resumed.rows(first, last)) == by_row(plan.rows(first, last))
    parts = [by_row(plan.rows(start, stop, (rank, lanes))) for rank in range(lanes)]
    assert {len(part) for part in parts} == {8 // lanes}
    assert sorted(row for part in parts for row in part) == sorted(by_row(plan.rows(start, stop)))

    number = data.draw(st.integers(0, 2))
    document = data.draw(st.integers(0, len(lengths[number]) - 1))
    held = {
        position
        for position, row in enumerate(everything)
        if any(source == number and of == document for source, of, *_ in row)
    }
    assert {one.position for one in find_document_positions(made(plan.edits), number, document, plan.steps)} == held


def test_a_group_of_lanes_is_all_that_is_empty():
    """At the weights and lanes of a real run: nothing is left out of a source that lanes share unequally."""
    sizes = {"a": 20_000, "b": 60_000}
    given_stores = {name: LengthsOnly([9] * size, name) for name, size in sizes.items()}
    mixture = Mixture({"a": 1, "b": 2.3}, stores=given_stores, exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=9, global_batch_size=64, lanes=64, pool_size=256))
    rows = plan.rows(0, plan.positions)
    for number, size in enumerate(sizes.values()):
        served = rows.documents[rows.sources == number]
        assert np.array_equal(np.bincount(served, minlength=size), np.ones(size))
    assert len(rows) - len(rows.documents) < 2 * 64
    # Nearly all is served by its own lane.
    order = plan.orders.order(0)
    pool_of = np.zeros(sizes["a"], int)
    for pool in range(order.pools.count):
        pool_of[order.pools.members(pool)] = pool
    mine = rows.sources == 0
    lanes = plan.run.lanes_of(0, plan.positions)[np.repeat(np.arange(len(rows)), np.diff(rows.pointers))]
    assert (pool_of[rows.documents[mine]] % 64 == lanes[mine]).mean() > 0.8


@pytest.mark.parametrize(("overlong", "edits"), [("drop", []), ("truncate", []), ("split", [Edit(step=3, seq_len=24)])])
def test_the_first_steps_count_few_pools_of_a_source_that_runs_out(overlong, edits):
    given_stores = {name: Watched([5, 9, 13, 16] * 100_000, name) for name in ("a", "b")}
    mixture = Mixture({"a": 1, "b": 1}, stores=given_stores, exhausted="stop")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=64, overlong=overlong, steps=1000)
    plan = Plan(mixture, spec, edits)
    for step in range(8):
        plan.rows(*plan.positions_of(step))
    assert sum(store.asked for store in given_stores.values()) < 300_000
    plan.state(plan.positions_of(8)[0])


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_a_run_that_ends_before_an_edit_can_be_counted(lanes):
    mixture = Mixture({"a": 1}, stores={"a": LengthsOnly([16] * 36, "a")}, exhausted="stop")
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
def test_every_token_of_one_store_is_served_once_an_epoch_whatever_is_packed_anew(
    lengths, lanes, cuts, epochs, seed, data
):
    spec = PlanSpec(seq_len=16, global_batch_size=8, pool_size=4, lanes=lanes, epochs=epochs, seed=seed)
    edits = [Edit(step=step, seq_len=seq_len) for step, seq_len in sorted(cuts)]

    def made(edits=()):
        return Plan(LengthsOnly(lengths), spec, edits)

    plan = made(edits)
    steps = [by_row(plan.rows(*plan.positions_of(step))) for step in range(plan.steps)]
    if plan.steps > edits[-1].step:
        (count,) = often(plan, [span for step in steps for row in step for span in row])
        assert (count == epochs).all()
        assert all(row for step in steps[:-1] for row in step)
    step = data.draw(st.integers(0, plan.steps - 1))
    state = json.loads(json.dumps(plan.state(plan.positions_of(step)[0])))
    resumed = with_journal(made(), state)
    resumed.resume(state)
    counted = made(edits)
    counted.orders.count_all()
    for other in (made(edits), resumed, counted):
        for later in range(step, min(step + 4, plan.steps)):
            assert by_row(other.rows(*other.positions_of(later))) == steps[later]
    document = data.draw(st.integers(0, len(lengths) - 1))
    held = {
        (step, row)
        for step, rows in enumerate(steps)
        for row, spans_ in enumerate(rows)
        if any(of == document for _, of, *_ in spans_)
    }
    found = {(one.step, one.row) for one in find_document_positions(made(edits), 0, document, plan.steps)}
    assert found == held
