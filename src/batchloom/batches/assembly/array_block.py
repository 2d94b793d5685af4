"""Packing of a batch's arrays into one block of bytes, moved with one copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# CUDA's allocator aligns to 512 bytes; compiled kernels use wide loads only on aligned data.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Location of an array in a block.

    Attributes:
        name: key of the array in the batch.
        dtype: numpy dtype.
        shape: shape of the array.
        begin: offset of its first byte, a multiple of 512.
        stop: offset behind its last byte.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    stop: int


def plan_array_layout(batch: Mapping[str, Any]) -> list[ArrayLayout]:
    """Lay out a batch's arrays back to back in a block; plain numbers take no space."""
    parts: list[ArrayLayout] = []
    for name, array in batch.items():
        if isinstance(array, np.ndarray):
            begin = -(-parts[-1].stop // _ALIGNMENT) * _ALIGNMENT if parts else 0
            parts.append(ArrayLayout(name, array.dtype, array.shape, begin, begin + array.nbytes))
    return parts


def pack_arrays(batch: Mapping[str, Any], parts: list[ArrayLayout], block: NDArray[np.uint8]) -> None:
    """Copy a batch's arrays to their offsets in a block.

    The block has at least ``parts[-1].stop`` bytes.
    """
    for part in parts:
        destination = block[part.begin : part.stop].view(part.dtype).reshape(part.shape)
        np.copyto(destination, batch[part.name])
