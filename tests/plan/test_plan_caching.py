"""Caching in plans: results are reused, and nothing is read without need."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Edit, Mixture, Plan, PlanError, PlanSpec
from batchloom.plan import Stage, with_journal
from batchloom.plan.order import RowPart
from plan.length_stores import ArrayLengths, LengthStore
from plan.test_mixture import list_rows, make_stores
from tiers import examples


class CountingStore(LengthStore):
    """Store that counts the documents whose lengths are read."""

    def __init__(self, lengths, fingerprint):
        super().__init__(lengths, fingerprint)
        self.reads = 0
        store = self

        class Counting(ArrayLengths):
            def take(self, documents):
                store.reads += len(documents)
                return super().take(documents)

        self.lengths = Counting(lengths)


def make_counting_stores(documents=4000):
    return {name: CountingStore([5, 9, 13, 16] * (documents // 4), name) for name in ("a", "b")}


SPEC = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, steps=1500)


def test_an_edit_after_a_resume_recounts_nothing():
    stores = make_counting_stores()
    mixture = Mixture({"a": 2, "b": 1}, stores=stores)
    plan = Plan(mixture, SPEC).edited(Edit(step=700, seq_len=32))
    plan.rows(*plan.positions_of(900))
    state = json.loads(json.dumps(plan.state(plan.positions_of(900)[0])))
    for store in stores.values():
        store.reads = 0
    resumed = with_journal(Plan(mixture, SPEC), state)
    resumed.resume(state)
    edited = resumed.edited(Edit(step=905, seq_len=16)).edited(Edit(step=907, weights={"a": 1}))
    rows = edited.rows(*edited.positions_of(906))
    # A pool has 20 documents, the earlier part of the run thousands.
    assert sum(store.reads for store in stores.values()) < 600
    assert list_rows(rows) == list_rows(Plan(mixture, SPEC, edited.edits).rows(*edited.positions_of(906)))


def test_overlong_documents_are_searched_once():
    stores = make_counting_stores()
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, steps=1500, overlong="error")
    plan = Plan(Mixture({"a": 2, "b": 1}, stores=stores), spec)
    assert sum(store.reads for store in stores.values()) >= 8000
    for store in stores.values():
        store.reads = 0
    state = copy.copy(copy.copy(plan)).edited(Edit(step=905, weights={"a": 1})).state(0)
    with_journal(copy.copy(plan), state).resume(state)
    assert sum(store.reads for store in stores.values()) < 600
    with pytest.raises(PlanError, match="Document 2 of source 'a' has 13 tokens"):
        plan.edited(Edit(step=905, seq_len=12))


def test_a_late_edit_does_not_delay_the_first_step():
    stores = make_counting_stores()
    plan = Plan(Mixture({"a": 2, "b": 1}, stores=stores), SPEC)
    plan = plan.edited(Edit(step=1400, seq_len=32))
    assert len(plan.orders.latest()) == 2
    assert not plan.orders.is_counted
    assert len(plan.rows(*plan.positions_of(0))) == 4
    assert sum(store.reads for store in stores.values()) < 300
    plan.orders.count_all()
    assert {order.spec.seq_len for order in plan.orders.latest()} == {32}
    assert plan.orders.is_counted


def test_pools_of_unread_lanes_are_not_cached():
    plan = Plan(
        LengthStore([7] * 4000),
        PlanSpec(seq_len=16, global_batch_size=8, pool_size=10, lanes=8, epochs=1),
    )
    for step in range(200):
        plan.rows(*plan.positions_of(step), RowPart(1, 8))
    assert plan.orders.order(0).pool_rows.count_cached() <= 2


@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=3, max_size=3),
    lanes=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=examples(80), deadline=None)
def test_sources_may_run_out_at_the_same_position(lengths, lanes):
    mixture = Mixture({"a": 1, "b": 1, "c": 1}, stores=make_stores(*lengths), exhausted="redistribute")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=4, lanes=lanes)
    plan = Plan(mixture, spec)
    rows = plan.rows(0, plan.positions)
    for number, source_lengths in enumerate(lengths):
        is_source = rows.sources == number
        tokens = np.bincount(rows.documents[is_source], rows.lengths[is_source], minlength=len(source_lengths))
        assert tokens.tolist() == source_lengths


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("exhausted", ["stop", "redistribute"])
def test_seq_len_changes_where_sources_run_out(exhausted, step):
    lengths = ([5, 9, 13, 16] * 4, [7] * 30)
    mixture = Mixture({"a": 1, "b": 1}, stores=make_stores(*lengths), exhausted=exhausted)
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=4, pool_size=4))
    edited = plan.edited(Edit(step=step, seq_len=24))
    served_tokens = np.zeros(2, int)
    for number in range(edited.steps):
        rows = edited.rows(*edited.positions_of(number))
        served_tokens += np.bincount(rows.sources, rows.lengths, minlength=2).astype(int)
    expected = [sum(source_lengths) for source_lengths in lengths]
    assert served_tokens.tolist() == expected if exhausted == "redistribute" else (served_tokens <= expected).all()


def test_a_state_past_the_end_of_an_edited_run_is_resumed():
    mixture = Mixture({"a": 1}, stores=make_stores([5] * 6, [5] * 6), exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=2, steps=20))
    plan = plan.edited(Edit(step=9, weights={"a": 2}))
    state = plan.state(plan.positions_of(12)[0])
    assert plan.serve_until(state["position"]).has_ended
    assert copy.copy(plan).resume(state) == 24


def make_exhausting_run():
    """Make a mixture with two sources exhausted before the end, and its steps."""
    data = Mixture(
        {"a": 1, "b": 1, "c": 1},
        stores={name: LengthStore([9] * size, name) for name, size in (("a", 40), ("b", 90), ("c", 400))},
        exhausted="redistribute",
    )
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=8)
    plan = Plan(data, spec)
    return data, spec, [list_step(plan, step) for step in range(plan.steps)]


def list_step(plan, step):
    rows = plan.rows(*plan.positions_of(step))
    return rows.sources.tolist(), rows.documents.tolist(), rows.starts.tolist()


@pytest.mark.parametrize("is_used", [0, 1])
def test_a_state_resumed_in_a_used_plan_changes_nothing(is_used):
    data, spec, steps = make_exhausting_run()
    plan = Plan(data, spec)
    for step in range(len(steps) * is_used):
        assert list_step(plan, step) == steps[step]
    assert len(Plan(data, spec).orders.timeline.exhausted) == 0
    for step in (len(steps) - 2, len(steps) // 2, len(steps) - 1):
        state = json.loads(json.dumps(plan.state(plan.positions_of(step)[0])))
        for _ in range(2):
            assert plan.resume(state) == plan.positions_of(step)[0]
        plan.run._cached_windows.clear()
        assert [list_step(plan, other_step) for other_step in range(len(steps))] == steps
        assert plan.steps == len(steps)


@pytest.mark.parametrize("changes", [{"ban": {"a": [1]}}, {"global_batch_size": 4}])
@pytest.mark.parametrize("edit_step", [5, 15])
def test_an_edit_moves_no_stage(changes, edit_step):
    data = Mixture(
        {"a": 1, "b": 1},
        stores={"a": LengthStore([9] * 400, "a"), "b": LengthStore([9] * 400, "b")},
        stages=[Stage(weights={"a": 1}, tokens=20 * 4 * 16)],
    )
    plan = Plan(data, PlanSpec(seq_len=16, global_batch_size=4, steps=40))
    edited = plan.edited(Edit(step=edit_step, **changes)).edited(Edit(step=edit_step + 1, ban={"b": [3]}))
    assert [segment.start for segment in edited.orders.run_layout.list_schedules()] == [0, 80]
    assert [list_step(edited, step) for step in range(40)] == [list_step(plan, step) for step in range(40)]


def test_a_source_without_weight_changes_no_pool():
    stores = {f"s{n}": LengthStore([9] * 30, f"s{n}") for n in range(17)}
    weights = dict.fromkeys(list(stores)[:16], 1)
    spec = PlanSpec(seq_len=16, global_batch_size=4, steps=4)
    plan = Plan(Mixture(weights, stores=dict(list(stores.items())[:16])), spec)
    assert Plan(Mixture(weights, stores=stores), spec).fingerprint == plan.fingerprint


def test_threads_ask_a_plan_for_its_names_and_states():
    for _ in range(20):
        plan = Plan(LengthStore([3] * 500), PlanSpec(seq_len=16, global_batch_size=4, epochs=1))
        questions = [lambda plan=plan: plan.state(4), lambda plan=plan: plan.fingerprint, lambda plan=plan: plan.steps]
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(question) for question in questions]
            assert all(future.result(timeout=60) for future in futures)


def test_the_length_of_a_run_may_be_asked_while_it_is_read():
    rng = np.random.default_rng(0)
    stores = {f"s{n:03}": LengthStore(rng.integers(1, 30, 20 + n), f"s{n:03}") for n in range(40)}
    mixture = Mixture(dict.fromkeys(stores, 1), stores=stores, exhausted="redistribute")
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=4, steps=700)
    expected = list_rows(Plan(mixture, spec).rows(1760, 1764))
    for _ in range(3):
        plan = Plan(mixture, spec)
        with ThreadPoolExecutor(2) as pool:
            steps = pool.submit(lambda plan=plan: plan.steps)
            rows = pool.submit(plan.rows, 1760, 1764)
        positions = [segment.position for segment in plan.orders.timeline.segments()]
        assert positions == sorted(positions)
        assert list_rows(rows.result()) == expected
        assert steps.result() == Plan(mixture, spec).steps
