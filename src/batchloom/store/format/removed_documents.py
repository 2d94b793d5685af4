r"""The ``removed.NNNNN.u64`` file: the removed documents of a subset.

Layout (little-endian): 8 bytes ``BLMGONE\0``; u64 version 1; u64 documents D; u64 zero; then their
numbers u64 [D], ascending. It lists all documents removed up to its generation.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.file_header import (
    CHECK_REMEDY,
    HEADER,
    make_wrong_format_error,
    read_header,
)
from batchloom.store.format.manifest import SubsetEntry
from batchloom.store.format.megatron_index import map_file

MAGIC = b"BLMGONE\x00"


def encode_removed(documents: NDArray[np.int64]) -> bytes:
    """Return the complete file for these documents, which must ascend."""
    return HEADER.pack(MAGIC, 1, len(documents), 0) + documents.astype("<u8").tobytes()


def map_removed(folder: Path, subset: SubsetEntry) -> NDArray[np.int64]:
    """Return the removed documents of a subset, ascending, int64 [D].

    The array is empty if none are removed.

    Args:
        folder: folder of the subset.
        subset: manifest entry of the subset.

    Raises:
        StoreError: the file is missing, of another type or version, or contradicts the manifest.
    """
    if subset.removed is None or subset.removed_file is None:
        return np.empty(0, np.int64)
    path = folder / subset.removed_file
    return parse_removed(map_file(path), path, subset)


def parse_removed(view: memoryview, path: Path, subset: SubsetEntry) -> NDArray[np.int64]:
    """Parse the content of a removed-documents file; see :func:`map_removed`."""
    if subset.removed is None:
        return np.empty(0, np.int64)
    count, zero = read_header(view, path, MAGIC)
    if zero:
        raise make_wrong_format_error(path)
    expected_count = subset.removed.documents
    if count != expected_count or len(view) != HEADER.size + 8 * count:
        raise StoreError(
            f"{path} declares {count:,} documents in {len(view):,} bytes, the manifest says {expected_count:,}. "
            f"{CHECK_REMEDY}"
        )
    numbers = np.frombuffer(view, "<i8", count, HEADER.size)
    inside = bool(count) and numbers[0] >= 0 and int(numbers[-1]) < subset.documents
    if not inside or (numbers[1:] <= numbers[:-1]).any():
        raise StoreError(f"{path} lists documents that are not ascending, or not in the subset. {CHECK_REMEDY}")
    return numbers


def mask_removed(removed: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the ``documents`` that are removed, bool [N]."""
    if not removed.size:
        return np.zeros(len(documents), bool)
    positions = np.minimum(removed.searchsorted(documents), removed.size - 1)
    is_removed: NDArray[np.bool_] = removed[positions] == documents
    return is_removed
