"""Reader of a subset of a remote store, and of its manifest."""

import contextlib
import os
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import check_url, redact_url
from batchloom.core.errors import SettingsError, StoreError, StoreMissingError
from batchloom.core.settings import as_int, quote_value as shown_value
from batchloom.remote import (
    BLOCK_BYTES,
    LOG,
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
from batchloom.store.format.manifest import Manifest, compute_subset_fingerprint, read_generation_manifest
from batchloom.store.format.media_index import NOT_STORED, MediaRows, parse_media
from batchloom.store.format.provenance import (
    ProvenanceTable,
    check_known_parts,
    locate_provenance_columns,
    parse_provenance,
)
from batchloom.store.format.shard_sidecars import LossMask, PairIndex, parse_mask, parse_pair_index
from batchloom.store.format.store_lengths import make_span_error, mask_removed, parse_removed
from batchloom.store.read.mapped_shards import (
    MappedShards,
    ShardLocation,
    ShardTable,
    compute_mapped_limit,
    list_masked_shards,
)
from batchloom.store.read.remote_blocks import MAX_FETCH_ATTEMPTS, RemoteBlocks
from batchloom.store.read.remote_file_table import RemoteFileTable
from batchloom.store.read.remote_lengths import MAX_LOCAL_LENGTHS, LocalLengths, RemoteLengths
from batchloom.store.read.subset_reader import (
    FilteredLengths,
    SubsetMasks,
    all_trained,
    fill_removed,
    load_stored_tokenizer,
    refuse_unlike_count,
)
from batchloom.tokens import Tokenizer

VerifyMode = Literal["off", "first-read", "full"]
VERIFY_MODES: tuple[str, ...] = get_args(VerifyMode)
CACHE_LIMIT = 50 * 10**9
# The neighbours of documents are fetched too if the cache limit is at least this multiple of the subset's bytes.
_CACHE_ROOM_FACTOR = 2
# Number of blocks in such an aligned fetch: 256 KiB.
_NEIGHBOUR_BLOCKS = 64
# Maximum number of shards whose media index stays in memory, as in stored_media.
_MAX_CACHED_MEDIA = 256
# A small file of up to this many bytes takes one request; a larger one takes a size request and a second read.
_FIRST_BYTES = 8 << 20

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RemoteStoreSettings:
    """Settings for reading a remote store.

    Attributes:
        cache: folder of cached blocks, shared by all stores and processes of a node; None for
            ``batchloom/blocks`` in the user's cache folder.
        limit: maximum size of the cache in bytes.
        verify: see :func:`~batchloom.store.open_store`.
    """

    cache: Path | None = None
    limit: int = CACHE_LIMIT
    verify: VerifyMode = "first-read"

    def __post_init__(self) -> None:
        problems = []
        if as_int(self.limit) is None or self.limit < 1:
            problems.append(f"cache_limit: {shown_value(self.limit)} is not a number of bytes above 0")
        if self.verify not in VERIFY_MODES:
            problems.append(f"verify: {shown_value(self.verify)} is not one of {', '.join(VERIFY_MODES)}")
        if problems:
            raise SettingsError(problems)

    @property
    def folder(self) -> Path:
        """Absolute path of the cache folder."""
        if self.cache is not None:
            return self.cache.expanduser().absolute()
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return home / "batchloom" / "blocks"


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
class RemoteFiles:
    """Sidecar files of a subset of a remote store.

    Args:
        url: URL of the store's folder.
        manifest: manifest of the open generation.
        subset: name of the subset.
        table: shards of the subset.
        files: numbered files of the subset.
        blocks: reads and caches blocks of the files.
    """

    def __init__(
        self,
        url: str,
        manifest: Manifest,
        subset: str,
        table: ShardTable,
        files: RemoteFileTable,
        blocks: RemoteBlocks,
    ) -> None:
        self.url, self._manifest, self._entry = url, manifest, manifest.subsets[subset]
        self.table, self._files, self._blocks = table, files, blocks
        self._media: dict[int, MediaRows] = {}

    def media(self, shard: int) -> MediaRows:
        """Return the media index of a shard that has one; some are cached in memory.

        Raises:
            StoreError: the file is missing, was changed or contradicts itself, or the manifest lacks its size.
            InputError: the store cannot be reached.
        """
        media_rows = self._media.get(shard)
        if media_rows is None:
            entry = self._entry.shards[shard]
            if entry.media_bytes is None:
                raise StoreError(
                    f"The manifest of {redact_url(self.url)} does not record the size of the media files of "
                    f"{entry.name}, because an older batchloom wrote it: copy the store here, or prepare the data "
                    "again."
                )
            media_rows = parse_media(*self.read_whole(self._files.media[shard]), entry.documents)
            if len(self._media) >= _MAX_CACHED_MEDIA:
                self._media.clear()
            self._media[shard] = media_rows
        return media_rows

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        """Read bytes of a shard's ``.blobs``, fewer at the end of the file.

        Raises:
            StoreError: the file is missing or was changed.
            InputError: the store cannot be reached.
        """
        number = self._files.blobs[shard]
        available_bytes = 0 if number < 0 else self._files.files[number].size - begin
        if min(size, available_bytes) <= 0:
            return b""
        begins = np.array([self.find_blobs(shard) + begin], np.int64)
        (data,) = self._blocks.read(begins, np.array([min(size, available_bytes)]), np.dtype(np.uint8))
        return data.tobytes()

    def find_blobs(self, shard: int) -> int:
        """Return the offset of a shard's ``.blobs`` in the block numbering, in bytes."""
        return BLOCK_BYTES * self._files.files[self._files.blobs[shard]].base

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None.

        For ``rows``, only their blocks are fetched, and they are not verified against a checksum.
        """
        if rows is None:
            provenance = parse_provenance(*self.read_whole(self._files.docs[shard]))
            refuse_unlike_count(provenance, self.table, shard)
        else:
            provenance = self._read_provenance_rows(shard, rows)
        return check_known_parts(provenance, self._manifest.sources, Path(redact_url(self.url)))

    def _read_provenance_rows(self, shard: int, rows: Ids) -> ProvenanceTable:
        file, documents = (
            self._files.files[self._files.docs[shard]],
            self._entry.shards[shard].documents,
        )
        begins = BLOCK_BYTES * file.base + np.concatenate(
            [offset + width * rows for offset, width in locate_provenance_columns(documents)]
        )
        sizes = np.repeat([width for _, width in locate_provenance_columns(documents)], len(rows))
        views = self._blocks.read(begins, sizes, np.dtype(np.uint8))
        columns = [
            b"".join(data.tobytes() for data in views[column * len(rows) : (column + 1) * len(rows)])
            for column in range(4)
        ]
        return ProvenanceTable(
            np.frombuffer(columns[0], "<u8").reshape(-1, 2),
            np.frombuffer(columns[1], "<u8"),
            np.frombuffer(columns[2], "<u8"),
            np.frombuffer(columns[3], "<u4"),
        )

    def sides(self, shard: int) -> PairIndex:
        """Read the pairs and sides of a shard of a preference store."""
        content = self.read_whole(self._files.pairs[shard])
        return parse_pair_index(*content, self._entry.shards[shard].documents, self._manifest.preferences)

    def read_whole(self, number: int) -> tuple[memoryview, Path]:
        """Return the content of a file, and its name for error messages."""
        name = f"{redact_url(self.url)}/{self._files.files[number].name}"
        return self._blocks.read_files([number])[0].data, Path(name)

    def file(self, name: str) -> bytes:
        """Read a small file of the store without caching; raises FileNotFoundError."""
        return _read_remote_file(self.url, name)

    def read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the store."""
        return load_stored_tokenizer(self.file, redact_url(self.url), self._manifest.tokenizer)

    def read_manifest(self, generation: int | None = None) -> Manifest:
        """Read the current manifest of a generation, or of the newest if None."""
        return open_remote_manifest(self.url, generation)


@final
class RemoteSubset:
    """Reader of a subset of a remote store through a local block cache.

    Args:
        url: URL of the store's folder.
        subset: name of the subset.
        manifest: manifest of the open generation.
        settings: cache and verification settings.

    Attributes:
        url, settings: as given.
        lengths: lengths of the documents.
    """

    # Remote shards are read by blocks and never mapped.
    mapped: MappedShards | None = None

    def __init__(self, url: str, subset: str, manifest: Manifest, settings: RemoteStoreSettings) -> None:
        self.url, self.settings = url.rstrip("/"), settings
        entry = self._entry = manifest.subsets[subset]
        self._manifest, self._split = manifest, subset
        history = manifest.all_history
        # All generations use the cache name of the first one, to share their common blocks.
        cache_name = next(
            filter(None, (generation_entry.fingerprints.get(subset) for generation_entry in history)),
            subset,
        )
        self._files = RemoteFileTable(manifest, subset)
        cache = BlockCache(settings.folder, cache_name, settings.limit)
        self._blocks = RemoteBlocks(RangeFetcher(self.url), self._files, cache, settings.verify)
        self.dtype = TOKEN_DTYPES[manifest.dtype]
        self.end_id = manifest.tokenizer.end_id
        _OPEN_BLOCKS.add(self._blocks)
        if not all(shard.sums for shard in entry.shards):
            LOG.warning(
                "%s was written by an older batchloom and has no block checksums: tokens read from it are not checked. "
                "Prepare it again, or copy it here and run batchloom check on it.",
                redact_url(self.url),
            )
        layers = [layer.documents for layer in entry.all_layers]
        is_small = sum(layers) <= MAX_LOCAL_LENGTHS or not all(layer.sums for layer in entry.all_layers)
        ends = np.cumsum([0, *(shard.documents for shard in entry.shards)])
        tokens = np.cumsum([0, *(shard.tokens for shard in entry.shards)])
        layer_tokens = np.diff(tokens[ends.searchsorted(np.cumsum([0, *layers]))]).tolist()
        self._span_reader: LocalLengths | RemoteLengths = (
            LocalLengths(self._blocks) if is_small else RemoteLengths(self._blocks, layers, layer_tokens)
        )
        self.lengths = self._span_reader.lengths
        self._documents, self._tokens = ends, tokens
        files = self._files.files
        self._own_bytes = sum(shard.bytes + (shard.blobs_bytes or 0) for shard in entry.shards)
        bins = BLOCK_BYTES * np.array([files[number].base for number in self._files.bins], np.int64)
        # Added to the byte offset of a token in the subset, a shift gives its byte offset in the block numbering.
        self._shifts = bins - tokens[:-1] * self.dtype.itemsize
        self._ends = ends[1:]
        self.tokens = int(tokens[-1])
        folder = Path(redact_url(self.url)) / subset
        self.table = ShardTable(
            [ShardLocation(folder / shard.name, shard.documents, shard.bytes) for shard in entry.shards]
        )
        self.files = RemoteFiles(self.url, manifest, subset, self.table, self._files, self._blocks)
        self.removed = self._load_removed()
        masked = list_masked_shards(manifest, subset, self.table.locations)
        limit = compute_mapped_limit(len(entry.shards), 2 + bool(masked))
        self._masks = SubsetMasks(masked, self.removed, self._load_mask, limit)
        self.masked = self._masks.masked

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of the subset."""
        return self._entry.trained_tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content."""
        return compute_subset_fingerprint(self._manifest, self._split)

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes of the subset that this process fetched."""
        return self._blocks.received

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[Any]]:
        """Read token ranges of documents, as views of cached blocks.

        Raises:
            StoreError: a shard is missing or was changed.
            InputError: the store cannot be reached.
        """
        begins, sizes = self._locate_bytes(documents, starts, lengths)
        ranges = self._blocks.read(begins, sizes, self.dtype)
        return fill_removed(ranges, documents, self.removed, self.end_id)

    def document(self, number: int, length: int) -> NDArray[Any]:
        """Read the first ``length`` tokens of one document."""
        return self.read(np.array([number]), np.zeros(1, np.int64), np.array([length]))[0]

    @property
    def bytes_a_token(self) -> int:
        """Average number of bytes fetched per token, including stored media."""
        tokens = int(self._tokens[-1])
        return max(self.dtype.itemsize, -(-self._own_bytes // max(tokens, 1)))

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Fetch documents with all documents of their blocks, and their stored media.

        If ``block`` is 1 and the cache has room for the complete subset, adjacent bytes are
        fetched too: they are used later, and requests of a few KiB each are slow.

        Args:
            documents: document numbers, ascending, int64 [N].
            block: number of documents in a block.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        if not documents.size:
            return
        intervals = self._add_neighbours(documents, block)
        if block == 1 and self._own_bytes * _CACHE_ROOM_FACTOR <= self.settings.limit:
            intervals = self._files.round_intervals(intervals, _NEIGHBOUR_BLOCKS)
        self._blocks.obtain(intervals)
        # Missing or damaged media are reported when they are read, with their document.
        with contextlib.suppress(StoreError):
            is_present = ~mask_removed(self.removed, documents)
            self._blocks.obtain(self._find_media_intervals(documents[is_present]))

    @property
    def is_fully_cached(self) -> bool:
        """True if all tokens and media of the subset are cached locally and verified."""
        files = self._files
        media = [number for number in (*files.media, *files.blobs) if number >= 0]
        return self._blocks.are_cached([*files.bins, *media])

    def _find_media_intervals(self, documents: Ids) -> Intervals:
        """Return the blocks of 4 KiB that hold the media of documents."""
        shards = self._ends.searchsorted(documents, side="right")
        starts, stops = [], []
        for shard in np.unique(shards).tolist():
            if self._files.blobs[shard] < 0:
                continue
            is_requested = np.zeros(self._entry.shards[shard].documents, bool)
            is_requested[documents[shards == shard] - self._documents[shard]] = True
            rows = self.files.media(shard).rows
            size = self._files.files[self._files.blobs[shard]].size
            media_rows = rows[is_requested[rows["document"]] & (rows["blob"] != NOT_STORED)]
            # Offsets beyond the file, in a damaged index, are reported when the medium is read.
            media_rows = media_rows[(media_rows["blob"] <= size) & (media_rows["size"] <= size)]
            media_rows = media_rows[media_rows["blob"] + media_rows["size"] <= size]
            begins = self.files.find_blobs(shard) + media_rows["blob"].astype(np.int64)
            starts.append(begins // BLOCK_BYTES)
            stops.append(-(-(begins + media_rows["size"].astype(np.int64)) // BLOCK_BYTES))
        if not starts:
            return merge_intervals([], [])
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
        first_shards = ends.searchsorted(first, side="right")
        is_split = ends.searchsorted(last, side="right") != first_shards
        for index in np.flatnonzero(is_split).tolist():
            shard_starts = ends[(ends > first[index]) & (ends <= last[index])]
            first = np.concatenate([first, shard_starts])
            last = np.concatenate([last, [*(shard_starts[1:] - 1), last[index]]])
            last[index] = shard_starts[0] - 1
        zeros = np.zeros(len(first), np.int64)
        begins, _ = self._locate_bytes(first, zeros, zeros)
        tail = self._span_reader.spans(last)[1].astype(np.int64)
        lasts, sizes = self._locate_bytes(last, zeros, tail)
        return merge_intervals(begins // BLOCK_BYTES, -(-(lasts + sizes) // BLOCK_BYTES))

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Read the trained flags of token ranges."""
        if not self.masked:
            return all_trained(lengths)
        shards = self._ends.searchsorted(documents, side="right")
        begins = self._span_reader.spans(documents)[0] - self._tokens[shards]
        return self._masks.read(documents, shards, begins + starts, lengths)

    def _locate_bytes(self, documents: Ids, starts: Ids, lengths: Ids) -> tuple[Ids, Ids]:
        shards = self._ends.searchsorted(documents, side="right")
        begins, document_lengths = self._span_reader.spans(documents)
        stops = starts + lengths
        is_beyond = (stops > document_lengths) | (begins + document_lengths > self._tokens[1:][shards])
        if is_beyond.any():
            index = int(is_beyond.argmax())
            raise make_span_error(
                redact_url(self.url),
                int(documents[index]),
                int(document_lengths[index]),
                int(stops[index]),
            )
        size = self.dtype.itemsize
        return self._shifts[shards] + (begins + starts) * size, lengths * size

    def _load_removed(self) -> Ids:
        if self._files.removed < 0:
            return np.empty(0, np.int64)
        return parse_removed(*self.files.read_whole(self._files.removed), self._entry)

    def _load_mask(self, shard: int) -> LossMask:
        return parse_mask(*self.files.read_whole(self._files.masks[shard]), self._entry.shards[shard].tokens)

    def limit_mapped(self, shards: int) -> None:
        """Limit the number of shard masks in memory."""
        self._masks.limit = min(self._masks.limit, shards)

    def for_lengths(self, lengths: FilteredLengths) -> "RemoteSubset":  # noqa: ARG002 - ranges are checked as they are
        """Return this reader: it checks ranges against the lengths of all documents."""
        return self


_OPEN_BLOCKS: "weakref.WeakSet[RemoteBlocks]" = weakref.WeakSet()


def _after_fork() -> None:
    for blocks in _OPEN_BLOCKS:
        blocks.after_fork()


os.register_at_fork(after_in_child=_after_fork)
