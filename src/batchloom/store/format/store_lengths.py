r"""Document lengths and removed documents of a subset.

A ``removed.NNNNN.u64`` file (little-endian): 8 bytes ``BLMGONE\0``; u64 version 1; u64 documents D; u64 zero; then
their numbers u64 [D], ascending. It lists all documents removed up to its generation.
"""

import mmap
import os
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import release_pages
from batchloom.store.format.layout import LENGTHS_NAME
from batchloom.store.format.manifest import SubsetEntry
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, HEADER, make_wrong_format_error, map_file_with_header

# Smaller lengths files are fast to read completely and need no read-ahead.
_LARGE_ARRAY = 1 << 22
# Requests outside these limits get no read-ahead: fewer lengths than a pool has, too many lengths, or too many pages.
_MIN_READ_AHEAD = 1024
_MAX_READ_AHEAD = 1 << 17
_MAX_READ_AHEAD_PAGES = 1 << 13
_NO_LIMIT = 1 << 32
_REMOVED_MAGIC = b"BLMGONE\x00"


@final
class StoreLengths:
    """Document lengths of a subset: one aligned array per generation.

    Args:
        arrays: lengths of the documents that each generation added, uint32; views of mapped files or in memory.
        longest: upper bound of a document's tokens; a plan would cut a damaged length into millions of spans.

    Attributes:
        layers: number of documents of each array; a plan never packs documents of two layers together.
    """

    __slots__ = ("_arrays", "_longest", "_maps", "_requested_pages", "_starts", "_taken_counts", "layers", "size")

    def __init__(self, *arrays: NDArray[np.uint32], longest: int = _NO_LIMIT) -> None:
        self._arrays = arrays
        self._longest = longest
        self._maps = [_find_mapping(array) for array in arrays]
        # For each array: the requested pages, and the number of lengths taken since the first request.
        self._requested_pages: dict[int, NDArray[np.bool_]] = {}
        self._taken_counts: dict[int, int] = {}
        self.layers = tuple(int(array.size) for array in arrays)
        self._starts = np.cumsum([0, *self.layers[:-1]])
        self.size = sum(self.layers)

    def take(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the lengths of ``documents`` in tokens, uint32 of the same length."""
        if len(self._arrays) == 1:
            self._read_ahead(0, documents)
            lengths = self._arrays[0][documents]
            if self._maps[0] is None and self.size >= _LARGE_ARRAY and len(documents) >= _MIN_READ_AHEAD:
                # A pool has documents in all of a prefix's index, which would stay in the memory of the process.
                release_pages(self._arrays[0])
            return self._check_lengths(lengths)
        lengths = np.empty(len(documents), np.uint32)
        layers = self._starts.searchsorted(documents, side="right") - 1
        for layer in np.unique(layers).tolist():
            in_layer = layers == layer
            inside = documents[in_layer] - self._starts[layer]
            self._read_ahead(layer, inside)
            lengths[in_layer] = self._arrays[layer][inside]
        return self._check_lengths(lengths)

    def _check_lengths(self, lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Refuse impossible lengths in a pool; smaller requests come from a checked pool."""
        if len(lengths) >= _MIN_READ_AHEAD and (longest := int(lengths.max())) > self._longest:
            raise StoreError(
                f"According to its lengths a document of the store has {longest:,} tokens, but no shard has more "
                f"than {self._longest:,}. {CHECK_REMEDY}"
            )
        return lengths

    def _read_ahead(self, layer: int, documents: NDArray[np.int64]) -> None:
        """Prefetch the pages of many lengths with one request per run of pages.

        The lengths of a pool of a large store lie on a thousand scattered pages. Page faults read them one by one,
        each with its neighbours, several times slower.
        """
        array = self._arrays[layer]
        mapped = self._maps[layer]
        if array.size < _LARGE_ARRAY or not _MIN_READ_AHEAD <= len(documents) <= _MAX_READ_AHEAD or mapped is None:
            return
        requested_pages = self._requested_pages.get(layer)
        self._taken_counts[layer] = self._taken_counts.get(layer, 0) + len(documents)
        if requested_pages is None or self._taken_counts[layer] > array.size:
            # After a pass over the file, the first pages may have been evicted from memory.
            requested_pages = np.zeros(array.nbytes // mmap.PAGESIZE + 1, bool)
            self._requested_pages[layer], self._taken_counts[layer] = (requested_pages, len(documents))
        # Marking pages takes a tenth of the time of np.unique.
        is_needed = np.zeros(len(requested_pages), bool)
        is_needed[documents // (mmap.PAGESIZE // array.itemsize)] = True
        pages = np.flatnonzero(is_needed & ~requested_pages)
        if not len(pages) or len(pages) > _MAX_READ_AHEAD_PAGES:
            return
        requested_pages[pages] = True
        ends = np.flatnonzero(np.diff(pages) > 1)
        firsts = pages[np.concatenate([[0], ends + 1])]
        counts = pages[np.concatenate([ends, [len(pages) - 1]])] - firsts + 1
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            mapped.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, count * mmap.PAGESIZE)

    def read_through(self) -> None:
        """Read all lengths sequentially before they are taken in another order.

        Arrays above half of the machine's memory are skipped: their first pages would be evicted before the last are
        read.
        """
        max_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        for array, mapped in zip(self._arrays, self._maps, strict=True):
            if mapped is None or array.size < _LARGE_ARRAY or array.nbytes > max_bytes:
                continue
            step = mmap.PAGESIZE // array.itemsize
            for first in range(0, array.size, _LARGE_ARRAY):
                array[first : first + _LARGE_ARRAY : step].max()

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, uint32.

        The result is a view if one generation added them all.
        """
        views = [
            array[max(start - first, 0) : max(stop - first, 0)]
            for array, first in zip(self._arrays, self._starts.tolist(), strict=True)
            if start < first + array.size and first < stop
        ]
        if len(views) == 1:
            return views[0]
        return np.concatenate(views) if views else np.empty(0, np.uint32)


def _find_mapping(array: NDArray[np.uint32]) -> mmap.mmap | None:
    """Return the file mapping that an array covers completely; None if there is none."""
    base: object = array.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and len(base) == array.nbytes else None


def map_lengths(folder: Path, subset: SubsetEntry) -> StoreLengths:
    arrays = []
    for name, layer in zip(subset.length_files, subset.all_layers, strict=True):
        view = map_file(folder / name)
        if len(view) != 4 * layer.documents:
            raise StoreError(
                f"{folder / name} has {len(view)} bytes; {layer.documents} documents take {4 * layer.documents}."
            )
        arrays.append(np.frombuffer(view, "<u4"))
    if subset.documents <= _LARGE_ARRAY:
        tokens = sum(int(array.sum(dtype=np.uint64)) for array in arrays)
        if tokens != subset.tokens:
            raise StoreError(
                f"The documents in {folder}/{LENGTHS_NAME} have {tokens:,} tokens, the manifest says "
                f"{subset.tokens:,}. {CHECK_REMEDY}"
            )
    return StoreLengths(*arrays, longest=max((shard.tokens for shard in subset.shards), default=0))


def encode_removed(documents: NDArray[np.int64]) -> bytes:
    """Return the complete file for these documents, which must ascend."""
    return HEADER.pack(_REMOVED_MAGIC, 1, len(documents), 0) + documents.astype("<u8").tobytes()


def map_removed(folder: Path, subset: SubsetEntry, view: memoryview | None = None) -> NDArray[np.int64]:
    """Return the removed documents of a subset, ascending, int64 [D].

    The array is empty if none are removed. ``view`` is the content of their file; None to map it.
    """
    if subset.removed is None or subset.removed_file is None:
        return np.empty(0, np.int64)
    path = folder / subset.removed_file
    view, count, zero = map_file_with_header(path, _REMOVED_MAGIC, view)
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
