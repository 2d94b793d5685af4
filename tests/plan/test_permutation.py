import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import hash_indices, mix_in_place, mix_int, shuffle_range
from batchloom.plan import Permutation
from batchloom.plan.packing.pools import MAX_MATERIALISED
from tiers import examples

PINNED_KEY = (890676244826588921, 6515656868070552722)
PINNED_HASHES = [17235469408947973867, 18150421933739947993, 7518886968094713130]
PINNED_SHUFFLE = [6, 3, 2, 4, 5, 7, 0, 1]
PINNED_FEISTEL = [29266, 24763, 16787, 67375, 336, 65428]

KEYS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@given(size=st.integers(0, 200_000), key=KEYS)
@settings(max_examples=examples(40))
def test_a_permutation_is_a_bijection(size, key):
    items = Permutation(size, key).at(np.arange(size))
    assert np.array_equal(np.sort(items), np.arange(size))


@pytest.mark.parametrize("size", [MAX_MATERIALISED + 1, 70_000, 2**17, 299_209, 1_000_003])
def test_a_permutation_that_is_not_materialised_is_a_bijection(size):
    items = Permutation(size, (3, 4)).at(np.arange(size))
    assert np.array_equal(np.sort(items), np.arange(size))


@given(size=st.integers(MAX_MATERIALISED + 1, 2**40), key=KEYS, data=st.data())
@settings(max_examples=examples(60))
def test_an_index_is_the_same_alone_and_in_a_batch(size, key, data):
    permutation = Permutation(size, key)
    position = data.draw(st.integers(0, size - 1))
    block = np.unique(np.clip(np.arange(position - 50, position + 50), 0, size - 1))
    together = permutation.at(block)
    assert permutation.at(np.array([position]))[0] == together[np.searchsorted(block, position)]
    assert together.min() >= 0
    assert together.max() < size
    assert np.unique(together).size == together.size


def dispersion(items: np.ndarray, size: int, window: int, bins: int) -> float:
    """Return the variance of the items of a window in a bin, relative to random draws.

    Draws are without replacement: 1.00 for a random permutation, 0 for an even spread, large for clumps.
    """
    counts = np.stack([np.bincount(w * bins // size, minlength=bins) for w in items.reshape(-1, window)])
    share = 1 / bins
    expected = window * share * (1 - share) * (size - window) / (size - 1)
    return float(counts.var(axis=0, mean=np.full((1, bins), window * share)).mean() / expected)


@pytest.mark.parametrize("key", [(0, 0), (1, 0), (2**64 - 1, 5), derive_key(7, "data", "blocks")])
@pytest.mark.parametrize("size", [2**16, 2**18, 1_048_575 // 3 * 3])
def test_dispersion_is_that_of_a_random_permutation(size, key):
    window = 256
    items = Permutation(size, key).at(np.arange(size // window * window))
    for bins in (16, 64, 256):
        windows = size // window
        # The statistic averages about windows x bins squared normals: its own noise.
        noise = np.sqrt(2 / (windows * (bins - 1)))
        assert abs(dispersion(items, size, window, bins) - 1) < 5 * noise + 0.002


@pytest.mark.parametrize("size", [2**17, 300_000])
def test_neighbours_do_not_stay_related(size):
    items = Permutation(size, (11, 12)).at(np.arange(size)).astype(np.float64)
    scaled = items / size - 0.5
    for lag in (1, 2, 3, 64, 363, 512, 547, 548):
        correlation = float(np.mean(scaled[:-lag] * scaled[lag:]) * 12)
        assert abs(correlation) < 5 / np.sqrt(size)
    # Low bits of neighbours must be as independent as high ones (affine rounds fail here).
    low = items.astype(np.int64) & 7
    table = np.zeros((8, 8))
    np.add.at(table, (low[:-1], low[1:]), 1)
    chi = float(((table - size / 64) ** 2 / (size / 64)).sum())
    assert chi < 63 + 5 * np.sqrt(126)


def test_different_keys_give_unrelated_orders():
    size = 100_000
    first_order = Permutation(size, derive_key(0, "data", "blocks")).at(np.arange(size))
    second_order = Permutation(size, derive_key(1, "data", "blocks")).at(np.arange(size))
    assert (first_order == second_order).sum() < 10
    assert abs(np.corrcoef(first_order, second_order)[0, 1]) < 0.02


def test_the_mixer_of_arrays_is_that_of_integers():
    values = np.array([0, 1, 2**63, 2**64 - 1, 123456789], np.uint64)
    assert [int(v) for v in mix_in_place(values.copy())] == [mix_int(int(v)) for v in values]


def test_pinned_values():
    """Any change here changes every order: it needs a new order_version."""
    assert derive_key(0, "data", "blocks", -1, -1) == PINNED_KEY
    assert [int(h) for h in hash_indices(np.arange(3), (1, 2))] == PINNED_HASHES
    assert shuffle_range(8, (1, 2)).tolist() == PINNED_SHUFFLE
    assert Permutation(100_000, (1, 2)).at(np.arange(6)).tolist() == PINNED_FEISTEL
