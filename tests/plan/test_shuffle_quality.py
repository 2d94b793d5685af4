"""Shuffle quality: statistics of served orders, random orders and controls."""

import numpy as np
import pytest

from batchloom import Mixture, Plan, PlanSpec
from plan.length_stores import LengthStore

SIZE = 131_072
# Each statistic is about standard normal for a random order. None of several dozen reaches this value.
MAX_STATISTIC = 5.0


def compute_spread(items, size, window=256, bins=64):
    """Return the variance of the items of a window in a bin, relative to random draws."""
    rows = items[: items.size // window * window].reshape(-1, window) * bins // size
    counts = np.bincount((np.arange(len(rows))[:, None] * bins + rows).ravel(), minlength=len(rows) * bins)
    share = 1 / bins
    expected = window * share * (1 - share) * (items.size - window) / (items.size - 1)
    return ((counts - window * share) ** 2).mean() / expected


def compute_dispersion(items, size, window=256, bins=64):
    """Return the distance of the spread from 1 in standard errors."""
    noise = np.sqrt(2 / (items.size // window * (bins - 1)))
    return abs(compute_spread(items, size, window, bins) - 1) / noise


def compute_serial_correlation(items, size, lags=(1, 2, 3, 16, 64, 363, 1024)):
    """Return the largest correlation of items at the given lags in standard errors."""
    scaled = items / size - 0.5
    return max((abs(float(np.mean(scaled[:-lag] * scaled[lag:]))) * 12 * np.sqrt(items.size - lag)) for lag in lags)


def compute_low_bit_dependence(items, bits=3, lags=(1, 2, 64, 256)):
    """Return the chi-square statistic of low bits at lags in standard errors."""
    low, side = items & ((1 << bits) - 1), 1 << bits
    max_statistic = 0.0
    for lag in lags:
        table = np.bincount(low[:-lag] * side + low[lag:], minlength=side * side)
        expected = (items.size - lag) / side**2
        chi = float(((table - expected) ** 2).sum() / expected)
        freedom = (side - 1) ** 2
        max_statistic = max(max_statistic, abs(chi - side**2 + 1) / np.sqrt(2 * freedom))
    return max_statistic


def compute_difference_bias(items, size, bins=64):
    """Return the chi-square statistic of differences of neighbours in standard errors."""
    steps = (items[1:] - items[:-1]) % size * bins // size
    expected = steps.size / bins
    chi = float(((np.bincount(steps, minlength=bins) - expected) ** 2).sum() / expected)
    return abs(chi - bins + 1) / np.sqrt(2 * (bins - 1))


def compute_worst_statistic(items, size):
    return max(
        compute_dispersion(items, size),
        compute_dispersion(items & 1023, 1024, bins=32),
        compute_serial_correlation(items, size),
        compute_low_bit_dependence(items),
        compute_difference_bias(items, size),
    )


def list_served_documents(plan, source=0):
    """Return the documents of a source in the order that a run serves them."""
    rows = plan.rows(0, plan.positions)
    return rows.documents[rows.sources == source]


def make_store(size=SIZE, name="f"):
    return LengthStore(np.full(size, 8), name)


def make_affine_order(size):
    return np.arange(size) * 40_503 % size


def make_feistel_order(size, rounds=4):
    """Return a Feistel order whose rounds are one multiplication and one addition."""
    half_bits = int(np.log2(size)) // 2
    side = size >> half_bits
    left, right = np.divmod(np.arange(size), side)
    keys = [(0x9E3B, 0x1F35), (0x85EB, 0x7A2D), (0xC2B3, 0x3C6F), (0x27D5, 0x5851)]
    for number, (multiply, add) in enumerate(keys[:rounds]):
        if number % 2:
            right = (right + left * multiply + add) % side
        else:
            left = (left + right * multiply + add) % (1 << half_bits)
    return left * side + right


@pytest.mark.parametrize("control", [np.arange, make_affine_order, make_feistel_order])
def test_nonrandom_orders_fail(control):
    items = control(SIZE)
    assert np.array_equal(np.sort(items), np.arange(SIZE))
    assert compute_worst_statistic(items, SIZE) > 3 * MAX_STATISTIC


@pytest.mark.parametrize("seed", range(3))
def test_random_orders_pass(seed):
    assert compute_worst_statistic(np.random.default_rng(seed).permutation(SIZE), SIZE) < MAX_STATISTIC


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
    items = list_served_documents(Plan(make_store(), spec))
    first_epoch, second_epoch = items[:SIZE], items[SIZE:]
    for epoch in (first_epoch, second_epoch):
        assert np.array_equal(np.sort(epoch), np.arange(SIZE))
        assert compute_worst_statistic(epoch, SIZE) < MAX_STATISTIC
    assert abs(np.corrcoef(first_epoch, second_epoch)[0, 1]) * np.sqrt(SIZE) < MAX_STATISTIC


@pytest.mark.parametrize("lanes", [1, 8])
def test_positions_of_documents_in_two_epochs_are_independent(lanes):
    """A pool moves as a unit, so 128 pools have 128 independent positions."""
    spec = PlanSpec(seq_len=64, global_batch_size=64, epochs=3, pool_size=1024, lanes=lanes)
    items = list_served_documents(Plan(make_store(), spec)).reshape(3, SIZE)
    positions = np.empty((3, SIZE))
    for epoch in range(3):
        positions[epoch, items[epoch]] = np.arange(SIZE)
    correlations = np.corrcoef(positions)[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() * np.sqrt(128) < MAX_STATISTIC
    # The order of sequences inside a pool changes, too.
    inside = positions % 1024
    assert np.abs(np.corrcoef(inside)[np.triu_indices(3, 1)]).max() < MAX_STATISTIC / np.sqrt(SIZE / 8)


@pytest.mark.parametrize("pool_size", [1024, 8192])
def test_an_order_in_blocks_is_as_random_as_blocks_can_be(pool_size):
    """Neighbours of a block come in one pool, as often as in blocks drawn at random."""
    spec = PlanSpec(seq_len=64, global_batch_size=64, epochs=1, pool_size=pool_size, block=64, seed=5)
    items = list_served_documents(Plan(make_store(), spec))
    rng = np.random.default_rng(1)
    blocks = rng.permutation(SIZE // 64)[:, None] * 64 + np.arange(64)
    random_order = np.concatenate([rng.permutation(pool) for pool in blocks.reshape(-1, pool_size)])
    assert compute_spread(items, SIZE) == pytest.approx(compute_spread(random_order, SIZE), rel=0.1)
    pools = items.reshape(-1, pool_size) // 64
    assert all(len(np.unique(pool)) == pool_size // 64 for pool in pools)
    # Positions in blocks have no pattern.
    assert compute_low_bit_dependence(items, bits=3) < MAX_STATISTIC


@pytest.mark.parametrize("lanes", [1, 16])
def test_each_source_of_a_mixture_is_served_in_random_order(lanes):
    stores = {name: make_store(SIZE // 2, name) for name in ("a", "b", "c")}
    spec = PlanSpec(seq_len=64, global_batch_size=64, steps=768, pool_size=4096, lanes=lanes, seed=3)
    plan = Plan(Mixture({"a": 1, "b": 1, "c": 1}, stores=stores), spec)
    orders = [list_served_documents(plan, source) for source in range(3)]
    for items in orders:
        # Packs are the same in every epoch, but each epoch is random by itself.
        for epoch in (items[: SIZE // 2], items[SIZE // 2 : SIZE]):
            assert np.array_equal(np.sort(epoch), np.arange(SIZE // 2))
            assert compute_worst_statistic(epoch, SIZE // 2) < MAX_STATISTIC
    # Sources with the same lengths and different names have different orders.
    for first, second in ((0, 1), (0, 2), (1, 2)):
        length = min(orders[first].size, orders[second].size)
        correlation = np.corrcoef(orders[first][:length], orders[second][:length])[0, 1]
        assert abs(correlation) * np.sqrt(length) < MAX_STATISTIC
