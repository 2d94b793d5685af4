"""Base class of the readers of a subset, and the lengths they read."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final
from weakref import WeakValueDictionary

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import StoreError, TokenizerError
from batchloom.core.files import describe_os_error
from batchloom.core.loss_weights import TokenFlags
from batchloom.store.format.layout import TOKENIZER_NAME, compute_checksum
from batchloom.store.format.manifest import Manifest, TokenizerEntry, compute_subset_fingerprint
from batchloom.store.format.media_index import MediaRows, map_media
from batchloom.store.format.shard_columns import read_columns
from batchloom.store.format.shard_sidecars import (
    DocumentFields,
    LossMask,
    LossWeights,
    PairIndex,
    PartTable,
    ProvenanceTable,
    make_part_table,
    map_fields,
    map_mask,
    map_pair_index,
    map_provenance,
    map_weights,
)
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.mapped_shards import MappedShards, MappedSpans, ShardTable, compute_mapped_limit
from batchloom.tokens import Tokenizer, restore_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

Ids = NDArray[np.int64]
_CHUNK_DOCUMENTS = 1 << 12
_RESTORE_REMEDY = "restore it from the original store"


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
        self.all_lengths, self.media, self._is_chosen = all_lengths, media, is_chosen
        self.document_count, self.tokens = document_count, tokens
        self.size, self.layers = all_lengths.size, all_lengths.layers

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        return np.where(self._is_chosen(documents), self.all_lengths.take(documents), np.uint32(0))

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        numbers = np.arange(start, min(stop, self.size))
        return np.where(self._is_chosen(numbers), self.all_lengths.slice(start, stop), np.uint32(0))


class SubsetReader:
    """Reader of one subset of a local, remote or synthetic store, or of a prefix.

    Attributes:
        name: address of the store without credentials, for messages.
        manifest: the store's manifest; None for a bare prefix.
        table: shards of the subset; none for synthetic data.
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
        self.name, self.manifest, self.split = name, manifest, split
        self.table, self.dtype, self.lengths, self.removed = table, dtype, lengths, removed
        # Documents that a later generation removed, and their trained tokens: the manifest counts them.
        self.removed_later, self.trained_removed = np.empty(0, np.int64), 0
        self.tokens = sum(location.bytes for location in table.locations) // dtype.itemsize
        self.end_id = manifest.tokenizer.end_id if manifest else 0
        masked, weighted = (self._list_shards_with(suffix) for suffix in (".mask", ".weights"))
        self.masked, self.weighted = bool(masked or removed.size), bool(weighted)
        # Suffix of the file that has the flags of a shard; the weights of a shard include its mask.
        self._flag_suffixes = dict.fromkeys(masked, ".mask") | dict.fromkeys(weighted, ".weights")
        self._flag_files: dict[int, LossMask | LossWeights] = {}
        self._limit = compute_mapped_limit(len(table.locations), 2 + bool(masked) + bool(weighted))

    def remove(self, documents: Ids) -> None:
        """Serve further documents as removed; numbers beyond the subset are ignored."""
        further = np.setdiff1d(documents[documents < self.lengths.size], self.removed)
        self.trained_removed += count_trained_tokens(self.mask, self.lengths, further)
        self.removed_later = np.union1d(self.removed_later, further)
        self.removed = np.union1d(self.removed, further)
        self.masked = self.masked or bool(self.removed.size)

    def _list_shards_with(self, suffix: str) -> list[int]:
        """Return the shards that have a file of this suffix."""
        shards = self.manifest.subsets[self.split].shards if self.manifest else ()
        return [number for number, shard in enumerate(shards) if suffix in shard.checksums]

    @cached_property
    def part_table(self) -> PartTable:
        """Parts of the sources that the manifest lists; none for a bare prefix."""
        return make_part_table(self.manifest.sources if self.manifest else ())

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

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content, 32 hex digits."""
        if self.manifest is None:
            raise AssertionError("the reader of a bare prefix computes its own")
        return compute_subset_fingerprint(self.manifest, self.split)

    def limit_mapped(self, shards: int) -> None:
        """Limit the number of mapped shards, to leave file descriptors to other stores."""
        self._limit = min(self._limit, shards)

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Read token ranges; see :meth:`Store.read`."""
        raise NotImplementedError

    def locate(self, documents: Ids) -> MappedSpans | None:  # noqa: ARG002 - only local documents are mapped
        """Return where documents are mapped; None if they have to be read."""
        return None

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        """Read the first ``length`` tokens of one document."""
        return self.read(np.array([number]), np.zeros(1, np.int64), np.array([length]))[0]

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Read the trained flags of token ranges; see :meth:`Store.mask`."""
        return [flags != 0 for flags in self.flags(documents, starts, lengths)]

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[TokenFlags]:
        """Read the trained flags or weight codes of token ranges; see :meth:`read`."""
        flags: list[TokenFlags] = [np.ones(length, bool) for length in lengths.tolist()]
        if self._flag_suffixes:
            shards = self.table.shards_of(documents)
            begins = self._find_begins(documents, shards) + starts
            for index, (shard, begin) in enumerate(zip(shards.tolist(), begins.tolist(), strict=True)):
                if (flag_file := self.find_flag_file(shard)) is not None:
                    flags[index] = flag_file.slice(begin, begin + flags[index].size)
        for index in self._list_removed_indices(documents):
            flags[index] = np.zeros(flags[index].size, bool)
        return flags

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

    def _open_file(self, shard: int, suffix: str) -> tuple[Path, memoryview]:
        """Return the path of a file of a shard, for messages, and its content."""
        raise NotImplementedError

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None."""
        path, view = self._open_file(shard, ".docs")
        provenance, documents = map_provenance(path, view), self.table.locations[shard].documents
        if len(provenance) != documents:
            raise StoreError(
                f"{path} has {len(provenance)} documents, the manifest says {documents}. The store is damaged: "
                "run batchloom check on it."
            )
        return self._check_parts(provenance if rows is None else provenance.take(rows))

    def sides(self, shard: int) -> PairIndex:
        """Read the pairs and sides of a shard of a preference store."""
        path, view = self._open_file(shard, ".pairs")
        objective = self.manifest.objective if self.manifest else ""
        return map_pair_index(path, self.table.locations[shard].documents, objective, view)

    def media(self, shard: int) -> MediaRows:
        """Read the media index of a shard that has one."""
        path, view = self._open_file(shard, ".media")
        return map_media(path, self.table.locations[shard].documents, view)

    def fields(self, shard: int) -> DocumentFields:
        """Read the columns that the documents of a shard carry."""
        path, view = self._open_file(shard, ".fields")
        return map_fields(path, self.table.locations[shard].documents, view)

    def columns(self, shard: int, rows: Ids | None = None) -> "pa.Table":
        """Read the columns of rows of a shard that has some, of all if ``rows`` is None."""
        path, view = self._open_file(shard, ".parquet")
        return read_columns(path, view, self.table.locations[shard].documents, rows)

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        """Read bytes of the ``.blobs`` of a shard, fewer at the end of the file."""
        raise NotImplementedError

    def file(self, name: str) -> bytes:
        """Read a small file of the store; raises FileNotFoundError."""
        raise NotImplementedError

    def read_manifest(self, generation: int | None = None) -> Manifest:
        """Read the current manifest of a generation, or of the newest if None.

        Raises as ``open_store``.
        """
        raise NotImplementedError

    def read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer; raises as ``Store.tokenizer``."""
        if self.manifest is None:
            raise StoreError(f"{self.name} is a bare Megatron prefix: it does not say which tokenizer made it.")
        return _load_tokenizer(self.file, self.name, self.manifest.tokenizer)

    def _check_parts(self, provenance: ProvenanceTable) -> ProvenanceTable:
        """Return ``provenance`` after checking that the manifest lists all its parts."""
        if len(provenance) and int(provenance.parts.max()) >= len(self.part_table.records):
            raise StoreError(
                f"{self.name}: a document names a part of its sources that the manifest does not list. The store is "
                "damaged: run batchloom check on it."
            )
        return provenance


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
    mask: Callable[[Ids, Ids, Ids], list[NDArray[np.bool_]]], lengths: LengthReader, documents: Ids
) -> int:
    """Count the trained tokens of documents by reading their masks in bounded batches."""
    trained = 0
    for start in range(0, documents.size, _CHUNK_DOCUMENTS):
        numbers = documents[start : start + _CHUNK_DOCUMENTS]
        masks = mask(numbers, np.zeros_like(numbers), lengths.take(numbers).astype(np.int64))
        trained += sum(int(np.count_nonzero(flags)) for flags in masks)
    return trained


# Tokenizers in use by the checksum of their file: a mixture of a thousand stores has one, which takes a second to load.
_LOADED_TOKENIZERS: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()


def _load_tokenizer(read_file: Callable[[str], bytes], store_name: str, entry: TokenizerEntry) -> Tokenizer:
    """Load the tokenizer of a store and check it against the manifest."""
    path = f"{store_name}/{TOKENIZER_NAME}"
    try:
        data = read_file(TOKENIZER_NAME)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}; {_RESTORE_REMEDY}.") from error
    key = compute_checksum(data)
    tokenizer = _LOADED_TOKENIZERS.get(key)
    if tokenizer is None:
        tokenizer = _LOADED_TOKENIZERS[key] = _restore_tokenizer(data, path)
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


def _restore_tokenizer(data: bytes, path: str) -> Tokenizer:
    try:
        return restore_tokenizer(orjson.loads(data))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE_REMEDY}.") from error
