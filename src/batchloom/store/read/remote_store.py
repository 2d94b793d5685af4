"""Reader of a subset of a remote store, and of its manifest."""

import contextlib
import os
import weakref
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import check_url, redact_url
from batchloom.core.errors import StoreError, StoreMissingError
from batchloom.remote import (
    BLOCK_BYTES,
    BlockCache,
    Intervals,
    RangeFetcher,
    fetch,
    fetch_file_info,
    make_html_page_error,
    merge_intervals,
    run_with_retries,
)
from batchloom.store.format.layout import MANIFEST_NAME, SMALL_FILE_LIMIT, TOKEN_DTYPES
from batchloom.store.format.manifest import Manifest, read_generation_manifest
from batchloom.store.format.media_index import NOT_STORED, MediaRows
from batchloom.store.format.shard_sidecars import ProvenanceTable, locate_provenance_columns
from batchloom.store.format.store_lengths import StoreLengths, map_removed, mask_removed
from batchloom.store.read.mapped_shards import ShardLocation, ShardTable
from batchloom.store.read.remote_blocks import RemoteBlocks
from batchloom.store.read.remote_files import MAX_FETCH_ATTEMPTS, BlockFetcher, RemoteFileTable, RemoteStoreFile
from batchloom.store.read.subset_files import Ids
from batchloom.store.read.subset_reader import SubsetReader, make_span_error

VerifyMode = Literal["off", "first-read", "full"]
VERIFY_MODES: tuple[str, ...] = get_args(VerifyMode)
# The neighbours of documents are fetched too if the cache limit is at least this multiple of the subset's bytes.
_CACHE_ROOM_FACTOR = 2
# Number of blocks in such an aligned fetch: 256 KiB.
_NEIGHBOUR_BLOCKS = 64
# Maximum number of shards whose media index stays in memory, as in stored_media.
_MAX_CACHED_MEDIA = 256
# A small file of up to this many bytes takes one request; a larger one takes a size request and a second read.
_FIRST_BYTES = 8 << 20
_LENGTHS_PER_BLOCK = BLOCK_BYTES // 4
# Up to this many lengths are held in memory: 16 MiB of lengths, and 32 MiB of document offsets.
MAX_LOCAL_LENGTHS = 1 << 22


def open_remote_manifest(url: str, generation: int | None = None) -> Manifest:
    """Read and check the manifest of the store at a URL.

    Args:
        url: URL of the store's folder.
        generation: an older generation; None for the newest.

    Raises:
        StoreMissingError: there is no manifest.
        GenerationError, StoreError: as :func:`~batchloom.store.read_manifest`.
        InputError: the URL cannot be reached or access is denied.
    """
    check_url(url)
    base = url.rstrip("/")
    return read_generation_manifest(partial(_read_remote_file, base), redact_url(base), generation, MAX_FETCH_ATTEMPTS)


def _read_remote_file(base: str, name: str) -> bytes:
    """Read a small file of a store.

    Raises FileNotFoundError if it is missing, and StoreMissingError for a missing manifest.
    """
    url = f"{base}/{name}"
    try:
        data = run_with_retries(url, lambda: fetch(url, 0, _FIRST_BYTES, _FIRST_BYTES))
        if len(data) == _FIRST_BYTES:
            size = int(run_with_retries(url, lambda: fetch_file_info(url))["size"])
            if size > SMALL_FILE_LIMIT:
                raise StoreError(
                    f"{redact_url(url)} cannot be read: it has {size:,} bytes, and at most {SMALL_FILE_LIMIT:,} "
                    "are read; check the address."
                )
            if size > _FIRST_BYTES:
                data += run_with_retries(url, lambda: fetch(url, _FIRST_BYTES, size, size))
    except FileNotFoundError:
        if name != MANIFEST_NAME:
            raise
        raise StoreMissingError(
            f"There is no store at {redact_url(base)}: it has no {MANIFEST_NAME}, which is written last. If it is "
            "unfinished, give its prepare command again; otherwise check the address."
        ) from None
    # No file of a store begins with HTML.
    if data[:64].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise make_html_page_error(url)
    return data


@final
class RemoteSubset(SubsetReader):
    """Reader of a subset of a remote store through a local block cache.

    Args:
        url: URL of the store's folder.
        subset: name of the subset.
        manifest: manifest of the open generation.
        cache: folder of cached blocks, shared by all stores and processes of a node.
        cache_limit: maximum size of the cache in bytes.
        verify: as of ``open_store``.
    """

    def __init__(
        self, url: str, subset: str, manifest: Manifest, *, cache: Path, cache_limit: int, verify: VerifyMode
    ) -> None:
        self.url = url.rstrip("/")
        self.cache_limit = cache_limit
        name = self.name = redact_url(self.url)
        entry = self._entry = manifest.subsets[subset]
        # All generations use the cache name of the first one, to share their common blocks.
        fingerprints = (generation.fingerprints.get(subset) for generation in manifest.all_history)
        block_cache = BlockCache(cache, next(filter(None, fingerprints), subset), cache_limit)
        self._files = RemoteFileTable(manifest, subset)
        self._fetcher = BlockFetcher(RangeFetcher(self.url), self._files)
        self._blocks = RemoteBlocks(self._fetcher, self._files, block_cache, verify)
        self._media: dict[int, MediaRows] = {}
        _OPEN_BLOCKS.add(self._blocks)
        folder = Path(name) / subset
        table = ShardTable([ShardLocation(folder / shard.name, shard.documents, shard.bytes) for shard in entry.shards])
        # Number of documents and of tokens before each shard, and in total.
        self._documents = np.array(table.bounds, np.int64)
        self._tokens = np.cumsum([0, *(shard.tokens for shard in entry.shards)])
        layers = [layer.documents for layer in entry.all_layers]
        # Offset of each document's first token in the subset; unused if lengths are fetched by blocks.
        self._begins = np.empty(0, np.int64)
        lengths: StoreLengths | RemoteLengths
        if sum(layers) <= MAX_LOCAL_LENGTHS:
            arrays = [data.view("<u4") for data in self._blocks.read_files(self._files.lengths)]
            lengths = StoreLengths(*arrays)
            ends = np.cumsum(np.concatenate(arrays), dtype=np.int64)
            self._begins = np.concatenate([np.zeros(1, np.int64), ends])
        else:
            layer_ends = self._documents.searchsorted(np.cumsum([0, *layers]))
            lengths = RemoteLengths(self._blocks, layers, np.diff(self._tokens[layer_ends]).tolist())
        removed = np.empty(0, np.int64)
        if self._files.removed is not None:
            removed = map_removed(folder, entry, self._read_file(self._files.removed))
        dtype = TOKEN_DTYPES[manifest.dtype]
        super().__init__(name, manifest, subset, table, dtype, lengths=lengths, removed=removed)
        self._own_bytes = sum(shard.bytes + (shard.blobs_bytes or 0) for shard in entry.shards)
        bins = BLOCK_BYTES * self._files.bases[[files[".bin"] for files in self._files.shard_files]]
        # Added to the byte offset of a token in the subset, a shift gives its byte offset in the block numbering.
        self._shifts = bins - self._tokens[:-1] * dtype.itemsize

    @property
    def fetched_bytes(self) -> int:
        return self._fetcher.received

    @property
    def is_fully_cached(self) -> bool:
        suffixes = (".bin", ".media", ".blobs")
        return self._blocks.are_cached(
            [files[suffix] for files in self._files.shard_files for suffix in suffixes if suffix in files]
        )

    @property
    def bytes_a_token(self) -> int:
        """Average number of bytes fetched per token, including stored media."""
        return max(self.dtype.itemsize, -(-self._own_bytes // max(self.tokens, 1)))

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[Any]]:
        begins, sizes = self._locate_bytes(documents, starts, lengths)
        return self._fill_removed(self._blocks.read(begins, sizes, self.dtype), documents)

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Fetch documents with all documents of their blocks, and their stored media.

        If ``block`` is 1 and the cache has room for the complete subset, adjacent bytes are
        fetched too: they are used later, and requests of a few KiB each are slow.
        """
        if not documents.size:
            return
        intervals = self._add_neighbours(documents, block)
        if block == 1 and self._own_bytes * _CACHE_ROOM_FACTOR <= self.cache_limit:
            intervals = self._files.round_intervals(intervals, _NEIGHBOUR_BLOCKS)
        self._blocks.obtain(intervals)
        # Missing or damaged media are reported when they are read, with their document.
        with contextlib.suppress(StoreError):
            is_present = ~mask_removed(self.removed, documents)
            self._blocks.obtain(self._find_media_intervals(documents[is_present]))

    def _find_media_intervals(self, documents: Ids) -> Intervals:
        """Return the blocks of 4 KiB that hold the media of documents."""
        shards = self.table.shards_of(documents)
        starts = [np.empty(0, np.int64)]
        stops = [np.empty(0, np.int64)]
        for shard in np.unique(shards).tolist():
            if ".blobs" not in self._files.shard_files[shard]:
                continue
            is_requested = np.zeros(self._entry.shards[shard].documents, bool)
            is_requested[documents[shards == shard] - self._documents[shard]] = True
            rows = self.media(shard).rows
            size = self._find_file(shard, ".blobs").size
            media_rows = rows[is_requested[rows["document"]] & (rows["blob"] != NOT_STORED)]
            # Offsets beyond the file, in a damaged index, are reported when the medium is read.
            media_rows = media_rows[(media_rows["blob"] <= size) & (media_rows["size"] <= size)]
            media_rows = media_rows[media_rows["blob"] + media_rows["size"] <= size]
            begins = self._find_blobs(shard) + media_rows["blob"].astype(np.int64)
            starts.append(begins // BLOCK_BYTES)
            stops.append(-(-(begins + media_rows["size"].astype(np.int64)) // BLOCK_BYTES))
        return merge_intervals(np.concatenate(starts), np.concatenate(stops))

    def _add_neighbours(self, documents: Ids, block: int) -> Intervals:
        """Return the 4 KiB blocks of documents and their neighbours in the same layer."""
        bounds = np.cumsum([0, *self.lengths.layers])
        starts = bounds[bounds[1:].searchsorted(documents, side="right")]
        first = np.unique(starts + (documents - starts) // block * block)
        stops = bounds[1:][bounds[1:].searchsorted(first, side="right")]
        last = np.minimum(first + block, stops) - 1
        # A block of documents may cross a shard boundary; its parts are in different files.
        ends = self._documents[1:]
        is_split = self.table.shards_of(last) != self.table.shards_of(first)
        for index in np.flatnonzero(is_split).tolist():
            shard_starts = ends[(ends > first[index]) & (ends <= last[index])]
            first = np.concatenate([first, shard_starts])
            last = np.concatenate([last, [*(shard_starts[1:] - 1), last[index]]])
            last[index] = shard_starts[0] - 1
        zeros = np.zeros(len(first), np.int64)
        begins, _ = self._locate_bytes(first, zeros, zeros)
        lasts, sizes = self._locate_bytes(last, zeros, self.lengths.take(last).astype(np.int64))
        return merge_intervals(begins // BLOCK_BYTES, -(-(lasts + sizes) // BLOCK_BYTES))

    def _find_spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Return token offsets in the subset, int64, and lengths, uint32."""
        if isinstance(self.lengths, RemoteLengths):
            return self.lengths.spans(documents)
        return self._begins[documents], self.lengths.take(documents)

    def _find_begins(self, documents: Ids, shards: Ids) -> Ids:
        begins: Ids = self._find_spans(documents)[0] - self._tokens[shards]
        return begins

    def _locate_bytes(self, documents: Ids, starts: Ids, lengths: Ids) -> tuple[Ids, Ids]:
        shards = self.table.shards_of(documents)
        begins, document_lengths = self._find_spans(documents)
        stops = starts + lengths
        is_beyond = (stops > document_lengths) | (begins + document_lengths > self._tokens[1:][shards])
        if is_beyond.any():
            index = int(is_beyond.argmax())
            raise make_span_error(self.name, int(documents[index]), int(document_lengths[index]), int(stops[index]))
        size = self.dtype.itemsize
        return self._shifts[shards] + (begins + starts) * size, lengths * size

    def _find_file(self, shard: int, suffix: str) -> RemoteStoreFile:
        return self._files.files[self._files.shard_files[shard][suffix]]

    def _open_file(self, shard: int, suffix: str) -> tuple[Path, memoryview]:
        stem = self.table.locations[shard].stem
        return stem.with_suffix(suffix), self._read_file(self._files.shard_files[shard][suffix])

    def _read_file(self, number: int) -> memoryview:
        return self._blocks.read_files([number])[0].data

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None.

        For ``rows``, only their blocks are fetched, and they are not verified against a checksum.
        """
        if rows is None:
            return super().provenance(shard)
        columns = locate_provenance_columns(self._entry.shards[shard].documents)
        begin = BLOCK_BYTES * self._find_file(shard, ".docs").base
        begins = begin + np.concatenate([offset + width * rows for offset, width in columns])
        sizes = np.repeat([width for _, width in columns], len(rows))
        views = iter(self._blocks.read(begins, sizes, np.dtype(np.uint8)))
        hashes, records, offsets, parts = (b"".join(bytes(view) for view in islice(views, len(rows))) for _ in columns)
        return self._check_parts(
            ProvenanceTable(
                np.frombuffer(hashes, "<u8").reshape(-1, 2),
                np.frombuffer(records, "<u8"),
                np.frombuffer(offsets, "<u8"),
                np.frombuffer(parts, "<u4"),
            )
        )

    def media(self, shard: int) -> MediaRows:
        """Read the media index of a shard that has one; some are cached in memory."""
        media_rows = self._media.get(shard)
        if media_rows is None:
            media_rows = super().media(shard)
            if len(self._media) >= _MAX_CACHED_MEDIA:
                self._media.clear()
            self._media[shard] = media_rows
        return media_rows

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        if ".blobs" not in self._files.shard_files[shard]:
            return b""
        size = min(size, self._find_file(shard, ".blobs").size - begin)
        if size <= 0:
            return b""
        begins = np.array([self._find_blobs(shard) + begin], np.int64)
        (data,) = self._blocks.read(begins, np.array([size]), np.dtype(np.uint8))
        return data.tobytes()

    def _find_blobs(self, shard: int) -> int:
        """Return the offset of a shard's ``.blobs`` in the block numbering, in bytes."""
        return BLOCK_BYTES * self._find_file(shard, ".blobs").base

    def file(self, name: str) -> bytes:
        return _read_remote_file(self.url, name)

    def read_manifest(self, generation: int | None = None) -> Manifest:
        return open_remote_manifest(self.url, generation)


@final
class RemoteLengths:
    """Lengths and token offsets of documents, fetched a few blocks at a time."""

    def __init__(self, blocks: RemoteBlocks, layers: list[int], tokens: list[int]) -> None:
        self._blocks = blocks
        self.layers = tuple(layers)
        self.size = sum(layers)
        self._starts = np.cumsum([0, *layers[:-1]])
        self._tokens = np.cumsum([0, *tokens[:-1]])
        files = blocks.files.files
        length_files = [files[number] for number in blocks.files.lengths]
        self._bases = np.array([file.base for file in length_files], np.int64)
        self._sizes = np.array([file.size for file in length_files], np.int64)
        self._entries = np.array([files[file.checksum_file].base for file in length_files], np.int64)

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        table, rows, columns, _ = self._read_rows(documents)
        lengths: NDArray[np.uint32] = table[rows, columns]
        return lengths

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        return self.take(np.arange(start, stop))

    def spans(self, documents: Ids) -> tuple[Ids, NDArray[np.uint32]]:
        """Return token offsets in the subset, int64, and lengths, uint32."""
        if not documents.size:
            return np.empty(0, np.int64), np.empty(0, np.uint32)
        table, rows, columns, preceding_tokens = self._read_rows(documents)
        block_tokens = np.zeros(len(documents), np.int64)
        inner_rows = np.flatnonzero(columns)
        if inner_rows.size:
            # One reduceat call sums the lengths before each document in its block.
            starts = rows[inner_rows] * _LENGTHS_PER_BLOCK
            bounds = np.stack([starts, starts + columns[inner_rows]], axis=1).ravel()
            block_tokens[inner_rows] = np.add.reduceat(table.ravel(), bounds, dtype=np.int64)[::2]
        return preceding_tokens[rows] + block_tokens, table[rows, columns]

    def _read_rows(self, documents: Ids) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64], Ids]:
        """Read the blocks that hold these lengths."""
        layers = self._starts.searchsorted(documents, side="right") - 1
        layer_documents = documents - self._starts[layers]
        keys = (layers << 44) | (layer_documents // _LENGTHS_PER_BLOCK)
        block_keys, rows = np.unique(keys, return_inverse=True)
        block_layers = block_keys >> 44
        numbers = block_keys & (1 << 44) - 1
        sizes = np.minimum(self._sizes[block_layers] - BLOCK_BYTES * numbers, BLOCK_BYTES)
        views = self._blocks.read(BLOCK_BYTES * (self._bases[block_layers] + numbers), sizes, np.dtype("<u4"))
        table = np.zeros((len(block_keys), _LENGTHS_PER_BLOCK), np.uint32)
        for row, view in zip(table, views, strict=True):
            row[: view.size] = view
        entries = self._blocks.read(
            BLOCK_BYTES * self._entries[block_layers] + 16 * numbers,
            np.full(len(block_layers), 16),
            np.dtype("<u8"),
        )
        preceding_tokens = np.array([int(entry[1]) for entry in entries], np.int64) + self._tokens[block_layers]
        return table, rows.ravel(), layer_documents % _LENGTHS_PER_BLOCK, preceding_tokens


_OPEN_BLOCKS: "weakref.WeakSet[RemoteBlocks]" = weakref.WeakSet()


def _after_fork() -> None:
    for blocks in _OPEN_BLOCKS:
        blocks.after_fork()


os.register_at_fork(after_in_child=_after_fork)
