"""The lengths of the documents of a subset."""

import mmap
import os
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.file_header import CHECK_REMEDY
from batchloom.store.format.layout import LENGTHS_NAME
from batchloom.store.format.manifest import SubsetEntry
from batchloom.store.format.megatron_index import map_file

# Below so many documents a file of lengths is read as a whole soon enough.
_LARGE_ARRAY = 1 << 22
# Fewer lengths than a pool has, more of them, or those of more pages are read as they are touched.
_MIN_READ_AHEAD, _MAX_READ_AHEAD, _MAX_READ_AHEAD_PAGES = 1024, 1 << 17, 1 << 13
_NO_LIMIT = 1 << 32


def make_span_error(store_path: object, document: int, tokens: int, stop: int) -> StoreError:
    """The error of a span that ends behind its document.

    Args:
        store_path: the store.
        document: its number.
        tokens: it has.
        stop: where the span ends.
    """
    return StoreError(
        f"Document {document} of {store_path} has {tokens} tokens, and a span of it ends at {stop}: the plan "
        "belongs to "
        "another store, or the store was changed. Open it anew."
    )


@final
class StoreLengths:
    """The lengths of a subset's documents: one aligned array a generation, mapped where it is a file.

    Args:
        arrays: the lengths of the documents each generation added, uint32.
        longest: no document has more tokens; a plan would cut a damaged length into millions of pieces.

    Attributes:
        layers: how many documents each of them added; a plan packs no two of them together.
    """

    __slots__ = (
        "_arrays",
        "_longest",
        "_maps",
        "_requested_pages",
        "_starts",
        "_taken_counts",
        "layers",
        "size",
    )

    def __init__(self, *arrays: NDArray[np.uint32], longest: int = _NO_LIMIT) -> None:
        self._arrays, self._longest = arrays, longest
        self._maps = [_find_mapping(array) for array in arrays]
        # By array the pages that were asked for, and the lengths taken since the first of them.
        self._requested_pages: dict[int, NDArray[np.bool_]] = {}
        self._taken_counts: dict[int, int] = {}
        self.layers = tuple(int(array.size) for array in arrays)
        self._starts = np.cumsum([0, *self.layers[:-1]])
        self.size = sum(self.layers)

    def take(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Lengths of these documents in tokens, uint32 of the same length."""
        if len(self._arrays) == 1:
            self._read_ahead(0, documents)
            return self._check_lengths(self._arrays[0][documents])
        lengths = np.empty(len(documents), np.uint32)
        layers = self._starts.searchsorted(documents, side="right") - 1
        for layer in np.unique(layers).tolist():
            in_layer = layers == layer
            inside = documents[in_layer] - self._starts[layer]
            self._read_ahead(layer, inside)
            lengths[in_layer] = self._arrays[layer][inside]
        return self._check_lengths(lengths)

    def _check_lengths(self, lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Refuse lengths of a pool that no document can have; those of a batch's spans are of a pool."""
        if len(lengths) >= _MIN_READ_AHEAD and (longest := int(lengths.max())) > self._longest:
            raise StoreError(
                f"A document of the store has {longest:,} tokens by its lengths, and no shard has more than "
                f"{self._longest:,}. {CHECK_REMEDY}"
            )
        return lengths

    def _read_ahead(self, layer: int, documents: NDArray[np.int64]) -> None:
        """Have the system read the pages of many lengths at once, in place of each when it is touched.

        A pool of a large store lies on a thousand pages all over the file; one after the other, and each with
        its neighbours, they are read several times as long.
        """
        array, mapped = self._arrays[layer], self._maps[layer]
        if array.size < _LARGE_ARRAY or not _MIN_READ_AHEAD <= len(documents) <= _MAX_READ_AHEAD or mapped is None:
            return
        requested_pages = self._requested_pages.get(layer)
        self._taken_counts[layer] = self._taken_counts.get(layer, 0) + len(documents)
        if requested_pages is None or self._taken_counts[layer] > array.size:
            # After a pass over the file what was asked for first may be gone from memory.
            requested_pages = np.zeros(array.nbytes // mmap.PAGESIZE + 1, bool)
            self._requested_pages[layer], self._taken_counts[layer] = (
                requested_pages,
                len(documents),
            )
        pages = documents // (mmap.PAGESIZE // array.itemsize)
        pages = np.unique(pages[~requested_pages[pages]])
        if not len(pages) or len(pages) > _MAX_READ_AHEAD_PAGES:
            return
        requested_pages[pages] = True
        ends = np.flatnonzero(np.diff(pages) > 1)
        firsts = pages[np.concatenate([[0], ends + 1])]
        counts = pages[np.concatenate([ends, [len(pages) - 1]])] - firsts + 1
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            mapped.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, count * mmap.PAGESIZE)

    def read_through(self) -> None:
        """Have the system read all lengths in the order they lie in, before all of them are taken in another.

        Lengths that are more than half of the machine's memory are left alone: the first would be gone
        from it before the last is read.
        """
        max_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        for array, mapped in zip(self._arrays, self._maps, strict=True):
            if mapped is None or array.size < _LARGE_ARRAY or array.nbytes > max_bytes:
                continue
            step = mmap.PAGESIZE // array.itemsize
            for first in range(0, array.size, _LARGE_ARRAY):
                array[first : first + _LARGE_ARRAY : step].max()

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Lengths of documents ``start`` to ``stop - 1``, as a view where one generation added them all."""
        views = [
            array[max(start - first, 0) : max(stop - first, 0)]
            for array, first in zip(self._arrays, self._starts.tolist(), strict=True)
            if start < first + array.size and first < stop
        ]
        if len(views) == 1:
            return views[0]
        return np.concatenate(views) if views else np.empty(0, np.uint32)


def _find_mapping(array: NDArray[np.uint32]) -> mmap.mmap | None:
    """The file mapping that an array is a view of from its beginning; None where it is none."""
    base: object = array.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and len(base) == array.nbytes else None


def map_lengths(folder: Path, subset: SubsetEntry) -> StoreLengths:
    """Map the lengths of a subset.

    Args:
        folder: of the subset.
        subset: what the manifest says of it.

    Raises:
        StoreError: a file is missing, or not of as many documents as the manifest says.
    """
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
