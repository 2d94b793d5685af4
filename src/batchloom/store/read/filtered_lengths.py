"""The lengths of a subset of which some documents alone are read: those of all others are 0."""

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.store.format import StoreLengths
from batchloom.store.read.remote_lengths import RemoteLengths

Ids = NDArray[np.int64]

_CHUNK_DOCUMENTS = 1 << 12


@final
class FilteredLengths:
    """Lengths under which a plan serves the chosen documents and no other; numbers stay those of the subset.

    Args:
        all_lengths: the lengths of all documents.
        media: what the chosen ones hold, as ``open_store`` takes it.
        is_chosen: of documents [N] whether each is one, bool [N].
        document_count: how many there are.
        tokens: of them together.

    Attributes:
        all_lengths, media, document_count, tokens: as given.
        size: documents of the subset, chosen or not.
        layers: how many of them each generation added.
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
        """Lengths of these documents in tokens, 0 of those that are not chosen, uint32 of the same length."""
        return np.where(self._is_chosen(documents), self.all_lengths.take(documents), np.uint32(0))

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Lengths of documents ``start`` to ``stop - 1``, as of :meth:`take`."""
        numbers = np.arange(start, min(stop, self.size))
        return np.where(self._is_chosen(numbers), self.all_lengths.slice(start, stop), np.uint32(0))


def count_trained_tokens(mask: Callable[[Ids, Ids, Ids], list[NDArray[np.bool_]]], lengths: FilteredLengths) -> int:
    """Tokens of the chosen documents that are trained; looks at the mask of each.

    Args:
        mask: of spans of documents, as ``Store.mask`` gives it.
        lengths: of the documents.
    """
    trained = 0
    for start in range(0, lengths.size, _CHUNK_DOCUMENTS):
        numbers = np.arange(start, min(start + _CHUNK_DOCUMENTS, lengths.size))
        chunk_lengths = lengths.take(numbers).astype(np.int64)
        nonempty = chunk_lengths > 0
        masks = mask(numbers[nonempty], np.zeros(int(nonempty.sum()), np.int64), chunk_lengths[nonempty])
        trained += sum(int(np.count_nonzero(flags)) for flags in masks)
    return trained
