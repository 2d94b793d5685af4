import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from batchloom import PlanError, PlanSpec, StateError
from batchloom.plan import LanePlan, order_lane_ranges
from batchloom.plan.order import (
    check_lane_world,
    check_lanes,
    choose_default_lanes,
    compute_lane_pool_size,
    lanes as lanes_module,
    list_rank_lanes,
    pack_lane_pool,
)
from batchloom.plan.order.lanes import compute_lane_pool_start
from plan.sources import LengthsOnly
from tiers import examples

SPEC = {"seq_len": 16, "global_batch_size": 12, "steps": 40, "pool_size": 8}


def bounds_of(cuts, documents):
    return np.array([0, *sorted(min(cut, documents) for cut in cuts), documents])


def row_spans(rows):
    spans = list(zip(rows.documents.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    return [spans[a:b] for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


STORES = st.lists(st.integers(1, 40), min_size=24, max_size=120)
CUTS = st.lists(st.integers(0, 120), min_size=8, max_size=30)


def plan_of(lengths, cuts, lanes=3, **changes):
    spec = PlanSpec(**{**SPEC, **changes})
    return LanePlan(LengthsOnly(lengths), spec, lanes=lanes, bounds=bounds_of(cuts, len(lengths)))


@given(lengths=STORES, cuts=CUTS, shuffle=st.booleans(), packing=st.sampled_from(["best_fit", "wrap"]))
@settings(max_examples=examples(60), deadline=None)
def test_a_lane_reads_all_of_its_stretches_before_it_begins_anew(lengths, cuts, shuffle, packing):
    plan = plan_of(lengths, cuts, shuffle=shuffle, packing=packing)
    bounds = plan.orders.bounds
    for lane in range(3):
        mine = order_lane_ranges(len(bounds) - 1, 3, plan.spec, lane, 0)
        want = sorted(d for s in mine for d in range(bounds[s], bounds[s + 1]))
        for epoch in (0, 1):
            found, number = [], 0
            while len(pool := plan.orders.lanes[lane].documents(epoch, number)):
                assert len(pool) <= compute_lane_pool_size(plan.spec, epoch, number)
                found += pool.tolist()
                number += 1
            assert sorted(found) == want
    every = [s for lane in range(3) for s in order_lane_ranges(len(bounds) - 1, 3, plan.spec, lane, 5)]
    assert sorted(every) == list(range(len(bounds) - 1))


@given(
    lengths=STORES,
    size=st.integers(1, 4),
    world=st.sampled_from([1, 2, 3, 6]),
    step=st.integers(0, 39),
)
@settings(max_examples=examples(60), deadline=None)
def test_ranks_hold_the_positions_of_their_lanes(lengths, size, world, step):
    # Of fewer stretches than lanes a lane has nothing, and says so.
    assume(-(-len(lengths) // size) >= 6)
    plan = plan_of(lengths, range(size, len(lengths), size), lanes=6)
    whole = row_spans(plan.rows(step * 12, step * 12 + 12))
    found = [None] * 12
    for rank in range(world):
        found[rank::world] = row_spans(plan.rows(*plan.positions_of(step), (rank, world)))
    assert found == whole
    assert all(whole)


def test_position_p_is_sequence_p_div_k_of_lane_p_mod_k():
    plan = plan_of([5] * 60, range(0, 60, 4))
    rows = row_spans(plan.rows(0, 36))
    for lane in range(3):
        documents = plan.orders.lanes[lane].documents(0, 0)
        first = pack_lane_pool(np.full(len(documents), 5, np.uint32), plan.spec, lane, 0, 0)
        named = [[(int(documents[d]), s, n) for d, s, n in row] for row in row_spans(first)]
        assert rows[lane::3][: len(named)] == named


def test_the_first_pools_grow():
    spec = PlanSpec(seq_len=8, global_batch_size=1, steps=1, pool_size=1000)
    sizes = [compute_lane_pool_size(spec, 0, pool) for pool in range(14)]
    assert sizes[:5] == [128, 256, 512, 1000, 1000]
    assert {compute_lane_pool_size(spec, 1, pool) for pool in range(14)} == {1000}
    for epoch in (0, 1):
        every = [compute_lane_pool_size(spec, epoch, pool) for pool in range(40)]
        assert [compute_lane_pool_start(spec, epoch, pool) for pool in range(40)] == [
            sum(every[:pool]) for pool in range(40)
        ]


@given(lengths=STORES, size=st.integers(1, 4), at=st.integers(0, 30))
@settings(max_examples=examples(40), deadline=None)
def test_a_state_goes_on_where_it_was_taken(lengths, size, at):
    cuts = range(0, len(lengths), size)
    plan, fresh = plan_of(lengths, cuts), plan_of(lengths, cuts)
    state = plan.state(12 * at)
    assert fresh.resume(state) == 12 * at
    assert row_spans(fresh.rows(*fresh.positions_of(at), (1, 3))) == row_spans(
        plan.rows(*plan.positions_of(at), (1, 3))
    )
    with pytest.raises(StateError, match="changed after"):
        fresh.resume({**state, "position": 5})
    with pytest.raises(StateError, match=r"another plan: spec.seed was 0 and is 9. Give the settings"):
        plan_of(lengths, cuts, seed=9).resume(state)


@pytest.mark.parametrize("state", [[], {}, {"position": 3}, None])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError, match=r"not a loader's state.*Give what state_dict"):
        plan_of([5] * 60, range(0, 60, 4)).resume(state)


def test_threads_walk_the_lanes_one_after_the_other():
    plan = plan_of([5] * 120, range(0, 120, 4))
    store, inside, most = plan.orders.data.lengths, [], []
    take = store.take

    def slow(documents):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return take(documents)

    store.take = slow
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(plan.rows, 120 * n, 120 * n + 12) for n in range(3)]
        told = pool.submit(plan.state, 240)
        rows = [row_spans(one.result()) for one in asked]
    assert set(most) == {1}
    fresh = plan_of([5] * 120, range(0, 120, 4))
    assert rows == [row_spans(fresh.rows(120 * n, 120 * n + 12)) for n in range(3)]
    assert told.result() == fresh.state(240)


@pytest.mark.parametrize(
    ("batch", "stretches", "lanes"),
    [(64, 4096, 64), (12, 100, 4), (7, 9, 1), (64, 5, 4), (8, 0, 1)],
)
def test_default_lanes_divide_the_batch_and_have_stretches(batch, stretches, lanes):
    assert choose_default_lanes(batch, stretches) == lanes


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(PlanError, match=r"lanes 5 does not divide global_batch_size 12.*3, 4, 6"):
        check_lanes(5, 12)
    with pytest.raises(PlanError, match=r"6 lanes.*4 ranks. World sizes that fit: 1, 2, 3, 6"):
        check_lane_world(6, 0, 4)
    with pytest.raises(PlanError, match="rank 3 of world_size 3"):
        check_lane_world(6, 3, 3)
    assert list(list_rank_lanes(6, 1, 2)) == [1, 3, 5]
    with pytest.raises(PlanError, match="Lane . of 6 has no sequence.*lanes=3"):
        plan_of([5] * 8, [4], lanes=6).rows(0, 12)
    with pytest.raises(PlanError, match="more than seq_len 16"):
        plan_of([50] * 80, range(0, 80, 5), overlong="error").rows(0, 12)
    with pytest.raises(PlanError, match="end at document 9"):
        LanePlan(LengthsOnly([5] * 8), PlanSpec(**SPEC), lanes=2, bounds=np.array([0, 9]))


def test_the_order_is_pinned():
    assert lanes_module.LANES_VERSION == 1
    plan = plan_of(list(range(1, 41)), range(0, 40, 3), seed=7)
    assert [order_lane_ranges(15, 3, plan.spec, lane, 0).tolist() for lane in range(3)] == PINNED_STRETCHES
    assert [[d for d, _, _ in row] for row in row_spans(plan.rows(0, 6))] == PINNED_ROWS
    assert [[d for d, _, _ in row] for row in row_spans(plan.rows(300, 303))] == PINNED_LATE


PINNED_STRETCHES = [[14, 0, 11, 7, 6], [10, 4, 3, 2, 13], [9, 12, 1, 5, 8]]
PINNED_ROWS = [[32], [29], [33], [39], [28], [24]]
PINNED_LATE = [[15], [27], [0, 23, 22]]
