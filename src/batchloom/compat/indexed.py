"""``IndexedDataset`` and ``PretrainingDataset``: Megatron ``.bin/.idx`` datasets."""

import os
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import IGNORE_INDEX
from batchloom.batches.loading import check_no_preferences
from batchloom.compat.script_arguments import as_asked, check_output, tokenizer_of
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import as_int, check_index, quote_value
from batchloom.store import Store, open_store
from batchloom.store.format import map_index
from batchloom.store.read import refuse_media

Ids = NDArray[Any]


@final
class IndexedDataset:
    """Sequences of a Megatron prefix, or documents of a store, by number.

    Args:
        prefix: ``path/name`` of any ``name.bin``/``name.idx`` pair, or a store's folder.
        split: ``train``, ``val`` or ``test``; only for a store.

    Attributes:
        sequence_lengths: tokens of each sequence, int32 [S]; also called ``sizes``.
        document_indices: first sequence of each document, and S at the end, int64 [D + 1].

    Raises:
        StoreMissingError: there is nothing at ``prefix``.
        StoreError: the data is damaged.
    """

    def __init__(self, prefix: str | os.PathLike[str], split: str = "train") -> None:
        # open_store checks the complete index, documents and sequences.
        self._load_store(open_store(prefix, split))

    def _load_store(self, store: Store) -> None:
        self._store = store
        if self._store.manifest is None:
            path = self._store.path
            index = map_index(path.with_name(path.name + ".idx"))
            self.sequence_lengths, self.document_indices = index.lengths, index.documents
        else:
            self.sequence_lengths = self._store.lengths.slice(0, len(self._store)).view("<i4")
            self.document_indices = np.arange(len(self._store) + 1)

    def __getstate__(self) -> Store:
        # An unpickled store has the same generation, and maps the files again.
        return self._store

    def __setstate__(self, store: Store) -> None:
        self._load_store(store)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def sizes(self) -> NDArray[np.int32]:
        """``sequence_lengths`` by its older name."""
        return self.sequence_lengths

    def __getitem__(self, number: Any) -> Any:
        """Return the ids of a sequence, read-only and in their dtype on disk.

        For a slice, return a list of them.

        Raises:
            IndexError: the sequence does not exist.
        """
        if isinstance(number, slice):
            return [self.get(n) for n in range(*number.indices(len(self)))]
        return self.get(number)

    def get(self, number: int, offset: int = 0, length: int | None = None) -> Ids:
        """Return ``length`` ids of a sequence from ``offset`` on; None for all the rest.

        Raises:
            IndexError: the sequence does not exist, or is shorter.
        """
        index = check_index(number, len(self), "sequence")
        size = int(self.sequence_lengths[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"Sequence {index} has {size} tokens; there are none from {offset} to {stop}.")
        document = int(np.searchsorted(self.document_indices, index, side="right")) - 1
        first = int(self.document_indices[document])
        # The sequences of a document are stored one after the other.
        begin = int(self.sequence_lengths[first:index].sum(dtype=np.int64)) + offset
        ids: Ids = self._store[document].ids[begin : begin + stop - offset]
        return ids


@final
class PretrainingDataset:
    """Map-style dataset of one document per row, padded or cut at ``seq_length``.

    Documents of fewer than two tokens have nothing to predict and give no row. Padding wastes
    compute: ``batchloom.Loader`` packs the same documents.

    Args:
        prefix: as for :class:`IndexedDataset`.
        tokenizer: tokenizer that made the ids; its end token fills padding. See
            :func:`batchloom.compat.script_arguments.tokenizer_of`.
        seq_length: tokens of a row.
        split: ``train``, ``val`` or ``test``; only for a store.
        output: ``torch`` or ``numpy``.

    Attributes:
        store: open store or prefix.

    Raises:
        StoreMissingError, StoreError: as for :class:`IndexedDataset`.
        InputError: the store has preferences, whose rejected answers must not be trained.
        TokenizerError: the tokenizer cannot be read or trusted.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        tokenizer: Any,
        seq_length: int,
        split: str = "train",
        *,
        output: str = "torch",
    ) -> None:
        if (as_int(seq_length) or 0) < 2:
            raise SettingsError([f"seq_length: {quote_value(seq_length)} is not a number above 1"])
        check_output(output)
        self.store = open_store(prefix, split)
        check_no_preferences(self.store)
        refuse_media(self.store.manifest, self.store.location.name, "PretrainingDataset")
        resolved_tokenizer = tokenizer_of(tokenizer)
        self._end_id, self._vocab_size = resolved_tokenizer.end_id, resolved_tokenizer.vocab_size
        self._seq_length, self._output = seq_length, output
        lengths = self.store.lengths.slice(0, len(self.store))
        self._documents = np.setdiff1d(np.flatnonzero(lengths > 1), self.store.contents.removed)

    def __len__(self) -> int:
        return int(self._documents.size)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return ``input_ids``, ``labels`` (-100 without loss) and ``attention_mask``.

        Each is int64 [seq_length].

        Raises:
            InputError: the document has an id outside of the tokenizer's vocabulary.
            IndexError: the row does not exist.
        """
        document = int(self._documents[number])
        ids = self.store[document].ids[: self._seq_length].astype(np.int64)
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            raise InputError(
                f"Document {document} of {self.store.path} holds token id {int(ids.max())}; the tokenizer has ids 0 "
                f"to {self._vocab_size - 1}: give the tokenizer that made them."
            )
        size = ids.size
        (trained,) = self.store.mask(np.array([document]), np.zeros(1, np.int64), np.array([size]))
        row = np.full((3, self._seq_length), [[self._end_id], [IGNORE_INDEX], [0]], np.int64)
        row[0, :size], row[1, :size], row[2, :size] = ids, np.where(trained, ids, IGNORE_INDEX), 1
        # No token precedes the first one, so nothing predicts it.
        row[1, 0] = IGNORE_INDEX
        names = ("input_ids", "labels", "attention_mask")
        return as_asked(dict(zip(names, row, strict=True)), self._output)
