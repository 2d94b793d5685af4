"""Shuffle quality: the order of whole stores as it is served, against what random orders do, with controls that fail."""

import numpy as np
import pytest

from batchloom import Mixture, Plan, PlanSpec
from plan.sources import LengthsOnly

SIZE = 131_072
# Each value below is about standard normal for a random order; of some dozens none is as large as this.
MOST = 5.0


def spread(items, size, window=256, bins=64):
    """The variance of how many items of a window are in a bin, over that of random draws without replacement."""
    rows = items[: items.size // window * window].reshape(-1, window) * bins // size
    counts = np.bincount((np.arange(len(rows))[:, None] * bins + rows).ravel(), minlength=len(rows) * bins)
    share = 1 / bins
    expected = window * share * (1 - share) * (items.size - window) / (items.size - 1)
    return ((counts - window * share) ** 2).mean() / expected


def dispersion(items, size, window=256, bins=64):
    """How far the spread is from 1, in standard errors."""
    noise = np.sqrt(2 / (items.size // window * (bins - 1)))
    return abs(spread(items, size, window, bins) - 1) / noise


def serial(items, size, lags=(1, 2, 3, 16, 64, 363, 1024)):
    """The largest correlation of items with those so many places on, in standard errors."""
    scaled = items / size - 0.5
    return max((abs(float(np.mean(scaled[:-lag] * scaled[lag:]))) * 12 * np.sqrt(items.size - lag)) for lag in lags)


def low_bits(items, bits=3, lags=(1, 2, 64, 256)):
    """How far the low bits of items so many places apart are from independent: chi-square, in standard errors."""
    low, side = items & ((1 << bits) - 1), 1 << bits
    worst = 0.0
    for lag in lags:
        table = np.bincount(low[:-lag] * side + low[lag:], minlength=side * side)
        expected = (items.size - lag) / side**2
        chi = float(((table - expected) ** 2).sum() / expected)
        freedom = (side - 1) ** 2
        worst = max(worst, abs(chi - side**2 + 1) / np.sqrt(2 * freedom))
    return worst


def differences(items, size, bins=64):
    """How far the steps from item to item are from those of random pairs: chi-square, in standard errors."""
    steps = (items[1:] - items[:-1]) % size * bins // size
    expected = steps.size / bins
    chi = float(((np.bincount(steps, minlength=bins) - expected) ** 2).sum() / expected)
    return abs(chi - bins + 1) / np.sqrt(2 * (bins - 1))


def worst(items, size):
    return max(
        dispersion(items, size),
        dispersion(items & 1023, 1024, bins=32),
        serial(items, size),
        low_bits(items),
        differences(items, size),
    )


def served(plan, source=0):
    """The documents of a source in the order a whole run serves them."""
    rows = plan.rows(0, plan.positions)
    return rows.documents[rows.sources == source]


def one_each(size=SIZE, name="f"):
    return LengthsOnly(np.full(size, 8), name)


def affine(size):
    return np.arange(size) * 40_503 % size


def multiply_add_feistel(size, rounds=4):
    """Rounds of one multiplication and one addition, as orders that must be recomputed anywhere are often made."""
    half = int(np.log2(size)) // 2
    side = size >> half
    left, right = np.divmod(np.arange(size), side)
    keys = [(0x9E3B, 0x1F35), (0x85EB, 0x7A2D), (0xC2B3, 0x3C6F), (0x27D5, 0x5851)]
    for number, (multiply, add) in enumerate(keys[:rounds]):
        if number % 2:
            right = (right + left * multiply + add) % side
        else:
            left = (left + right * multiply + add) % (1 << half)
    return left * side + right


@pytest.mark.parametrize("control", [np.arange, affine, multiply_add_feistel])
def test_these_tests_can_fail(control):
    items = control(SIZE)
    assert np.array_equal(np.sort(items), np.arange(SIZE))
    assert worst(items, SIZE) > 3 * MOST


@pytest.mark.parametrize("seed", range(3))
def test_they_pass_random_orders(seed):
    assert worst(np.random.default_rng(seed).permutation(SIZE), SIZE) < MOST


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 0},
        {"seed": 1},
        {"pool_size": 8192},
        {"pool_size": 8192, "lanes": 16},
        {"packing": "wrap"},
        {"packing": "none"},
        {"packing": "first_fit", "pool_size": 1024},
    ],
    ids=str,
)
def test_one_store_is_served_in_random_order(settings):
    spec = PlanSpec(**{"seq_len": 64, "global_batch_size": 64, "epochs": 2, **settings})
    items = served(Plan(one_each(), spec))
    first, second = items[:SIZE], items[SIZE:]
    for epoch in (first, second):
        assert np.array_equal(np.sort(epoch), np.arange(SIZE))
        assert worst(epoch, SIZE) < MOST
    assert abs(np.corrcoef(first, second)[0, 1]) * np.sqrt(SIZE) < MOST


@pytest.mark.parametrize("lanes", [1, 8])
def test_an_epoch_says_nothing_of_where_documents_come_in_the_next(lanes):
    """A pool moves as a whole, so of 128 pools there are 128 independent places."""
    spec = PlanSpec(seq_len=64, global_batch_size=64, epochs=3, pool_size=1024, lanes=lanes)
    items = served(Plan(one_each(), spec)).reshape(3, SIZE)
    places = np.empty((3, SIZE))
    for epoch in range(3):
        places[epoch, items[epoch]] = np.arange(SIZE)
    found = np.corrcoef(places)[np.triu_indices(3, 1)]
    assert np.abs(found).max() * np.sqrt(128) < MOST
    # Inside a pool the sequences come in another order, too.
    inside = places % 1024
    assert np.abs(np.corrcoef(inside)[np.triu_indices(3, 1)]).max() < MOST / np.sqrt(SIZE / 8)


@pytest.mark.parametrize("pool_size", [1024, 8192])
def test_an_order_in_blocks_is_as_random_as_blocks_can_be(pool_size):
    """Documents of a pool come in clumps of a block's neighbours: as many as of blocks drawn at random."""
    spec = PlanSpec(seq_len=64, global_batch_size=64, epochs=1, pool_size=pool_size, block=64, seed=5)
    items = served(Plan(one_each(), spec))
    draw = np.random.default_rng(1)
    blocks = draw.permutation(SIZE // 64)[:, None] * 64 + np.arange(64)
    other = np.concatenate([draw.permutation(pool) for pool in blocks.reshape(-1, pool_size)])
    assert spread(items, SIZE) == pytest.approx(spread(other, SIZE), rel=0.1)
    pools = items.reshape(-1, pool_size) // 64
    assert all(len(np.unique(pool)) == pool_size // 64 for pool in pools)
    # Places in blocks come in no pattern.
    assert low_bits(items, bits=3) < MOST


@pytest.mark.parametrize("lanes", [1, 16])
def test_each_source_of_a_mixture_is_served_in_random_order(lanes):
    stores = {name: one_each(SIZE // 2, name) for name in ("a", "b", "c")}
    spec = PlanSpec(seq_len=64, global_batch_size=64, steps=768, pool_size=4096, lanes=lanes, seed=3)
    plan = Plan(Mixture({"a": 1, "b": 1, "c": 1}, stores=stores), spec)
    orders = [served(plan, source) for source in range(3)]
    for items in orders:
        # Packs are the same in every epoch: each epoch is random by itself.
        for epoch in (items[: SIZE // 2], items[SIZE // 2 : SIZE]):
            if lanes == 1:
                assert np.array_equal(np.sort(epoch), np.arange(SIZE // 2))
            assert worst(epoch, SIZE // 2) < MOST
    # The same numbers under other names come in other orders.
    for one, other in ((0, 1), (0, 2), (1, 2)):
        length = min(orders[one].size, orders[other].size)
        together = np.corrcoef(orders[one][:length], orders[other][:length])[0, 1]
        assert abs(together) * np.sqrt(length) < MOST


def test_lanes_of_a_mixture_are_dealt_without_a_pattern():
    plan = Plan(
        Mixture({"a": 1, "b": 1}, stores={name: one_each(4096, name) for name in ("a", "b")}),
        PlanSpec(seq_len=64, global_batch_size=64, steps=1024, lanes=16),
    )
    segment = plan.orders.timeline.segment_at(0)
    sources, lanes, _ = segment.at(np.arange(65_536))
    table = np.bincount(sources * 16 + lanes, minlength=32)
    assert np.abs(table - 2048).max() < MOST * np.sqrt(1024)
    assert low_bits(lanes, bits=2, lags=(16, 32, 48)) < MOST
