"""Keyed bijection on range(n): any index in O(1), vectorized, never materialised.

Above ``MAX_MATERIALISED`` items it is a Feistel network over a mixed radix a x b just above n (Black and Rogaway:
Ciphers with Arbitrary Finite Domains, CT-RSA 2002: generalised Feistel and cycle walking). A round adds a keyed,
fully mixed hash of one half to the other half, modulo that half's radix. Because a x b exceeds n by less than a,
about one index in sqrt(n) is walked a second time. At or below it, an argsort of keyed hashes is simpler and
unbiased.
"""

import math
from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.keyed_hashing import HashKey, derive_round_keys, mix_in_place, shuffle_range

MAX_MATERIALISED = 65_536
ROUNDS = 6
_U32 = np.uint64(32)


@final
class Permutation:
    """Keyed permutation of range(size).

    Args:
        size: number of items, 0 to 2**62.
        key: 128 bits as two 64-bit halves.
    """

    __slots__ = ("_keys", "_left_radix", "_right_radix", "_table", "size")

    def __init__(self, size: int, key: HashKey) -> None:
        self.size = size
        self._table = shuffle_range(size, key) if size <= MAX_MATERIALISED else None
        root = math.isqrt(max(size - 1, 0)) + 1
        self._left_radix, self._right_radix = root, -(-size // root)
        self._keys = [np.uint64(k) for k in derive_round_keys(key, ROUNDS)]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the items at ``positions`` (each in [0, size)), int64 of the same length."""
        if self._table is not None:
            return self._table[positions]
        return self._walk_into_range(self._walk, positions)

    def find_positions(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of ``items``, int64 [N]; inverse of :meth:`at`."""
        if self._table is not None:
            positions = np.empty(self.size, np.int64)
            positions[self._table] = np.arange(self.size)
            return positions[items]
        return self._walk_into_range(self._walk_back, items)

    def _walk_into_range(
        self, walk: Callable[[NDArray[np.uint64]], NDArray[np.uint64]], values: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Walk values again until they are below ``size``."""
        out = walk(values.astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            rewalked = walk(out[outside])
            out[outside] = rewalked
            outside = outside[rewalked >= self.size]
        return out.view(np.int64)

    def _walk_back(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._right_radix))
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                left = _subtract_hash(left, right, key, self._left_radix)
            else:
                right = _subtract_hash(right, left, key, self._right_radix)
        left *= np.uint64(self._right_radix)
        left += right
        return left

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._right_radix))
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = _add_hash(left, right, key, self._left_radix)
            else:
                right = _add_hash(right, left, key, self._right_radix)
        left *= np.uint64(self._right_radix)
        left += right
        return left


def _hash(other_half: NDArray[np.uint64], key: np.uint64, radix: int) -> NDArray[np.uint64]:
    """Return a hash in [0, radix), reduced by multiply and shift (radix < 2**32)."""
    value = mix_in_place(other_half ^ key)
    value >>= _U32
    value *= np.uint64(radix)
    value >>= _U32
    return value


def _subtract_hash(
    half: NDArray[np.uint64], other_half: NDArray[np.uint64], key: np.uint64, radix: int
) -> NDArray[np.uint64]:
    """Return ``(half - hash(other_half)) mod radix``."""
    value = half + np.uint64(radix) - _hash(other_half, key, radix)
    value -= np.where(value >= np.uint64(radix), np.uint64(radix), np.uint64(0))
    return value


def _add_hash(
    half: NDArray[np.uint64], other_half: NDArray[np.uint64], key: np.uint64, radix: int
) -> NDArray[np.uint64]:
    """Return ``(half + hash(other_half)) mod radix``."""
    value = _hash(other_half, key, radix)
    value += half
    value -= np.where(value >= np.uint64(radix), np.uint64(radix), np.uint64(0))
    return value
