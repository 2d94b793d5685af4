"""Lengths of a filtered subset: documents that do not match have length 0."""

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.store.format.store_lengths import StoreLengths
from batchloom.store.read.remote_lengths import RemoteLengths

Ids = NDArray[np.int64]

_CHUNK_DOCUMENTS = 1 << 12


@final
class FilteredLengths:
    """Lengths that make a plan skip documents; numbers stay those of the subset.

    Args:
        all_lengths: lengths of all documents.
        media: media filter, as in ``open_store``.
        is_chosen: returns which documents [N] match, bool [N].
        document_count: number of matching documents.
        tokens: total tokens of the matching documents.

    Attributes:
        all_lengths, media, document_count, tokens: as given.
        size: number of documents of the subset, matching or not.
        layers: number of documents that each generation added.
    """

    __slots__ = ("_is_chosen", "all_lengths", "document_count", "layers", "media", "size", "tokens")

    def __init__(
        self,
        all_lengths: StoreLengths | RemoteLengths,
        media: str,
        is_chosen: Callable[[Ids], NDArray[np.bool_]],
        document_count: int,
        tokens: int,
    ) -> None:
        self.all_lengths, self.media, self._is_chosen = all_lengths, media, is_chosen
        self.document_count, self.tokens = document_count, tokens
        self.size, self.layers = all_lengths.size, all_lengths.layers

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the lengths of ``documents`` in tokens, 0 if filtered out, uint32."""
        return np.where(self._is_chosen(documents), self.all_lengths.take(documents), np.uint32(0))

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, as :meth:`take`."""
        numbers = np.arange(start, min(stop, self.size))
        return np.where(self._is_chosen(numbers), self.all_lengths.slice(start, stop), np.uint32(0))


def count_trained_tokens(mask: Callable[[Ids, Ids, Ids], list[NDArray[np.bool_]]], lengths: FilteredLengths) -> int:
    """Count the trained tokens of the matching documents by reading their masks.

    ``mask`` reads masks of spans, as ``Store.mask``.
    """
    trained = 0
    for start in range(0, lengths.size, _CHUNK_DOCUMENTS):
        numbers = np.arange(start, min(start + _CHUNK_DOCUMENTS, lengths.size))
        chunk_lengths = lengths.take(numbers).astype(np.int64)
        nonempty = chunk_lengths > 0
        masks = mask(numbers[nonempty], np.zeros(int(nonempty.sum()), np.int64), chunk_lengths[nonempty])
        trained += sum(int(np.count_nonzero(flags)) for flags in masks)
    return trained
