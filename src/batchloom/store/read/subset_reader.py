"""Protocol of the subset readers, and the loss masks they share."""

import json
from collections.abc import Callable
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError, TokenizerError
from batchloom.core.files import describe_os_error
from batchloom.store.format.layout import TOKENIZER_NAME
from batchloom.store.format.manifest import Manifest, TokenizerEntry
from batchloom.store.format.media_index import MediaRows
from batchloom.store.format.provenance import ProvenanceTable
from batchloom.store.format.shard_sidecars import LossMask, PairIndex
from batchloom.store.format.store_lengths import StoreLengths, make_span_error, mask_removed
from batchloom.store.read.mapped_shards import MappedShards, ShardTable
from batchloom.store.read.remote_lengths import RemoteLengths
from batchloom.tokens import Tokenizer, restore_tokenizer

Ids = NDArray[np.int64]
_CHUNK_DOCUMENTS = 1 << 12
_RESTORE_REMEDY = "restore it from the original store"


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


class LengthReader(Protocol):
    """Lengths of documents in tokens."""

    @property
    def size(self) -> int:
        """Number of documents."""

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the lengths of ``documents``, uint32 of the same length."""

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the lengths of documents ``start`` to ``stop - 1``, uint32."""


class StoreFiles(Protocol):
    """Sidecar files of a subset's shards, and small files of the store."""

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None."""

    def sides(self, shard: int) -> PairIndex:
        """Read the pairs and sides of a shard of a preference store."""

    def media(self, shard: int) -> MediaRows:
        """Read the media index of a shard that has one."""

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        """Read bytes of the ``.blobs`` of a shard, fewer at the end of the file."""

    def file(self, name: str) -> bytes:
        """Read a small file of the store."""

    def read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer; raises as ``Store.tokenizer``."""

    def read_manifest(self, generation: int | None = None) -> Manifest:
        """Read the current manifest of a generation, or of the newest if None.

        Raises as ``open_store``.
        """


class SubsetReader(Protocol):
    """Reader of the content of one subset.

    Local files, a remote store and synthetic data each implement it. Batches need only ``end_id``, ``masked``,
    ``read`` and ``mask``, which a combination of several stores provides too.
    """

    @property
    def lengths(self) -> LengthReader:
        """Lengths of all documents of the subset, in tokens."""

    @property
    def table(self) -> ShardTable:
        """Shards of the subset; empty for synthetic data."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the subset."""

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of the subset."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of a token on disk."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content, 32 hex digits."""

    @property
    def end_id(self) -> int:
        """End-of-document id, which also fills padding and removed documents."""

    @property
    def removed(self) -> Ids:
        """Numbers of the removed documents, ascending, int64."""

    @property
    def masked(self) -> bool:
        """True if some tokens are not trained."""

    @property
    def mapped(self) -> MappedShards | None:
        """Mapped shards, if documents are read exactly as stored; else None."""

    @property
    def is_fully_cached(self) -> bool:
        """True if all tokens and stored media are local and verified."""

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes that this process fetched over the network."""

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Read token ranges; see :meth:`Store.read`."""

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        """Read the first ``length`` tokens of one document."""

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Read the trained flags of token ranges; see :meth:`Store.mask`."""

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Fetch documents of a remote store in few requests; a no-op for local data.

        Args:
            documents: document numbers, ascending, int64 [N].
            block: number of documents that are used together; complete blocks are fetched.
        """

    @property
    def files(self) -> StoreFiles:
        """Sidecar files of the subset."""

    def limit_mapped(self, shards: int) -> None:
        """Limit the number of mapped shards, to leave file descriptors to other stores."""

    def for_lengths(self, lengths: FilteredLengths) -> "SubsetReader":
        """Return a reader of the same subset that uses the given lengths."""


@final
class SubsetMasks:
    """Loss masks of the documents of a subset."""

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


def load_stored_tokenizer(read_file: Callable[[str], bytes], store_path: str, entry: TokenizerEntry) -> Tokenizer:
    """Load the tokenizer of a store and check it against the manifest.

    Raises StoreError if it cannot be read or is not the manifest's, and TokenizerError if its state is invalid.
    """
    path = f"{store_path}/{TOKENIZER_NAME}"
    try:
        state = json.loads(read_file(TOKENIZER_NAME))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}; {_RESTORE_REMEDY}.") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE_REMEDY}.") from error
    try:
        tokenizer = restore_tokenizer(state)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if (tokenizer.vocab_size, tokenizer.end_id, tokenizer.bos_id) != (entry.vocab_size, entry.end_id, entry.bos_id):
        raise StoreError(
            f"{path} has {tokenizer.vocab_size} ids, end {tokenizer.end_id} and BOS {tokenizer.bos_id}; the "
            f"manifest says {entry.vocab_size}, {entry.end_id} and {entry.bos_id}: it is another tokenizer."
        )
    if tokenizer.fingerprint != entry.fingerprint:
        raise StoreError(
            f"{path} has fingerprint {tokenizer.fingerprint}, the manifest says {entry.fingerprint}: it is another "
            "tokenizer."
        )
    return tokenizer
