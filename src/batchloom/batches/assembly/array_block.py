"""The arrays of a batch in one block of bytes: one piece of memory to hold, one copy to move."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# As CUDA's allocator aligns what it gives: compiled kernels load many bytes at once where they may.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where an array lies in a block.

    Attributes:
        name: its key in the batch.
        dtype: of its numbers, as numpy calls it.
        shape: its shape.
        begin: its first byte, a multiple of 512.
        stop: the byte behind its last.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    stop: int


def plan_array_layout(batch: Mapping[str, Any]) -> list[ArrayLayout]:
    """Where the arrays of a batch lie in a block, one behind the other; plain numbers take no room."""
    parts: list[ArrayLayout] = []
    for name, array in batch.items():
        if isinstance(array, np.ndarray):
            begin = -(-parts[-1].stop // _ALIGNMENT) * _ALIGNMENT if parts else 0
            parts.append(ArrayLayout(name, array.dtype, array.shape, begin, begin + array.nbytes))
    return parts


def pack_arrays(batch: Mapping[str, Any], parts: list[ArrayLayout], block: NDArray[np.uint8]) -> None:
    """Copy the arrays of a batch to their places in a block of at least ``parts[-1].stop`` bytes."""
    for part in parts:
        destination = block[part.begin : part.stop].view(part.dtype).reshape(part.shape)
        np.copyto(destination, batch[part.name])
