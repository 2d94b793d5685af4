"""Base class of the readers of a subset, and the lengths they read."""

from collections.abc import Callable
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.store.format.manifest import Manifest
from batchloom.store.format.shard_sidecars import (
    LossMask,
    LossWeights,
    map_mask,
    map_weights,
)
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.mapped_shards import MappedShards, MappedSpans, ShardTable, compute_mapped_limit
from batchloom.store.read.subset_files import Ids, SubsetFiles

_CHUNK_DOCUMENTS = 1 << 12


class LengthReader(Protocol):
    """Lengths of the documents of a subset, in tokens."""

    @property
    def size(self) -> int:
        """Number of documents."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of documents that each generation added."""

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the lengths of ``documents``, uint32 of the same length."""

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, uint32."""


@final
class FilteredLengths:
    """Lengths that make a plan skip documents; numbers stay those of the subset."""

    def __init__(
        self,
        all_lengths: LengthReader,
        media: str,
        is_chosen: Callable[[Ids], NDArray[np.bool_]],
        document_count: int,
        tokens: int,
    ) -> None:
        self.all_lengths = all_lengths
        self.media = media
        self._is_chosen = is_chosen
        self.document_count = document_count
        self.tokens = tokens
        self.size = all_lengths.size
        self.layers = all_lengths.layers

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        return np.where(self._is_chosen(documents), self.all_lengths.take(documents), np.uint32(0))

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        numbers = np.arange(start, min(stop, self.size))
        return np.where(self._is_chosen(numbers), self.all_lengths.slice(start, stop), np.uint32(0))


class SubsetReader(SubsetFiles):
    """Reader of one subset of a local, remote or synthetic store, or of a prefix.

    Attributes:
        dtype: dtype of a token on disk.
        lengths: lengths of all documents of the subset.
        tokens: number of tokens of the subset.
        end_id: end-of-document id, which also fills padding and removed documents.
        removed: numbers of the removed documents, ascending, int64.
        masked: True if some tokens are not trained.
        weighted: True if some tokens have another loss weight than 0 and 1.
        mapped: mapped shards, if documents are read exactly as stored; else None.
        fetched_bytes: number of bytes that this process fetched over the network.
        is_fully_cached: True if all tokens and stored media are local and verified.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest | None,
        split: str,
        table: ShardTable,
        dtype: np.dtype[np.generic],
        *,
        lengths: LengthReader,
        removed: Ids,
    ) -> None:
        super().__init__(name, manifest, split, table)
        self.dtype = dtype
        self.lengths = lengths
        self.removed = removed
        # Documents that a later generation removed, and their trained tokens: the manifest counts them.
        self.removed_later = np.empty(0, np.int64)
        self.trained_removed = 0
        self.tokens = sum(location.bytes for location in table.locations) // dtype.itemsize
        self.end_id = manifest.tokenizer.end_id if manifest else 0
        masked, weighted = (self._list_shards_with(suffix) for suffix in (".mask", ".weights"))
        self.masked = bool(masked or removed.size)
        self.weighted = bool(weighted)
        # Suffix of the file that has the flags of a shard; the weights of a shard include its mask.
        self._flag_suffixes = dict.fromkeys(masked, ".mask") | dict.fromkeys(weighted, ".weights")
        self._flag_files: dict[int, LossMask | LossWeights] = {}
        self._limit = compute_mapped_limit(len(table.locations), 2 + 2 * bool(self._flag_suffixes))

    def remove(self, documents: Ids) -> None:
        """Serve further documents as removed; numbers beyond the subset are ignored."""
        further = np.setdiff1d(documents[documents < self.lengths.size], self.removed)
        self.trained_removed += count_trained_tokens(self.flags, self.lengths, further)
        self.removed_later = np.union1d(self.removed_later, further)
        self.removed = np.union1d(self.removed, further)
        self.masked = self.masked or bool(self.removed.size)

    @property
    def mapped(self) -> MappedShards | None:
        return None

    @property
    def fetched_bytes(self) -> int:
        return 0

    @property
    def is_fully_cached(self) -> bool:
        return True

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of the subset."""
        if self.manifest is None:
            return self.tokens
        return self.manifest.subsets[self.split].trained_tokens - self.trained_removed

    def limit_mapped(self, shards: int) -> None:
        """Limit the number of mapped shards, to leave file descriptors to other stores."""
        self._limit = min(self._limit, shards)

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Read token ranges; see :meth:`Store.read`."""
        raise NotImplementedError

    def locate(self, documents: Ids) -> MappedSpans | None:
        """Return where documents are mapped; None if they have to be read."""
        return None

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        """Read the first ``length`` tokens of one document."""
        return self.read(np.array([number]), np.zeros(1, np.int64), np.array([length]))[0]

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[LossFlags]:
        """Read the loss flags of token ranges; see :meth:`read`."""
        flags = [LossFlags.all_trained(length) for length in lengths.tolist()]
        self.verify_flags(documents)
        if self._flag_suffixes:
            shards = self.table.shards_of(documents)
            begins = self._find_begins(documents, shards) + starts
            for index, (shard, begin) in enumerate(zip(shards.tolist(), begins.tolist(), strict=True)):
                if (flag_file := self.find_flag_file(shard)) is not None:
                    flags[index] = LossFlags.from_codes(flag_file.slice(begin, begin + flags[index].size))
        for index in self._list_removed_indices(documents):
            flags[index] = LossFlags.none_trained(flags[index].size)
        return flags

    def verify_flags(self, documents: Ids) -> None:
        """Verify the flags of documents that are read for the first time.

        Raises:
            StoreError: they were changed.
        """

    def _find_begins(self, documents: Ids, shards: Ids) -> Ids:
        """Return the first token of each document in its shard; any number without flags."""
        raise NotImplementedError

    def find_flag_file(self, shard: int) -> LossMask | LossWeights | None:
        """Return the trained flags or weight codes of a shard; None if all are trained."""
        flag_file = self._flag_files.get(shard)
        if flag_file is None and (suffix := self._flag_suffixes.get(shard)) is not None:
            if len(self._flag_files) >= self._limit:
                self._flag_files.clear()
            path, view = self._open_file(shard, suffix)
            map_flags = map_weights if suffix == ".weights" else map_mask
            flag_file = map_flags(path, self.table.locations[shard].bytes // self.dtype.itemsize, view)
            self._flag_files[shard] = flag_file
        return flag_file

    def _list_removed_indices(self, documents: Ids) -> list[int]:
        if not self.removed.size:
            return []
        return np.flatnonzero(mask_removed(self.removed, documents)).tolist()

    def _fill_removed(self, ranges: list[NDArray[np.generic]], documents: Ids) -> list[NDArray[np.generic]]:
        """Replace the token ranges of removed documents by end tokens, in place."""
        for index in self._list_removed_indices(documents):
            ranges[index] = np.full(ranges[index].size, self.end_id, ranges[index].dtype)
        return ranges

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Fetch documents, ascending, with their blocks; do nothing for local data."""


def make_span_error(store_name: object, document: int, tokens: int, stop: int) -> StoreError:
    """Build the error for a token range that ends beyond its document."""
    return StoreError(
        f"Document {document} of {store_name} has {tokens} tokens, and a span of it ends at {stop}: the plan "
        "belongs to another store, or the store was changed. Open it again."
    )


def refuse_ranges_beyond(lengths: LengthReader, documents: Ids, stops: Ids, store_name: object) -> None:
    """Raise StoreError if a token range ends beyond its document."""
    tokens = lengths.take(documents)
    is_beyond = stops > tokens
    if is_beyond.any():
        index = int(is_beyond.argmax())
        raise make_span_error(store_name, int(documents[index]), int(tokens[index]), int(stops[index]))


def count_trained_tokens(
    read_flags: Callable[[Ids, Ids, Ids], list[LossFlags]], lengths: LengthReader, documents: Ids
) -> int:
    """Count the trained tokens of documents by reading their flags in bounded batches."""
    trained = 0
    for start in range(0, documents.size, _CHUNK_DOCUMENTS):
        numbers = documents[start : start + _CHUNK_DOCUMENTS]
        document_flags = read_flags(numbers, np.zeros_like(numbers), lengths.take(numbers).astype(np.int64))
        trained += sum(flags.count_trained() for flags in document_flags)
    return trained
