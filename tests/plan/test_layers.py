"""Plans over stores of several generations: appended documents extend a plan."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Plan, PlanSpec, StateError
from batchloom.plan import rank_positions
from batchloom.store import StoreLengths
from plan.test_plan import SPECS, count_coverage, list_spans
from tiers import examples

LAYERS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=40), min_size=1, max_size=4).filter(
    lambda layers: any(map(any, layers))
)


class LayeredStore:
    def __init__(self, layers):
        self.lengths = StoreLengths(*[np.array(layer, np.uint32) for layer in layers])
        self.fingerprint = json.dumps(layers)


def list_packs(plan, pool, epoch=0):
    """Return the spans of each row of a pool."""
    rows = plan.orders.pools.rows(pool, epoch)
    spans = list_spans(rows)
    return [tuple(spans[a:b]) for a, b in zip(rows.pointers, rows.pointers[1:], strict=False)]


@given(layers=LAYERS, spec=SPECS)
@settings(max_examples=examples(150))
def test_older_pools_are_those_of_the_plan_over_the_older_generation(layers, spec):
    plan = Plan(LayeredStore(layers), PlanSpec(**spec))
    for count in range(1, len(layers)):
        if not any(map(any, layers[:count])):
            continue
        older_plan = Plan(LayeredStore(layers[:count]), PlanSpec(**spec))
        for pool in range(older_plan.orders.pools.count):
            assert plan.orders.pools.members(pool).tolist() == older_plan.orders.pools.members(pool).tolist()
            for epoch in (0, 1):
                assert list_packs(plan, pool, epoch) == list_packs(older_plan, pool, epoch)
        for epoch in (0, 1):
            pool_order = plan.orders.pools.order(epoch)
            # An epoch keeps the order of older pools, with new pools in between.
            older_pools = pool_order[pool_order < older_plan.orders.pools.count]
            assert older_pools.tolist() == older_plan.orders.pools.order(epoch).tolist()


@given(layers=LAYERS, spec=SPECS)
@settings(max_examples=examples(60))
def test_no_pool_holds_documents_of_two_generations(layers, spec):
    plan = Plan(LayeredStore(layers), PlanSpec(**spec))
    ends = np.cumsum([len(layer) for layer in layers])
    documents = []
    for pool in range(plan.orders.pools.count):
        members = plan.orders.pools.members(pool)
        assert len(set(np.searchsorted(ends, members, side="right"))) == 1
        assert len(members) <= spec["pool_size"]
        documents += members.tolist()
    assert sorted(documents) == list(range(int(ends[-1])))


@given(layers=LAYERS, spec=SPECS, data=st.data())
@settings(max_examples=examples(100))
def test_every_epoch_holds_every_token_once_whatever_the_ranks(layers, spec, data):
    plan = Plan(LayeredStore(layers), PlanSpec(**spec))
    size = spec["global_batch_size"]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    spans = []
    for step in range(plan.steps):
        world = data.draw(st.sampled_from(divisors))
        for rank in range(world):
            spans += list_spans(plan.rows(*rank_positions(step, size, rank, world)))
    lengths = [length for layer in layers for length in layer]
    assert all((c == spec["epochs"]).all() for c in count_coverage(lengths, spans))


@given(layers=LAYERS, spec=SPECS, data=st.data())
@settings(max_examples=examples(80))
def test_any_position_is_the_same_however_it_is_reached(layers, spec, data):
    spec = PlanSpec(**spec)
    walked, counted, resumed, adopted = (Plan(LayeredStore(layers), spec) for _ in range(4))
    adopted.orders.order(0).counts.adopt(counted.orders.order(0).counts.count_all())
    position = data.draw(st.integers(0, counted.positions - 1))
    state = json.loads(json.dumps(walked.state(position)))
    assert resumed.resume(state) == position
    spans = [list_spans(plan.rows(position, position + 3)) for plan in (walked, counted, resumed, adopted)]
    assert spans[0] == spans[1] == spans[2] == spans[3]


def test_one_generation_has_no_layers_in_its_identity():
    lengths = np.random.default_rng(0).integers(1, 60, 500).astype(np.uint32)
    spec = PlanSpec(seq_len=64, global_batch_size=4, pool_size=100)
    plan = Plan(LayeredStore([lengths.tolist()]), spec)
    assert "layers" not in plan.identity["sources"]["data"]
    assert "layers" not in plan.orders.order(0).table_identity


def test_ends_of_generations_are_part_of_a_plan():
    lengths = list(range(1, 41))
    spec = PlanSpec(seq_len=64, global_batch_size=4)
    plans = []
    for cut in (40, 10, 20):
        store = LayeredStore([layer for layer in (lengths[:cut], lengths[cut:]) if layer])
        store.fingerprint = "the same documents"
        plans.append(Plan(store, spec))
    assert len({plan.fingerprint for plan in plans}) == 3
    assert len({json.dumps(plan.orders.order(0).table_identity) for plan in plans}) == 3
    with pytest.raises(StateError, match=r"sources.data.layers was \[\[10, 1\], \[30, 1\]\]"):
        plans[2].resume(plans[1].state(0))


def test_a_block_is_that_of_the_generations_own_number_of_documents():
    spec = PlanSpec(seq_len=64, global_batch_size=1)
    lengths = StoreLengths(np.ones(4_000_000, np.uint32), np.ones(1000, np.uint32))
    store = LayeredStore([[1]])
    store.lengths = lengths
    plan = Plan(store, spec)
    assert plan.orders.pools.blocks == (64, 1)
    assert plan.identity["sources"]["data"]["layers"] == [[4_000_000, 64], [1000, 1]]
    assert sorted(plan.orders.pools.members(plan.orders.pools.count - 1)) == list(range(4_000_000, 4_001_000))


def test_without_shuffle_documents_come_in_store_order():
    spec = PlanSpec(seq_len=4, global_batch_size=2, shuffle=False, packing="none", pool_size=3)
    plan = Plan(LayeredStore([[3] * 7, [3] * 2, [3] * 5]), spec)
    assert plan.rows(0, 14).documents.tolist() == list(range(14))


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
@settings(max_examples=examples(60))
def test_lengths_over_several_arrays(sizes, data):
    arrays = [np.arange(n, dtype=np.uint32) + 100 * i for i, n in enumerate(sizes)]
    concatenated, lengths = np.concatenate(arrays), StoreLengths(*arrays)
    assert lengths.size == concatenated.size
    start = data.draw(st.integers(0, concatenated.size))
    stop = data.draw(st.integers(start, concatenated.size))
    assert lengths.slice(start, stop).tolist() == concatenated[start:stop].tolist()
    if concatenated.size:
        documents = np.array(data.draw(st.lists(st.integers(0, concatenated.size - 1), max_size=9)), np.int64)
        assert lengths.take(documents).tolist() == concatenated[documents].tolist()
