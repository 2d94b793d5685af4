"""Blocks of a remote subset: fetched once per node, verified and cached.

Blocks are numbered consecutively through all files. Requested, cached and locked blocks are therefore plain
integer intervals. One unused number separates adjacent files.
"""

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import redact_url
from batchloom.core.errors import StoreError
from batchloom.remote import (
    BLOCK_BYTES,
    BLOCK_TABLE_DTYPE,
    EMPTY_INDEX,
    BlockCache,
    CachedBlocks,
    CacheFile,
    CacheFileSet,
    IntArray,
    Intervals,
    RangeError,
    RangeFetcher,
    add_to_index,
    bridge_gaps,
    count_interval_blocks,
    group_intervals,
    make_remote_error,
    mask_overlaps,
    merge_intervals,
    remove_from_index,
    split_by_ranges,
    split_intervals,
    subtract_intervals,
)
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.manifest import Manifest, ShardEntry
from batchloom.store.format.shard_sidecars import (
    COUNTED_ENTRY_BYTES,
    HEADER,
    PAIR_ROW_BYTES,
    PLAIN_ENTRY_BYTES,
    PROVENANCE_ROW_BYTES,
    compute_block_checksums,
    count_entries,
    count_header_bytes,
    parse_root_checksums,
)

# whole: by the checksum of the file; blocks: by one .sums entry each; entries: by the root checksums of a .sums.
CheckMethod = Literal["whole", "blocks", "entries"]


class RemoteStoreFile(NamedTuple):
    """One remote file; header and entries of a ``.sums`` count as two."""

    name: str  # path relative to the store's URL
    size: int  # size in bytes, from the manifest
    checksum: str  # checksum in the manifest, which identifies the content
    check_method: CheckMethod = "whole"  # verification method
    checksum_file: int = -1  # number of the file with its block checksums; -1 if there is none
    width: int = 0  # bytes per checksum entry, for a file verified by blocks
    covered_bytes: int = 0  # for a ``.sums`` header, the size of the checksummed file
    offset: int = 0  # byte offset in the file of that name
    base: int = 0  # number of its first block

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    def locate_blocks(self, first: int, stop: int) -> tuple[int, int]:
        """Return the byte range of blocks; the last block of a file is shorter."""
        return BLOCK_BYTES * (first - self.base), min(BLOCK_BYTES * (stop - self.base), self.size)


@final
class RemoteFileTable:
    """Numbered files of a remote subset.

    Attributes:
        files: all files.
        lengths: file number of the lengths of each layer.
        removed: number of the file of removed documents; None if there is none.
        shard_files: file numbers of each shard by suffix.
        bases: first block of each file, ascending, int64.
        sizes: size of each file in bytes, int64.
        by_blocks: True for files verified by blocks, bool.
        dense: 1 for lengths and checksums, whose few bytes serve many tokens; 0 for others.
        keys: low and high half of the cache key of each file, uint64 [N, 2].
    """

    def __init__(self, manifest: Manifest, subset: str) -> None:
        self.files: list[RemoteStoreFile] = []
        self._next = 0
        entry = manifest.subsets[subset]
        self.lengths: list[int] = []
        for name, checksum_name, layer in zip(
            entry.length_files, entry.length_checksum_files, entry.all_layers, strict=True
        ):
            lengths = RemoteStoreFile(f"{subset}/{name}", 4 * layer.documents, layer.lengths)
            self.lengths.append(
                self._add_with_checksums(lengths, f"{subset}/{checksum_name}", layer.sums, COUNTED_ENTRY_BYTES)
            )
        self.removed: int | None = None
        if entry.removed:
            size = HEADER.size + 8 * entry.removed.documents
            self.removed = self._add(RemoteStoreFile(f"{subset}/{entry.removed_file}", size, entry.removed.file))
        self.shard_files = [self._add_shard(f"{subset}/{shard.name}", shard) for shard in entry.shards]
        self.bases = np.array([file.base for file in self.files], np.int64)
        self.by_blocks = np.array([file.check_method == "blocks" for file in self.files], bool)
        dense = [file.check_method == "entries" or file.width == COUNTED_ENTRY_BYTES for file in self.files]
        self.dense = np.array(dense, np.int64)
        self.sizes = np.array([file.size for file in self.files], np.int64)
        digests = [int(file.checksum, 16) for file in self.files]
        # One flipped bit separates the entries of a .sums from its header, which has the same checksum.
        flips = [int(file.check_method == "entries") for file in self.files]
        keys = [(digest & (1 << 64) - 1 ^ flip, digest >> 64) for digest, flip in zip(digests, flips, strict=True)]
        self.keys = np.array(keys, np.uint64).reshape(-1, 2)

    def _add_shard(self, stem: str, shard: ShardEntry) -> dict[str, int]:
        sizes = {
            ".bin": shard.bytes,
            ".mask": HEADER.size + (shard.tokens + 7) // 8,
            ".weights": HEADER.size + shard.tokens,
            ".docs": HEADER.size + PROVENANCE_ROW_BYTES * shard.documents,
            ".pairs": HEADER.size + PAIR_ROW_BYTES * shard.documents,
            ".fields": shard.fields_bytes or 0,
            ".parquet": shard.parquet_bytes or 0,
            ".media": shard.media_bytes or 0,
            ".blobs": shard.blobs_bytes or 0,
        }
        checksum_suffixes = {".bin": ".sums", ".blobs": ".blobsums"}
        numbers = {}
        for suffix, size in sizes.items():
            checksum = shard.checksums.get(suffix)
            if checksum is None:
                continue
            file = RemoteStoreFile(f"{stem}{suffix}", size, checksum)
            if suffix in checksum_suffixes:
                sums = checksum_suffixes[suffix]
                numbers[suffix] = self._add_with_checksums(
                    file, f"{stem}{sums}", shard.checksums[sums], PLAIN_ENTRY_BYTES
                )
            else:
                numbers[suffix] = self._add(file)
        return numbers

    def _add_with_checksums(self, file: RemoteStoreFile, name: str, checksum: str, width: int) -> int:
        """Add a file and its ``.sums``."""
        size = count_header_bytes(file.size, width)
        head = self._add(RemoteStoreFile(name, size, checksum, width=width, covered_bytes=file.size))
        entries_size = count_entries(file.size) * width
        entries = self._add(RemoteStoreFile(name, entries_size, checksum, "entries", head, offset=size))
        return self._add(file._replace(check_method="blocks", checksum_file=entries, width=width))

    def _add(self, file: RemoteStoreFile) -> int:
        self.files.append(file._replace(base=self._next))
        self._next += file.blocks + 1
        return len(self.files) - 1

    def locate_files(self, intervals: Intervals) -> NDArray[np.int64]:
        return self.bases.searchsorted(intervals[:, 0], side="right") - 1

    def round_intervals(self, intervals: Intervals, unit: int) -> Intervals:
        """Extend intervals to multiples of ``unit`` blocks within each file."""
        numbers = self.locate_files(intervals)
        bases = self.bases[numbers]
        ends = bases + np.array([self.files[number].blocks for number in numbers.tolist()], np.int64)
        starts = bases + (intervals[:, 0] - bases) // unit * unit
        stops = bases - (bases - intervals[:, 1]) // unit * unit
        return merge_intervals(starts, np.minimum(stops, ends))

    def list_intervals(self, numbers: Iterable[int]) -> Intervals:
        files = [self.files[number] for number in numbers]
        return merge_intervals([file.base for file in files], [file.base + file.blocks for file in files])


# Maximum blocks of a request (1 MiB), and approximate blocks of a cache file (8 MiB).
_MAX_REQUEST_BLOCKS, _MAX_FILE_BLOCKS = 256, 2048
# Groups in flight at the same time; received parts of unfinished groups stay in memory.
_MAX_CONCURRENT_GROUPS = 8
# Maximum share of unrequested blocks that are fetched to save requests.
_MAX_GAP_SHARE = 0.05
# An epoch uses all lengths and checksums, so gaps of up to 64 KiB are fetched: another request would cost more.
_SMALL_GAP_BLOCKS = 16
# Attempts to fetch a block whose content does not match its checksum.
MAX_FETCH_ATTEMPTS = 3
# After so many rounds without progress, or so long a wait for other processes, a call fetches all blocks itself.
_MAX_ROUNDS, _POLL_SECONDS, _MAX_WAIT_SECONDS = 8, 0.01, 120.0


@final
class RemoteBlocks:
    """Cached blocks of the files of one remote subset.

    Safe to share between threads and to use after a fork.

    Args:
        ranges: fetches byte ranges of the store's files.
        files: files of the subset.
        cache: block cache of the node.
        verify: ``first-read``: blocks of other processes are verified when this process first reads
            them; ``full``: at every read; ``off``: only when fetched, and if written before the last boot.
    """

    def __init__(self, ranges: RangeFetcher, files: RemoteFileTable, cache: BlockCache, verify: str) -> None:
        self.files, self._ranges, self._cache, self._verify = files, ranges, cache, verify
        self._root_checksums: dict[int, NDArray[np.uint64]] = {}
        self._keys = np.argsort(files.keys[:, 0], kind="stable")
        self._bases: list[int] = files.bases.tolist()
        self._refused_names: set[str] = set()
        self._reset()

    def after_fork(self) -> None:
        """Reset the state in a forked child; inherited locks may stay locked forever."""
        # Other subsets share these locks, so only a forked child may replace them.
        self._ranges.after_fork()
        self._cache.after_fork()
        self._reset()

    def _reset(self) -> None:
        self._index, self._cache_files = EMPTY_INDEX, CacheFileSet(self._cache.limit)
        self._pinned_owners: set[int] = set()
        self._lock = threading.RLock()

    @property
    def received(self) -> int:
        return self._ranges.received

    def read(self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]) -> list[NDArray[Any]]:
        """Read byte ranges of files, as views of cached blocks.

        A range begins at 4096 times the first block of its file, plus its offset in the file.
        """
        views = None if self._verify == "full" else self._read_verified(begins, sizes, dtype)
        if views is not None:
            return views
        first = begins // BLOCK_BYTES
        intervals = merge_intervals(first, np.where(sizes > 0, -(-(begins + sizes) // BLOCK_BYTES), first))
        cached_blocks = self.obtain(intervals, always=self._verify == "full")
        return cached_blocks.view_ranges(begins, sizes, dtype)

    def are_cached(self, numbers: Iterable[int]) -> bool:
        """Return whether all blocks of some files are mapped and verified."""
        # Another thread may remove the files of an index that was read without the lock.
        with self._lock:
            index, cache_files = self._index, self._cache_files.cache_files
            if not index.sound.all() or subtract_intervals(self.files.list_intervals(numbers), index.intervals).size:
                return False
            return all(cache_files[owner].data is not None for owner in np.unique(index.owners).tolist())

    def read_files(self, numbers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """Return contiguous copies of files, verified as files or by blocks."""
        file_numbers = list(numbers)
        for tries in range(1, MAX_FETCH_ATTEMPTS + 1):
            cached_blocks = self.obtain(self.files.list_intervals(file_numbers))
            files = [self.files.files[number] for number in file_numbers]
            begins = np.array([BLOCK_BYTES * file.base for file in files])
            sizes = np.array([file.size for file in files])
            contents = cached_blocks.view_ranges(begins, sizes, np.dtype(np.uint8))
            damaged_files = [
                number
                for number, data in zip(file_numbers, contents, strict=True)
                if self.files.files[number].check_method == "whole"
                and compute_checksum(data.data) != self.files.files[number].checksum
            ]
            if not damaged_files:
                return contents
            if tries == MAX_FETCH_ATTEMPTS:
                break
            self._discard(self.files.list_intervals(damaged_files))
        raise self._make_changed_error(self.files.files[damaged_files[0]], 0, self.files.files[damaged_files[0]].size)

    def obtain(self, intervals: Intervals, *, always: bool = False) -> CachedBlocks:
        """Return blocks, fetching those that no process of the node has cached."""
        fetched_blocks = CachedBlocks(EMPTY_INDEX, {})
        try:
            return self._obtain(intervals, fetched_blocks, always=always)
        finally:
            with self._lock:
                self._pinned_owners -= fetched_blocks.arrays.keys()

    def _obtain(self, intervals: Intervals, fetched_blocks: CachedBlocks, *, always: bool) -> CachedBlocks:
        """Return cached blocks; add those that this call fetches to ``fetched_blocks``."""
        is_refreshed, waited_seconds, rounds, fewest_missing = False, 0.0, 0, 1 << 62
        while rounds < _MAX_ROUNDS and waited_seconds < _MAX_WAIT_SECONDS:
            missing = subtract_intervals(intervals, self._index.intervals)
            if not missing.size:
                if (cached_blocks := self._map_verified(intervals, always=always)) is not None:
                    return cached_blocks
                is_refreshed, rounds = False, rounds + 1
                continue
            if not is_refreshed:
                self._refresh_index()
                is_refreshed = True
                continue
            with self._cache.lock_for_fetch(split_intervals(missing, _MAX_REQUEST_BLOCKS)) as locked_intervals:
                if locked_intervals.size:
                    # Another process may have fetched the blocks before this one locked them.
                    self._refresh_index()
                    requested_intervals = merge_intervals(locked_intervals[:, 0], locked_intervals[:, 1])
                    self._fetch(subtract_intervals(requested_intervals, self._index.intervals), fetched_blocks)
                    # Processes that need the same blocks share the work, so only a round without progress counts.
                    missing_count = count_interval_blocks(subtract_intervals(intervals, self._index.intervals))
                    rounds, fewest_missing = (
                        rounds + (missing_count >= fewest_missing),
                        min(missing_count, fewest_missing),
                    )
                    continue
            time.sleep(_POLL_SECONDS)
            is_refreshed, waited_seconds = False, waited_seconds + _POLL_SECONDS
        # Cached blocks are evicted as fast as they are found, so this call fetches all of them itself.
        self._fetch(subtract_intervals(intervals, fetched_blocks.index.intervals), fetched_blocks)
        return fetched_blocks

    def _read_verified(
        self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
    ) -> list[NDArray[Any]] | None:
        """Return the views of :meth:`read` if all is mapped and verified, else None."""
        index, ends = self._index, begins + sizes
        if not begins.size or not index.starts.size:
            return None
        first_rows, last_rows = (
            index.starts.searchsorted(positions // BLOCK_BYTES, side="right") - 1
            for positions in (begins, np.maximum(ends - 1, begins))
        )
        is_mapped = (index.runs[first_rows] == index.runs[last_rows]) & (ends <= index.ends[last_rows])
        if first_rows.min() < 0 or not is_mapped.all():
            return None
        row_counts = last_rows - first_rows + 1
        rows = np.repeat(first_rows - np.cumsum(row_counts) + row_counts, row_counts) + np.arange(row_counts.sum())
        if not index.sound[rows].all():
            return None
        cache_files, arrays = self._cache_files.cache_files, {}
        for owner in set(index.owners[rows].tolist()):
            cache_file = cache_files.get(owner)
            data = cache_file.data if cache_file is not None else None
            if cache_file is None or data is None:
                return None
            cache_file.used = True
            arrays[owner] = data
        return CachedBlocks(index, arrays).view_ranges(begins, sizes, dtype)

    def _map_verified(self, intervals: Intervals, *, always: bool) -> CachedBlocks | None:
        """Map and verify indexed blocks; None if some are missing or damaged."""
        with self._lock:
            index = self._index
            # Another thread may have dropped blocks from the index meanwhile.
            if subtract_intervals(intervals, index.intervals).size:
                return None
            rows, subintervals = split_by_ranges(intervals, index.starts, index.stops)
            arrays = self._map_cache_files(set(index.owners[rows].tolist()))
            if arrays is None:
                return None
        cached_blocks = CachedBlocks(index, arrays)
        if not always:
            # Adjacent blocks are read soon, and many small checks cost more than their bytes.
            rows = np.unique(rows[~index.sound[rows]])
            subintervals = index.intervals[rows]
        if not rows.size:
            return cached_blocks
        damaged_rows = self._find_damaged(cached_blocks, subintervals)
        if damaged_rows.size:
            self._discard(subintervals[damaged_rows])
            return None
        if not always:
            index.sound[rows] = True
        return cached_blocks

    def _find_damaged(self, cached_blocks: CachedBlocks, intervals: Intervals) -> NDArray[np.int64]:
        """Return the indices of intervals that do not match their checksums."""
        expected = self._list_expected(self._load_checksums(intervals), intervals)
        begins, sizes = BLOCK_BYTES * intervals[:, 0], self._compute_sizes(intervals)
        contents = cached_blocks.view_ranges(begins, sizes, np.dtype(np.uint8))
        damaged_indices = [
            index
            for index, (data, checksums) in enumerate(zip(contents, expected, strict=True))
            if checksums is not None and not np.array_equal(compute_block_checksums(data.data), checksums)
        ]
        return np.array(damaged_indices, np.int64)

    def _compute_sizes(self, intervals: Intervals) -> NDArray[np.int64]:
        """Return the sizes of intervals in bytes; the last block of a file is shorter."""
        numbers = self.files.locate_files(intervals)
        ends = BLOCK_BYTES * self.files.bases[numbers] + self.files.sizes[numbers]
        sizes: NDArray[np.int64] = np.minimum(BLOCK_BYTES * intervals[:, 1], ends) - BLOCK_BYTES * intervals[:, 0]
        return sizes

    def _map_cache_files(self, owners: set[int]) -> dict[int, NDArray[np.uint8]] | None:
        """Map cache files and return their bytes; the caller holds the lock.

        Returns None, and forgets the file, if one is missing.
        """
        arrays: dict[int, NDArray[np.uint8]] = {}
        for owner in owners:
            cache_file = self._cache_files.cache_files.get(owner)
            if cache_file is None:
                return None
            data = cache_file.data
            if data is None and cache_file.name is not None:
                data = cache_file.data = self._cache.map(cache_file.name, cache_file.table)
            if data is None:
                self._forget({owner})
                return None
            arrays[owner] = data
        for owner in owners:
            self._forget(self._cache_files.mark_mapped(owner, self._pinned_owners | owners))
        return arrays

    def _forget(self, owners: set[int]) -> None:
        if owners:
            for owner in owners:
                self._cache_files.remove(owner)
            self._index = remove_from_index(self._index, owners)

    def _discard(self, intervals: Intervals) -> None:
        """Delete the cache files that hold damaged blocks."""
        with self._lock:
            is_overlapping = mask_overlaps(self._index.intervals, intervals)
            owners = set(self._index.owners[is_overlapping].tolist())
            for owner in owners:
                name = self._cache_files.cache_files[owner].name
                if name is not None:
                    self._refused_names.add(name)
                    self._cache.drop(name)
            self._forget(owners)

    def _refresh_index(self) -> None:
        """Update the index with the cache files of other processes."""
        names = self._cache.list_names()
        with self._lock:
            numbers_by_name = self._cache_files.names
            missing_numbers = {
                number
                for name, number in numbers_by_name.items()
                if name not in names and self._cache_files.cache_files[number].data is None
            }
            self._forget(missing_numbers)
            for name in sorted(names - numbers_by_name.keys() - self._refused_names):
                table = self._cache.read_table(name)
                if table is not None:
                    self._add_cache_file(CacheFile(name, table, None))

    def _add_cache_file(self, cache_file: CacheFile) -> None:
        """Index the blocks of another process's cache file that belong to these files."""
        rows = cache_file.table.rows
        blocks = rows["blocks"].astype(np.int64)
        block_offsets = np.cumsum(blocks) - blocks
        keys = self.files.keys
        key_rows = np.minimum(keys[self._keys, 0].searchsorted(rows["low"]), len(keys) - 1)
        numbers = self._keys[key_rows]
        is_listed = (keys[numbers, 0] == rows["low"]) & (keys[numbers, 1] == rows["high"])
        starts = self.files.bases[numbers] + rows["first"].astype(np.int64)
        intervals = np.stack([starts, starts + blocks], axis=1)[is_listed]
        is_verified = np.zeros(len(intervals), bool)
        if self._verify == "off" and cache_file.table.written_this_boot:
            # Checksum entries are always verified, even when verification is off.
            is_verified = self.files.by_blocks[numbers[is_listed]]
        owner = self._cache_files.add(cache_file)
        self._index = add_to_index(self._index, owner, intervals, block_offsets[is_listed], is_verified)

    def _load_checksums(self, intervals: Intervals) -> CachedBlocks:
        """Return the verified checksum entries of blocks."""
        files = self.files.files
        starts, stops, heads = [], [], set()
        for number, (first, stop) in zip(self.files.locate_files(intervals).tolist(), intervals.tolist(), strict=True):
            file = files[number]
            if file.check_method == "blocks":
                begin = BLOCK_BYTES * files[file.checksum_file].base
                starts.append((begin + (first - file.base) * file.width) // BLOCK_BYTES)
                stops.append(-(-(begin + (stop - file.base) * file.width) // BLOCK_BYTES))
            elif file.check_method == "entries" and file.checksum_file not in self._root_checksums:
                heads.add(file.checksum_file)
        for number, head in zip(heads, self.read_files(heads) if heads else [], strict=True):
            file = files[number]
            root_checksums = parse_root_checksums(head.data, file.checksum, file.covered_bytes, file.width)
            if root_checksums is None:
                raise self._make_changed_error(file, 0, file.size)
            self._root_checksums[number] = root_checksums
        return self.obtain(merge_intervals(starts, stops)) if starts else CachedBlocks(EMPTY_INDEX, {})

    def _list_expected(self, checksum_blocks: CachedBlocks, intervals: Intervals) -> list[NDArray[np.uint64] | None]:
        """List the checksums of each interval's blocks; None if not verified by blocks."""
        expected_checksums: list[NDArray[np.uint64] | None] = [None] * len(intervals)
        indices, begins, sizes, widths = [], [], [], []
        numbers = self.files.locate_files(intervals).tolist()
        for index, (number, (start, end)) in enumerate(zip(numbers, intervals.tolist(), strict=True)):
            file = self.files.files[number]
            first, stop = start - file.base, end - file.base
            if file.check_method == "entries":
                expected_checksums[index] = self._root_checksums[file.checksum_file][first:stop]
            elif file.check_method == "blocks":
                indices.append(index)
                widths.append(file.width // 8)
                begins.append(BLOCK_BYTES * self.files.files[file.checksum_file].base + first * file.width)
                sizes.append((stop - first) * file.width)
        views = checksum_blocks.view_ranges(np.array(begins, np.int64), np.array(sizes, np.int64), np.dtype("<u8"))
        for index, width, view in zip(indices, widths, views, strict=True):
            expected_checksums[index] = view[::width]
        return expected_checksums

    def _fetch(self, intervals: Intervals, fetched_blocks: CachedBlocks) -> None:
        """Fetch, verify and cache blocks, with a bounded number in flight."""
        if not intervals.size:
            return
        numbers = self.files.locate_files(intervals)
        bridged_intervals = bridge_gaps(
            intervals, numbers, _MAX_GAP_SHARE, _SMALL_GAP_BLOCKS * self.files.dense[numbers]
        )
        requested_intervals = split_intervals(bridged_intervals, _MAX_REQUEST_BLOCKS)
        checksum_blocks = self._load_checksums(requested_intervals)
        pending: deque[tuple[Intervals, list[Future[bytes]]]] = deque()
        try:
            for group in group_intervals(requested_intervals, _MAX_FILE_BLOCKS):
                pending.append((group, [self._request_blocks(*interval) for interval in group.tolist()]))
                if len(pending) == _MAX_CONCURRENT_GROUPS:
                    self._store_group(*pending[0], checksum_blocks, fetched_blocks)
                    pending.popleft()
            while pending:
                self._store_group(*pending[0], checksum_blocks, fetched_blocks)
                pending.popleft()
        finally:
            for _, futures in pending:
                for future in futures:
                    future.cancel()

    def _request_blocks(self, first: int, stop: int) -> Future[bytes]:
        file = self._find_file(first)
        start, end = file.locate_blocks(first, stop)
        return self._ranges.submit(file.name, file.offset + start, file.offset + end, file.offset + file.size)

    def _find_file(self, block: int) -> RemoteStoreFile:
        return self.files.files[bisect_right(self._bases, block) - 1]

    def _store_group(
        self,
        group: Intervals,
        futures: list[Future[bytes]],
        checksum_blocks: CachedBlocks,
        fetched_blocks: CachedBlocks,
    ) -> None:
        """Verify and cache the blocks received for a group."""
        expected_checksums = self._list_expected(checksum_blocks, group)
        contents = [
            self._receive_verified(future, first, stop, checksums)
            for (first, stop), future, checksums in zip(group.tolist(), futures, expected_checksums, strict=True)
        ]
        numbers = self.files.locate_files(group)
        rows = np.empty(len(group), BLOCK_TABLE_DTYPE)
        rows["low"], rows["high"] = self.files.keys[numbers].T
        rows["first"] = group[:, 0] - self.files.bases[numbers]
        rows["blocks"] = group[:, 1] - group[:, 0]
        name, table, data = self._cache.keep(rows, contents)
        blocks = group[:, 1] - group[:, 0]
        block_offsets, is_verified = np.cumsum(blocks) - blocks, np.ones(len(group), bool)
        with self._lock:
            owner = self._cache_files.add(CacheFile(name, table, data))
            self._index = add_to_index(self._index, owner, group, block_offsets, is_verified)
            fetched_blocks.index = add_to_index(fetched_blocks.index, owner, group, block_offsets, is_verified)
            fetched_blocks.arrays[owner] = data
            self._pinned_owners.add(owner)
            self._forget(self._cache_files.mark_mapped(owner, self._pinned_owners))

    def _receive_verified(
        self,
        future: Future[bytes],
        first: int,
        stop: int,
        expected_checksums: NDArray[np.uint64] | None,
    ) -> bytes:
        file = self._find_file(first)
        for _ in range(MAX_FETCH_ATTEMPTS):
            try:
                data = future.result()
            except RangeError as error:
                self._refuse(error)
            if expected_checksums is None or np.array_equal(compute_block_checksums(data), expected_checksums):
                return data
            future = self._request_blocks(first, stop)
        raise self._make_changed_error(file, *file.locate_blocks(first, stop))

    def _refuse(self, error: RangeError) -> NoReturn:
        url = f"{self._ranges.url}/{error.name}"
        if error.fault.kind == "missing":
            raise StoreError(
                f"{redact_url(url)} is missing: the manifest of its store names it. Restore it from a copy; the run "
                "continues from its last checkpoint."
            ) from None
        if error.fault.kind == "refused":
            raise StoreError(
                f"{redact_url(url)} does not match the manifest of its store: {error.fault.description}. It was "
                "truncated or rewritten; restore it from a copy."
            ) from None
        raise make_remote_error(error.fault, url) from None

    def _make_changed_error(self, file: RemoteStoreFile, start: int, stop: int) -> StoreError:
        file_url = redact_url(f"{self._ranges.url}/{file.name}")
        return StoreError(
            f"{file_url}: bytes {file.offset + start:,} to {file.offset + stop:,} do not match the checksums of its "
            f"store ({MAX_FETCH_ATTEMPTS} tries); it was changed or damaged. Restore it from a copy; the run continues "
            "from its last checkpoint."
        )
