"""Reuse of large arrays' memory: writing to fresh pages is slower than copying."""

import contextlib
import math
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

# Smaller arrays are left to the allocator, which retains freed blocks (glibc: up to 32 MiB).
_MIN_REUSED_BYTES = 4 << 20
# Number of free blocks for reuse.
_MAX_FREE_BLOCKS = 2


@final
class ArrayPool:
    """Pool of arrays whose memory is reused once no array or view refers to it.

    The last base of a numpy view is the array from the pool, so the array lives as long as its views; a torch
    tensor holds the array it was made of.
    """

    def __init__(self) -> None:
        # Finalizers run in any thread at any point, so only atomic operations are used: append and pop.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=_MAX_FREE_BLOCKS)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_REUSED_BYTES:
            return np.empty(shape, dtype)
        block = self._block(size)
        array = np.frombuffer(block.data, dtype, math.prod(shape))
        weakref.finalize(array, self._free.append, block).atexit = False
        return array.reshape(shape)

    def _block(self, size: int) -> NDArray[np.uint8]:
        """Return the smallest free block of ``size`` to twice its bytes, or a new one."""
        waiting = []
        with contextlib.suppress(IndexError):  # the pool is empty
            while True:
                waiting.append(self._free.pop())
        candidates = [n for n, block in enumerate(waiting) if size <= len(block) <= 2 * size]
        best_index = min(candidates, key=lambda n: len(waiting[n]), default=None)
        self._free.extend(block for n, block in enumerate(waiting) if n != best_index)
        return np.empty(size + size // 8, np.uint8) if best_index is None else waiting[best_index]
