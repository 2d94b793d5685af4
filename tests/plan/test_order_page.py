"""Examples of docs/reference/order.md: each test computes the numbers of one section."""

import numpy as np
import pytest

from batchloom import Edit, Mixture, Plan, PlanSpec
from batchloom.core.fingerprint import derive_key, fingerprint
from batchloom.core.keyed_hashing import hash_indices
from batchloom.plan import (
    Mesh,
    Permutation,
    Schedule,
    deal_balanced,
    rank_positions,
    slice_indices,
)
from batchloom.plan.order import deal_in_order
from batchloom.streaming import order_lane_ranges
from lane_plans import LanePlan

EXAMPLE = (5, 3, 8, 2, 7, 4, 1, 6, 3, 9)


class Lengths:
    """Lengths of documents; `layers` counts those that each generation added."""

    def __init__(self, values, layers=None):
        self.values, self.size = np.array(values, np.uint32), len(values)
        if layers is not None:
            self.layers = layers

    def take(self, documents):
        return self.values[documents]


class Source:
    """Data source of which a plan sees lengths and a fingerprint only."""

    def __init__(self, values, fingerprint="example", layers=None):
        self.lengths, self.fingerprint, self.tokens = Lengths(values, layers), fingerprint, sum(values)


def make_spec(**settings):
    return PlanSpec(**{"seq_len": 8, "global_batch_size": 2, "pool_size": 6, "seed": 0, **settings})


def describe_rows(plan, start, stop, *, named=False):
    """Return the spans of rows as document[start:stop], with the name of their source if asked for."""
    rows = plan.rows(start, stop)
    spans = [f"{d}[{s}:{s + n}]" for d, s, n in zip(rows.documents, rows.starts, rows.lengths, strict=True)]
    contents = [" ".join(spans[a:b]) for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]
    if not named:
        return contents
    names = [plan.names[source] for source in rows.sources[rows.pointers[:-1]]]
    return [f"{name} {row}" for name, row in zip(names, contents, strict=True)]


@pytest.fixture
def stores():
    return {"web": Source(EXAMPLE, "web"), "code": Source((4, 6, 2, 8), "code")}


@pytest.fixture
def mixture(stores):
    return Plan(Mixture({"web": 3, "code": 1}, stores=stores), make_spec(steps=8))


def test_keys_and_hashes():
    key = derive_key(0, "data", "blocks", -1, -1)
    assert key == (0xC5C51535EC486F9, 0x5A6C43666BADF492)
    hashes = hash_indices(np.arange(10), key)
    assert np.argsort(hashes).tolist() == [8, 4, 9, 7, 1, 2, 5, 6, 0, 3]
    assert [int(hashes[n]) >> 48 for n in (8, 4, 9)] == [0x1198, 0x36B5, 0x3738]


def test_the_permutation_of_documents():
    assert Permutation(100_000, (1, 2)).at(np.array([5])).tolist() == [65_428]


def test_pools_packing_and_positions():
    plan = Plan(Source(EXAMPLE), make_spec(epochs=2))
    assert [plan.orders.pools.members(k).tolist() for k in range(2)] == [[8, 4, 9, 7, 1, 2], [5, 6, 0, 3]]
    assert [plan.orders.pools.count_sequences(k) for k in range(2)] == [5, 2]
    assert (plan.positions, plan.steps) == (14, 7)
    assert describe_rows(plan, 0, 14) == [
        *("2[0:8]", "8[0:3] 1[0:3]", "4[0:7] 9[8:9]", "7[0:6]", "9[0:8]", "5[0:4]", "3[0:2] 6[0:1] 0[0:5]"),
        *("8[0:3] 1[0:3]", "9[0:8]", "7[0:6]", "2[0:8]", "4[0:7] 9[8:9]", "3[0:2] 6[0:1] 0[0:5]", "5[0:4]"),
    ]


def test_generations():
    assert derive_key(0, "data", "blocks", -1, -1, 1) == (0xEE6F5D8BE7B1B2F7, 0x66E6E9435F889F3C)
    plan = Plan(Source(EXAMPLE), make_spec(epochs=2))
    grown = Plan(Source((*EXAMPLE, 2, 6, 8, 4, 5), "example, grown", (10, 5)), make_spec(epochs=2))
    pools = [grown.orders.pools.members(k).tolist() for k in range(3)]
    assert pools == [[8, 4, 9, 7, 1, 2], [5, 6, 0, 3], [14, 13, 12, 11, 10]]
    assert [grown.orders.pools.order(epoch).tolist() for epoch in (0, 1)] == [[0, 2, 1], [2, 0, 1]]
    rows = describe_rows(grown, 0, 22)
    assert rows[:5] == describe_rows(plan, 0, 5)
    assert rows[5:10] == ["14[0:5]", "12[0:8]", "11[0:6] 10[0:2]", "13[0:4]", "5[0:4]"]
    assert grown.identity["sources"]["data"]["layers"] == [[10, 1], [5, 1]]


@pytest.mark.parametrize(
    ("packing", "rows"),
    [("window_2", [{0, 2}, {1}, {3}, {4}]), ("window_3", [{0, 2, 4}, {1}, {3}])],
)
def test_windows_of_rests(packing, rows):
    plan = Plan(Source((3, 7, 1, 6, 3)), make_spec(packing=packing, shuffle=False))
    spans = plan.rows(0, plan.positions)
    documents = [set(row.tolist()) for row in np.split(spans.documents, spans.pointers[1:-1])]
    assert sorted(documents, key=min) == rows


def test_steps_and_ranks():
    assert [rank_positions(0, 10, rank, 4) for rank in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert deal_balanced(np.array([9, 4, 1, 4, 1, 1]), 3).tolist() == [0, 1, 1, 2, 2, 0]
    assert deal_balanced(np.array([[4, 4, 0, 0], [2, 2, 2, 2]]), 2).tolist() == [0, 1, 0, 1]
    place = Mesh(tensor=2, context=2).get_placement(11, 16)
    assert (place.rank, place.world_size, place.context_rank) == (2, 4, 1)
    zigzag = Mesh(context=2, slices="zigzag")
    assert [slice_indices(np.array([8]), zigzag, rank).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_grouping_by_length():
    plan = Plan(Source(EXAMPLE), make_spec(packing="none", group_by_length=3))
    assert describe_rows(plan, 0, 11) == [
        *("8[0:3]", "9[8:9]", "7[0:6]", "1[0:3]", "9[0:8]", "4[0:7]"),
        *("2[0:8]", "0[0:5]", "3[0:2]", "6[0:1]", "5[0:4]"),
    ]


def test_mixtures(mixture):
    assert Schedule((5, 2, 1)).at(np.arange(8))[0].tolist() == [0, 0, 1, 0, 0, 1, 0, 2]
    assert mixture.serve_until(1).segments[0][0].schedule.counts == (16_075, 49_461)
    assert describe_rows(mixture, 0, 8, named=True) == [
        *("web 9[8:9] 5[0:4] 8[0:3]", "web 3[0:2]", "web 0[0:5] 1[0:3]", "code 0[0:4]"),
        *("web 9[0:8]", "web 7[0:6]", "web 2[0:8]", "code 2[0:2] 1[0:6]"),
    ]


def test_edits(mixture):
    edited = mixture.edited(Edit(step=3, seq_len=12))
    assert describe_rows(edited, 6, 10, named=True) == [
        *("web 2[0:8] 6[0:1]", "web 4[0:7]", "web 7[0:6]", "code 1[0:6]")
    ]
    assert edited.fingerprint == fingerprint([mixture.fingerprint, {"step": 3, "seq_len": 12}])


def test_lanes(stores):
    plan = Plan(Source(EXAMPLE), make_spec(pool_size=3, epochs=1, lanes=2))
    assert [plan.orders.pools.count_sequences(k) for k in range(4)] == [3, 3, 2, 1]
    slots = plan.orders.order(0).epoch(0).slots
    assert [[pool for pool in lane if pool >= 0] for lane in slots[0].tolist()] == [[0, 2], [3, 1]]
    assert describe_rows(plan, 0, plan.positions) == [
        *("9[0:8]", "3[0:2]", "4[0:7] 9[8:9]", "1[0:3]", "8[0:3]"),
        *("2[0:8]", "5[0:4]", "7[0:6]", "6[0:1] 0[0:5]"),
    ]
    assert deal_in_order(2, 8, 4).tolist() == [0, 2, 1, 3, 0, 2, 1, 3]
    mixture = Plan(Mixture({"web": 2, "code": 1}, stores=stores), make_spec(pool_size=2, lanes=2, steps=5))
    names = [row.split()[0] for row in describe_rows(mixture, 0, 10, named=True)]
    assert names == ["web"] * 4 + ["code"] * 2 + ["web"] * 4


def test_streams():
    spec = make_spec(steps=4)
    assert [order_lane_ranges(5, 2, spec, lane, 0).tolist() for lane in (0, 1)] == [[0, 3, 1], [2, 4]]
    stream = LanePlan(Source(EXAMPLE), spec, lanes=2, bounds=np.arange(0, 11, 2))
    assert describe_rows(stream, 0, 6) == [
        *("6[0:1]", "9[0:8]", "0[0:5] 1[0:3]", "4[0:7] 9[8:9]", "3[0:2] 7[0:6]", "5[0:4] 8[0:3]")
    ]
