"""Mapped shards: token ids are read in place, and every read is checked against the index."""

from pathlib import Path
from typing import NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.index import Index, map_file, map_index

_STRETCH = 1 << 20


@final
class Shard:
    """One mapped ``.bin``/``.idx`` pair.

    A shard of a store is checked whole against the store's ``lengths`` (uint32 [documents]) when it
    is mapped; a bare prefix has none, and was checked when it was opened.

    Attributes:
        tokens: all token ids of the ``.bin``, in its own dtype [T].
        pointers: byte position of each sequence, as a view that gives Python ints.
        lengths: tokens of each sequence, as a view that gives Python ints.
        size: number of tokens; shift: log2 of the bytes of a token.
        documents: first sequence of each document, or None where a document is one sequence.
    """

    __slots__ = ("documents", "lengths", "path", "pointers", "shift", "size", "tokens")

    def __init__(
        self,
        stem: Path,
        dtype: np.dtype[np.generic],
        documents: int,
        bin_bytes: int,
        *,
        lengths: NDArray[np.uint32] | None,
    ) -> None:
        self.path = stem.with_name(stem.name + ".bin")
        index = map_index(stem.with_name(stem.name + ".idx"))
        if index.dtype != dtype:
            raise StoreError(
                f"{stem}.idx holds {index.dtype.name} tokens, the manifest says {dtype.name}."
            )
        if len(index.documents) - 1 != documents:
            raise StoreError(
                f"{stem}.idx holds {len(index.documents) - 1} documents, the manifest says {documents}."
            )
        if lengths is not None:
            _check_ours(index, lengths, stem)
        view = map_file(self.path)
        if len(view) != bin_bytes:
            raise StoreError(f"{self.path} has {len(view)} bytes, the manifest says {bin_bytes}.")
        self.tokens = np.frombuffer(view, dtype)
        self.size = self.tokens.size
        self.shift = dtype.itemsize.bit_length() - 1
        # Scalar reads through a cast memoryview cost a third of numpy's.
        self.pointers = index.pointers.view(np.uint8).data.cast("q")
        self.lengths = index.lengths.view(np.uint8).data.cast("i")
        plain = lengths is not None or document_is_sequence(index)
        self.documents = None if plain else index.documents

    def begin(self, document: int, start: int, stop: int) -> int:
        """Where a document begins in ``tokens``, after checking that [start, stop) lies in it.

        Raises:
            StoreError: the index contradicts the plan's lengths, itself or the ``.bin``.
        """
        sequence, room = document, 0
        if self.documents is None:
            room = self.lengths[document]
        else:
            sequence, end = int(self.documents[document]), int(self.documents[document + 1])
            room = sum(self.lengths[s] for s in range(sequence, end))
        # A document without sequences has no pointer of its own, and no token to point at.
        begin = self.pointers[sequence] >> self.shift if room else 0
        if stop > room or not 0 <= begin <= self.size - stop:
            self.refuse(document, start, stop)
        return begin

    def refuse(self, document: int, start: int, stop: int) -> NoReturn:
        """Raise the StoreError for a span that does not lie where the index says."""
        raise StoreError(
            f"{self.path}: tokens {start} to {stop} of document {document} are not where its index "
            "points. The store is damaged: run batchloom check on it."
        )


def _check_ours(index: Index, lengths: NDArray[np.uint32], stem: Path) -> None:
    """Refuse an index that does not say what the store's lengths say."""
    ends = np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    begins = ends - lengths.astype(np.int64) * index.dtype.itemsize
    if not np.array_equal(index.lengths, lengths) or not np.array_equal(index.pointers, begins):
        raise StoreError(
            f"{stem}.idx and the subset's lengths.u32 contradict each other: documents are not where its index "
            "points. The store is damaged: run batchloom check on it."
        )


def document_is_sequence(index: Index) -> bool:
    """Whether every document of a foreign index is exactly one sequence."""
    count = len(index.lengths)
    if len(index.documents) != count + 1:
        return False
    # In stretches, since an index of a billion documents must not be copied to compare it.
    for start in range(0, count, _STRETCH):
        stretch = index.documents[start : start + _STRETCH]
        if not np.array_equal(stretch, np.arange(start, start + len(stretch))):
            return False
    return True


def document_lengths(index: Index, stem: Path) -> NDArray[np.uint32]:
    """Tokens of each document of a foreign index, uint32 [D - 1], after checking all of it.

    A view of the index where every document is one sequence, which takes no memory.

    Raises:
        StoreError: bounds that run backwards, negative lengths, pointers between tokens, or
            documents whose sequences do not lie one after the other.
    """
    plain = document_is_sequence(index)
    itemsize = index.dtype.itemsize
    for start in range(0, len(index.lengths), _STRETCH):
        stretch = slice(start, start + _STRETCH)
        if (index.lengths[stretch] < 0).any() or (index.pointers[stretch] % itemsize).any():
            raise StoreError(
                f"{stem}.idx has negative lengths, or pointers into the middle of a token; it is damaged. "
                "Make it anew from its source."
            )
    return index.lengths.view("<u4") if plain else _summed_lengths(index, stem)


def _summed_lengths(index: Index, stem: Path) -> NDArray[np.uint32]:
    """Tokens of documents of any number of sequences, which must lie one after the other."""
    if (np.diff(index.documents) < 0).any():
        raise StoreError(
            f"{stem}.idx has document bounds that run backwards; it is damaged. Make it anew from its source."
        )
    ends = index.pointers + index.lengths.astype(np.int64) * index.dtype.itemsize
    inner = np.ones(max(len(ends) - 1, 0), bool)
    first = index.documents[:-1]
    inner[first[(first > 0) & (first < len(ends))] - 1] = False
    if (ends[:-1] != index.pointers[1:])[inner].any():
        raise StoreError(
            f"{stem}.idx has a document whose sequences do not lie one after the other; "
            "merge it anew with Megatron's own tools."
        )
    sums = np.zeros(len(index.lengths) + 1, np.int64)
    np.cumsum(index.lengths, out=sums[1:])
    return np.diff(sums[index.documents]).astype(np.uint32)
