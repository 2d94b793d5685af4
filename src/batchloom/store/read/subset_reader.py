"""Protocol of the subset readers, and the loss masks they share."""

from collections.abc import Callable
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.loss_mask import LossMask
from batchloom.store.format.manifest import Manifest
from batchloom.store.format.media_index import MediaRows
from batchloom.store.format.pair_index import PairIndex
from batchloom.store.format.provenance import ProvenanceTable
from batchloom.store.format.removed_documents import mask_removed
from batchloom.store.format.store_lengths import make_span_error
from batchloom.store.read.filtered_lengths import FilteredLengths
from batchloom.store.read.mapped_shards import MappedShards, ShardTable
from batchloom.tokens import Tokenizer

Ids = NDArray[np.int64]


class LengthReader(Protocol):
    """Lengths of documents in tokens."""

    @property
    def size(self) -> int:
        """Number of documents."""
        ...

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the lengths of ``documents``, uint32 of the same length."""
        ...

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, uint32."""
        ...


class StoreFiles(Protocol):
    """Sidecar files of a subset's shards, and small files of the store."""

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None.

        Raises:
            StoreError: the ``.docs`` of the shard is missing or damaged.
        """
        ...

    def sides(self, shard: int) -> PairIndex:
        """Read the pairs and sides of a shard of a preference store.

        Raises:
            StoreError: the ``.pairs`` of the shard is missing or damaged.
        """
        ...

    def media(self, shard: int) -> MediaRows:
        """Read the media index of a shard that has one.

        Raises:
            StoreError: the ``.media`` of the shard is missing or damaged.
        """
        ...

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        """Read bytes of the ``.blobs`` of a shard, fewer at the end of the file.

        Raises:
            StoreError: the bytes cannot be read, or do not match their checksums.
        """
        ...

    def file(self, name: str) -> bytes:
        """Read a small file of the store.

        Raises:
            OSError: the file cannot be read; FileNotFoundError if it does not exist.
        """
        ...

    def read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer; raises as ``Store.tokenizer``."""
        ...

    def read_manifest(self, generation: int | None = None) -> Manifest:
        """Read the current manifest of a generation, or of the newest if None.

        Raises as ``open_store``.
        """
        ...


class SubsetReader(Protocol):
    """Reader of the content of one subset.

    Local files, a remote store and synthetic data each implement it. Batches need only ``end_id``, ``masked``,
    ``read`` and ``mask``, which a combination of several stores provides too.
    """

    @property
    def lengths(self) -> LengthReader:
        """Lengths of all documents of the subset, in tokens."""
        ...

    @property
    def table(self) -> ShardTable:
        """Shards of the subset; empty for synthetic data."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens of the subset."""
        ...

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of the subset."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of a token on disk."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content, 32 hex digits."""
        ...

    @property
    def end_id(self) -> int:
        """End-of-document id, which also fills padding and removed documents."""
        ...

    @property
    def removed(self) -> Ids:
        """Numbers of the removed documents, ascending, int64."""
        ...

    @property
    def masked(self) -> bool:
        """True if some tokens are not trained."""
        ...

    @property
    def mapped(self) -> MappedShards | None:
        """Mapped shards, if documents are read exactly as stored; else None."""
        ...

    @property
    def is_fully_cached(self) -> bool:
        """True if all tokens and stored media are local and verified."""
        ...

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes that this process fetched over the network."""
        ...

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Read token ranges; see :meth:`Store.read`."""
        ...

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        """Read the first ``length`` tokens of one document."""
        ...

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Read the trained flags of token ranges; see :meth:`Store.mask`."""
        ...

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Fetch documents of a remote store in few requests; a no-op for local data.

        Args:
            documents: document numbers, ascending, int64 [N].
            block: number of documents that are used together; complete blocks are fetched.

        Raises:
            StoreError, InputError: as :meth:`Store.read`.
        """
        ...

    @property
    def files(self) -> StoreFiles:
        """Sidecar files of the subset."""
        ...

    def limit_mapped(self, shards: int) -> None:
        """Limit the number of mapped shards, to leave file descriptors to other stores."""
        ...

    def for_lengths(self, lengths: FilteredLengths) -> "SubsetReader":
        """Return a reader of the same subset that uses the given lengths."""
        ...


@final
class SubsetMasks:
    """Loss masks of the documents of a subset.

    Args:
        masked: numbers of the shards that have a mask; all tokens of other shards are trained.
        removed: numbers of the removed documents, ascending; their tokens are not trained.
        load: returns the mask of a shard.
        limit: maximum number of masks in memory.

    Attributes:
        shards: as ``masked``.
    """

    def __init__(self, masked: frozenset[int], removed: Ids, load: Callable[[int], LossMask], limit: int) -> None:
        self.shards, self._removed, self._load, self.limit = masked, removed, load, limit
        self._masks: dict[int, LossMask] = {}

    @property
    def masked(self) -> bool:
        """True if some tokens are not trained."""
        return bool(self.shards) or bool(self._removed.size)

    def get_mask(self, shard: int) -> LossMask:
        """Return the mask of a shard that has one."""
        mask = self._masks.get(shard)
        if mask is None:
            if len(self._masks) >= self.limit:
                self._masks.clear()
            mask = self._masks[shard] = self._load(shard)
        return mask

    def read(self, documents: Ids, shards: Ids, begins: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Return the masks of token ranges.

        Args:
            documents: document number of each range, int64 [N].
            shards: shard of each range, int64 [N].
            begins: first token of each range in its shard, int64 [N]; unused for a shard without a mask.
            lengths: number of tokens of each range, int64 [N].
        """
        masks = [
            self.get_mask(shard).slice(begin, begin + length) if shard in self.shards else np.ones(length, bool)
            for shard, begin, length in zip(shards.tolist(), begins.tolist(), lengths.tolist(), strict=True)
        ]
        for index in removed_among(self._removed, documents):
            masks[index] = np.zeros(masks[index].size, bool)
        return masks


def all_trained(lengths: Ids) -> list[NDArray[np.bool_]]:
    """Return masks that are True for every token of the ranges."""
    return [np.ones(length, bool) for length in lengths.tolist()]


def removed_among(removed: Ids, documents: Ids) -> list[int]:
    """Return the indices of the removed documents among ``documents``."""
    if not removed.size:
        return []
    return np.flatnonzero(mask_removed(removed, documents)).tolist()


def fill_removed(ranges: list[NDArray[Any]], documents: Ids, removed: Ids, end_id: int) -> list[NDArray[Any]]:
    """Replace the token ranges of removed documents by end tokens, in place."""
    for index in removed_among(removed, documents):
        ranges[index] = np.full(ranges[index].size, end_id, ranges[index].dtype)
    return ranges


def refuse_ranges_beyond(lengths: LengthReader, documents: Ids, stops: Ids, store: object) -> None:
    """Raise StoreError if a token range ends beyond its document."""
    is_beyond = stops > lengths.take(documents)
    if is_beyond.any():
        index = int(is_beyond.argmax())
        tokens = int(lengths.take(documents[index : index + 1])[0])
        raise make_span_error(store, int(documents[index]), tokens, int(stops[index]))


def refuse_unlike_count(provenance: ProvenanceTable, table: ShardTable, shard: int) -> None:
    """Raise StoreError if a ``.docs`` has another number of documents than its shard."""
    stem, documents = table.locations[shard][:2]
    if len(provenance) != documents:
        raise StoreError(
            f"{stem}.docs has {len(provenance)} documents, the manifest says {documents}. The store is damaged: "
            "run batchloom check on it."
        )
