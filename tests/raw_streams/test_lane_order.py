"""The order of streams, by an oracle that has all of a store's lengths."""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from batchloom import PlanError, PlanSpec
from batchloom.plan.order import RowPart
from batchloom.streaming import (
    LANES_VERSION,
    check_lane_world,
    check_lanes,
    choose_default_lanes,
    compute_lane_pool_size,
    list_rank_lanes,
    order_lane_ranges,
    pack_lane_pool,
)
from lane_plans import LanePlan, compute_lane_pool_start
from plan.length_stores import LengthStore
from tiers import examples

SPEC = {"seq_len": 16, "global_batch_size": 12, "steps": 40, "pool_size": 8}


def make_bounds(cuts, documents):
    return np.array([0, *sorted(min(cut, documents) for cut in cuts), documents])


def list_rows(rows):
    spans = list(zip(rows.documents.tolist(), rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    return [spans[a:b] for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


STORES = st.lists(st.integers(1, 40), min_size=24, max_size=120)
CUTS = st.lists(st.integers(0, 120), min_size=8, max_size=30)


def make_plan(lengths, cuts, lanes=3, **changes):
    spec = PlanSpec(**{**SPEC, **changes})
    return LanePlan(LengthStore(lengths), spec, lanes=lanes, bounds=make_bounds(cuts, len(lengths)))


@given(lengths=STORES, cuts=CUTS, shuffle=st.booleans(), packing=st.sampled_from(["best_fit", "wrap"]))
@settings(max_examples=examples(60), deadline=None)
def test_a_lane_reads_all_of_its_ranges_before_the_next_epoch(lengths, cuts, shuffle, packing):
    plan = make_plan(lengths, cuts, shuffle=shuffle, packing=packing)
    bounds = plan.orders.bounds
    for lane in range(3):
        lane_ranges = order_lane_ranges(len(bounds) - 1, 3, plan.spec, lane, 0)
        expected = sorted(d for s in lane_ranges for d in range(bounds[s], bounds[s + 1]))
        for epoch in (0, 1):
            documents, number = [], 0
            while len(pool := plan.orders.lanes[lane].documents(epoch, number)):
                assert len(pool) <= compute_lane_pool_size(plan.spec, epoch, number)
                documents += pool.tolist()
                number += 1
            assert sorted(documents) == expected
    all_ranges = [s for lane in range(3) for s in order_lane_ranges(len(bounds) - 1, 3, plan.spec, lane, 5)]
    assert sorted(all_ranges) == list(range(len(bounds) - 1))


@given(
    lengths=STORES,
    size=st.integers(1, 4),
    world=st.sampled_from([1, 2, 3, 6]),
    step=st.integers(0, 39),
)
@settings(max_examples=examples(60), deadline=None)
def test_ranks_hold_the_positions_of_their_lanes(lengths, size, world, step):
    # With fewer ranges than lanes, a lane has no sequence, which is an error.
    assume(-(-len(lengths) // size) >= 6)
    plan = make_plan(lengths, range(size, len(lengths), size), lanes=6)
    expected = list_rows(plan.rows(step * 12, step * 12 + 12))
    actual = [None] * 12
    for rank in range(world):
        actual[rank::world] = list_rows(plan.rows(*plan.positions_of(step), RowPart(rank, world)))
    assert actual == expected
    assert all(expected)


def test_position_p_is_sequence_p_div_k_of_lane_p_mod_k():
    plan = make_plan([5] * 60, range(0, 60, 4))
    rows = list_rows(plan.rows(0, 36))
    for lane in range(3):
        documents = plan.orders.lanes[lane].documents(0, 0)
        first_pool = pack_lane_pool(np.full(len(documents), 5, np.uint32), plan.spec, lane, 0, 0)
        expected = [[(int(documents[d]), s, n) for d, s, n in row] for row in list_rows(first_pool)]
        assert rows[lane::3][: len(expected)] == expected


def test_the_first_pools_grow():
    spec = PlanSpec(seq_len=8, global_batch_size=1, steps=1, pool_size=1000)
    sizes = [compute_lane_pool_size(spec, 0, pool) for pool in range(14)]
    assert sizes[:5] == [128, 256, 512, 1000, 1000]
    assert {compute_lane_pool_size(spec, 1, pool) for pool in range(14)} == {1000}
    for epoch in (0, 1):
        pool_sizes = [compute_lane_pool_size(spec, epoch, pool) for pool in range(40)]
        assert [compute_lane_pool_start(spec, epoch, pool) for pool in range(40)] == [
            sum(pool_sizes[:pool]) for pool in range(40)
        ]


@pytest.mark.parametrize(
    ("batch", "range_count", "lanes"),
    [(64, 4096, 64), (12, 100, 4), (7, 9, 1), (64, 5, 4), (8, 0, 1)],
)
def test_default_lanes_divide_the_batch_and_have_ranges(batch, range_count, lanes):
    assert choose_default_lanes(batch, range_count) == lanes


def test_invalid_lanes_are_refused():
    with pytest.raises(PlanError, match=r"lanes 5 does not divide global_batch_size 12.*3, 4, 6"):
        check_lanes(5, 12)
    with pytest.raises(PlanError, match=r"6 lanes.*4 ranks. World sizes that fit: 1, 2, 3, 6"):
        check_lane_world(6, 0, 4)
    with pytest.raises(PlanError, match="rank 3 of world_size 3"):
        check_lane_world(6, 3, 3)
    assert list(list_rank_lanes(6, 1, 2)) == [1, 3, 5]
    with pytest.raises(PlanError, match="Lane . of 6 has no sequence.*lanes=3"):
        make_plan([5] * 8, [4], lanes=6).rows(0, 12)
    with pytest.raises(PlanError, match="more than seq_len 16"):
        make_plan([50] * 80, range(0, 80, 5), overlong="error").rows(0, 12)


def test_the_order_is_pinned():
    assert LANES_VERSION == 1
    plan = make_plan(list(range(1, 41)), range(0, 40, 3), seed=7)
    assert [order_lane_ranges(15, 3, plan.spec, lane, 0).tolist() for lane in range(3)] == PINNED_RANGES
    assert [[d for d, _, _ in row] for row in list_rows(plan.rows(0, 6))] == PINNED_ROWS
    assert [[d for d, _, _ in row] for row in list_rows(plan.rows(300, 303))] == PINNED_LATE


PINNED_RANGES = [[14, 0, 11, 7, 6], [10, 4, 3, 2, 13], [9, 12, 1, 5, 8]]
PINNED_ROWS = [[32], [29], [33], [39], [28], [24]]
PINNED_LATE = [[15], [27], [0, 23, 22]]
