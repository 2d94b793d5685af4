"""Keyed hashing of index arrays, the only source of randomness.

It shuffles orders and generates synthetic data. The mixer is SplitMix64's finalizer (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014; constants by Stafford, variant 13). It is a bijection on 64
bits with full avalanche, so keyed hashes of different indices never collide and no bit stays linear.
"""

import numpy as np
from numpy.typing import NDArray

HashKey = tuple[int, int]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_U30 = np.uint64(30)
_U27 = np.uint64(27)
_U31 = np.uint64(31)
_U48 = np.uint64(48)
_N1 = np.uint64(_M1)
_N2 = np.uint64(_M2)


def mix_in_place(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finalizer to uint64 values in place, and return them."""
    values ^= values >> _U30
    values *= _N1
    values ^= values >> _U27
    values *= _N2
    values ^= values >> _U31
    return values


def mix_int(value: int) -> int:
    """Apply SplitMix64's finalizer to one integer in [0, 2**64)."""
    value = ((value ^ (value >> 30)) * _M1) & _MASK
    value = ((value ^ (value >> 27)) * _M2) & _MASK
    return value ^ (value >> 31)


def hash_indices(indices: NDArray[np.int64], key: HashKey) -> NDArray[np.uint64]:
    """Hash indices under a 128-bit key to 64 bits, without collisions."""
    values = indices.astype(np.uint64)
    values += np.uint64(key[0])
    values = mix_in_place(values)
    values ^= np.uint64(key[1])
    return mix_in_place(values)


def shuffle_range(size: int, key: HashKey) -> NDArray[np.int64]:
    """Return the numbers 0 to size-1 sorted by their keyed hashes, int64 [size]."""
    return _argsort_hashes(hash_indices(np.arange(size), key))


def _argsort_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return ``argsort`` of hashes that are all different."""
    # numpy's stable sort of 16-bit values is a radix sort, and it is fast on nearly sorted data, too.
    order = np.argsort((hashes >> _U48).astype(np.uint16), kind="stable")
    sorted_indices: NDArray[np.int64] = order[np.argsort(hashes[order], kind="stable")]
    return sorted_indices


def derive_round_keys(key: HashKey, rounds: int) -> list[int]:
    """Derive one 64-bit key per round from a 128-bit key."""
    return [mix_int((key[0] + GOLDEN * (i + 1)) & _MASK) ^ mix_int((key[1] + i) & _MASK) for i in range(rounds)]
