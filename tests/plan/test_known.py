"""What a plan has found out is kept where it stays true, and no question reads more than it must."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanError, PlanSpec
from batchloom.plan import Stage, with_journal
from plan.sources import ArrayLengths, LengthsOnly
from plan.test_mixture import by_row, stores
from tiers import examples


class Watched(LengthsOnly):
    """Lengths that count how many documents were asked for."""

    def __init__(self, lengths, fingerprint):
        super().__init__(lengths, fingerprint)
        self.asked = 0
        of = self

        class Counting(ArrayLengths):
            def take(self, documents):
                of.asked += len(documents)
                return super().take(documents)

        self.lengths = Counting(lengths)


def watched(documents=4000):
    return {name: Watched([5, 9, 13, 16] * (documents // 4), name) for name in ("a", "b")}


SPEC = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, steps=1500)


def test_an_edit_after_a_resume_counts_nothing_anew():
    given_stores = watched()
    mixture = Mixture({"a": 2, "b": 1}, stores=given_stores)
    plan = Plan(mixture, SPEC).edited(Edit(step=700, seq_len=32))
    plan.rows(*plan.positions_of(900))
    state = json.loads(json.dumps(plan.state(plan.positions_of(900)[0])))
    for store in given_stores.values():
        store.asked = 0
    resumed = with_journal(Plan(mixture, SPEC), state)
    resumed.resume(state)
    later = resumed.edited(Edit(step=905, seq_len=16)).edited(Edit(step=907, weights={"a": 1}))
    rows = later.rows(*later.positions_of(906))
    # A pool has 20 documents, the run before some thousands.
    assert sum(store.asked for store in given_stores.values()) < 600
    assert by_row(rows) == by_row(Plan(mixture, SPEC, later.edits).rows(*later.positions_of(906)))


def test_whether_a_document_is_too_long_is_looked_at_once():
    given_stores = watched()
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, steps=1500, overlong="error")
    plan = Plan(Mixture({"a": 2, "b": 1}, stores=given_stores), spec)
    assert sum(store.asked for store in given_stores.values()) >= 8000
    for store in given_stores.values():
        store.asked = 0
    state = copy.copy(copy.copy(plan)).edited(Edit(step=905, weights={"a": 1})).state(0)
    with_journal(copy.copy(plan), state).resume(state)
    assert sum(store.asked for store in given_stores.values()) < 600
    with pytest.raises(PlanError, match="Document 2 of source 'a' has 13 tokens"):
        plan.edited(Edit(step=905, seq_len=12))


def test_an_edit_far_ahead_does_not_keep_the_first_step_waiting():
    given_stores = watched()
    plan = Plan(Mixture({"a": 2, "b": 1}, stores=given_stores), SPEC)
    plan = plan.edited(Edit(step=1400, seq_len=32))
    assert len(plan.orders.latest()) == 2
    assert not plan.orders.is_counted
    assert len(plan.rows(*plan.positions_of(0))) == 4
    assert sum(store.asked for store in given_stores.values()) < 300
    plan.orders.count_all()
    assert {order.spec.seq_len for order in plan.orders.latest()} == {32}
    assert plan.orders.is_counted


def test_pools_of_lanes_that_are_not_read_are_not_kept():
    plan = Plan(
        LengthsOnly([7] * 4000),
        PlanSpec(seq_len=16, global_batch_size=8, pool_size=10, lanes=8, epochs=1),
    )
    for step in range(200):
        plan.rows(*plan.positions_of(step), (1, 8))
    held = [rows for lane in plan.orders.order(0)._cached_rows.values() for rows in lane.values()]
    assert len(held) <= 2


@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=3, max_size=3),
    lanes=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=examples(80), deadline=None)
def test_sources_may_run_out_at_the_same_position(lengths, lanes):
    mixture = Mixture({"a": 1, "b": 1, "c": 1}, stores=stores(*lengths), exhausted="redistribute")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=4, lanes=lanes)
    plan = Plan(mixture, spec)
    rows = plan.rows(0, plan.positions)
    for number, own in enumerate(lengths):
        mine = rows.sources == number
        tokens = np.bincount(rows.documents[mine], rows.lengths[mine], minlength=len(own))
        assert tokens.tolist() == own


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("exhausted", ["stop", "redistribute"])
def test_seq_len_changes_where_sources_run_out(exhausted, step):
    lengths = ([5, 9, 13, 16] * 4, [7] * 30)
    mixture = Mixture({"a": 1, "b": 1}, stores=stores(*lengths), exhausted=exhausted)
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=4, pool_size=4))
    edited = plan.edited(Edit(step=step, seq_len=24))
    found = np.zeros(2, int)
    for number in range(edited.steps):
        rows = edited.rows(*edited.positions_of(number))
        found += np.bincount(rows.sources, rows.lengths, minlength=2).astype(int)
    whole = [sum(own) for own in lengths]
    assert found.tolist() == whole if exhausted == "redistribute" else (found <= whole).all()


def test_a_state_past_the_end_of_a_run_that_was_to_change_is_resumed():
    mixture = Mixture({"a": 1}, stores=stores([5] * 6, [5] * 6), exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=2, steps=20))
    plan = plan.edited(Edit(step=9, weights={"a": 2}))
    state = plan.state(plan.positions_of(12)[0])
    assert plan.orders.timeline.end is not None
    assert copy.copy(plan).resume(state) == 24


def exhausting():
    """A plan of three sources, of which two are gone before its end, and its batches by step."""
    data = Mixture(
        {"a": 1, "b": 1, "c": 1},
        stores={name: LengthsOnly([9] * size, name) for name, size in (("a", 40), ("b", 90), ("c", 400))},
        exhausted="redistribute",
    )
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=8)
    plan = Plan(data, spec)
    return data, spec, [rows_of(plan, step) for step in range(plan.steps)]


def rows_of(plan, step):
    rows = plan.rows(*plan.positions_of(step))
    return rows.sources.tolist(), rows.documents.tolist(), rows.starts.tolist()


@pytest.mark.parametrize("before", [0, 1])
def test_a_state_loaded_into_a_plan_that_was_asked_before_changes_nothing(before):
    data, spec, whole = exhausting()
    used = Plan(data, spec)
    for step in range(len(whole) * before):
        assert rows_of(used, step) == whole[step]
    assert len(Plan(data, spec).orders.timeline.exhausted) == 0
    for step in (len(whole) - 2, len(whole) // 2, len(whole) - 1):
        state = json.loads(json.dumps(used.state(used.positions_of(step)[0])))
        for _ in range(2):
            assert used.resume(state) == used.positions_of(step)[0]
        used._rows._windows._cached_windows.clear()
        assert [rows_of(used, one) for one in range(len(whole))] == whole
        assert used.steps == len(whole)


@pytest.mark.parametrize("changes", [{"ban": {"a": [1]}}, {"global_batch_size": 4}])
@pytest.mark.parametrize("at", [5, 15])
def test_an_edit_moves_no_stage(changes, at):
    data = Mixture(
        {"a": 1, "b": 1},
        stores={"a": LengthsOnly([9] * 400, "a"), "b": LengthsOnly([9] * 400, "b")},
        stages=[Stage(weights={"a": 1}, tokens=20 * 4 * 16)],
    )
    plan = Plan(data, PlanSpec(seq_len=16, global_batch_size=4, steps=40))
    edited = plan.edited(Edit(step=at, **changes)).edited(Edit(step=at + 1, ban={"b": [3]}))
    assert [change.position for change in edited.orders.run_layout.changes] == [0, 80]
    assert [rows_of(edited, step) for step in range(40)] == [rows_of(plan, step) for step in range(40)]


def test_a_source_that_waits_changes_no_pool():
    many = {f"s{n}": LengthsOnly([9] * 30, f"s{n}") for n in range(17)}
    weights = dict.fromkeys(list(many)[:16], 1)
    spec = PlanSpec(seq_len=16, global_batch_size=4, steps=4)
    begun = Plan(Mixture(weights, stores=dict(list(many.items())[:16])), spec)
    assert Plan(Mixture(weights, stores=many), spec).fingerprint == begun.fingerprint
