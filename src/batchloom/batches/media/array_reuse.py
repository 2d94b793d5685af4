"""Memory of large arrays that is used again: to write to fresh pages of the system takes longer than to copy."""

import contextlib
import math
import weakref
from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

# Smaller arrays are left to the allocator, which keeps what it gives (glibc: up to 32 MiB).
_MIN_REUSED_BYTES = 4 << 20
# Blocks that wait for their next use.
_MAX_FREE_BLOCKS = 2


@final
class ArrayPool:
    """Gives arrays whose memory comes back when nobody holds them, or a view of them, any more.

    Of numpy's views the last base is the array that was given, so that it goes with the last of them; a tensor of torch
    holds the array it was made of.
    """

    def __init__(self) -> None:
        # Arrays end in any thread, and in the middle of anything: append and pop alone are one step each.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=_MAX_FREE_BLOCKS)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any content."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_REUSED_BYTES:
            return np.empty(shape, dtype)
        block = self._block(size)
        array = np.frombuffer(block.data, dtype, math.prod(shape))
        weakref.finalize(array, self._free.append, block).atexit = False
        return array.reshape(shape)

    def _block(self, size: int) -> NDArray[np.uint8]:
        """The smallest of those that wait that is large enough and not twice as large; else a new one."""
        waiting = []
        with contextlib.suppress(IndexError):  # none is left
            while True:
                waiting.append(self._free.pop())
        candidates = [n for n, block in enumerate(waiting) if size <= len(block) <= 2 * size]
        best_index = min(candidates, key=lambda n: len(waiting[n]), default=None)
        self._free.extend(block for n, block in enumerate(waiting) if n != best_index)
        return np.empty(size + size // 8, np.uint8) if best_index is None else waiting[best_index]
