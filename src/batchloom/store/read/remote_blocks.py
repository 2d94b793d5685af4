"""Blocks of a remote subset: fetched once per node, verified and cached."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

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
    add_to_index,
    bridge_gaps,
    count_interval_blocks,
    group_intervals,
    mask_overlaps,
    merge_intervals,
    remove_from_index,
    split_by_ranges,
    split_intervals,
    subtract_intervals,
)
from batchloom.store.format.block_checksums import compute_block_checksums, parse_root_checksums
from batchloom.store.format.layout import compute_checksum
from batchloom.store.read.remote_files import MAX_FETCH_ATTEMPTS, BlockFetcher, RemoteFileTable

# Maximum blocks of a request (1 MiB), and approximate blocks of a cache file (8 MiB).
_MAX_REQUEST_BLOCKS = 256
_MAX_FILE_BLOCKS = 2048
# Groups in flight at the same time; received parts of unfinished groups stay in memory.
_MAX_CONCURRENT_GROUPS = 8
# Maximum share of unrequested blocks that are fetched to save requests.
_MAX_GAP_SHARE = 0.05
# An epoch uses all lengths and checksums, so gaps of up to 64 KiB are fetched: another request would cost more.
_SMALL_GAP_BLOCKS = 16
# After so many rounds without progress, or so long a wait for other processes, a call fetches all blocks itself.
_MAX_ROUNDS = 8
_POLL_SECONDS = 0.01
_MAX_WAIT_SECONDS = 120.0


@final
class RemoteBlocks:
    """Cached blocks of the files of one remote subset.

    Safe to share between threads and to use after a fork.

    Args:
        fetcher: fetches the blocks.
        files: files of the subset.
        cache: block cache of the node.
        verify: ``first-read``: blocks of other processes are verified when this process first reads
            them; ``full``: at every read; ``off``: only when fetched, and if written before the last boot.
    """

    def __init__(self, fetcher: BlockFetcher, files: RemoteFileTable, cache: BlockCache, verify: str) -> None:
        self.files = files
        self._fetcher = fetcher
        self._cache = cache
        self._verify = verify
        self._root_checksums: dict[int, NDArray[np.uint64]] = {}
        self._keys = np.argsort(files.keys[:, 0], kind="stable")
        self._refused_names: set[str] = set()
        self._reset()

    def after_fork(self) -> None:
        """Reset the state in a forked child; inherited locks may stay locked forever."""
        # Other subsets share these locks, so only a forked child may replace them.
        self._fetcher.after_fork()
        self._cache.after_fork()
        self._reset()

    def _reset(self) -> None:
        self._index = EMPTY_INDEX
        self._cache_files = CacheFileSet(self._cache.limit)
        self._pinned_owners: set[int] = set()
        self._lock = threading.RLock()

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
            index = self._index
            cache_files = self._cache_files.cache_files
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
        damaged_file = self.files.files[damaged_files[0]]
        raise self._fetcher.make_changed_error(damaged_file, 0, damaged_file.size)

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
        is_refreshed = False
        waited_seconds = 0.0
        rounds = 0
        fewest_missing = 1 << 62
        while rounds < _MAX_ROUNDS and waited_seconds < _MAX_WAIT_SECONDS:
            missing = subtract_intervals(intervals, self._index.intervals)
            if not missing.size:
                if (cached_blocks := self._map_verified(intervals, always=always)) is not None:
                    return cached_blocks
                is_refreshed = False
                rounds += 1
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
                    rounds = rounds + (missing_count >= fewest_missing)
                    fewest_missing = min(missing_count, fewest_missing)
                    continue
            time.sleep(_POLL_SECONDS)
            is_refreshed = False
            waited_seconds = waited_seconds + _POLL_SECONDS
        # Cached blocks are evicted as fast as they are found, so this call fetches all of them itself.
        self._fetch(subtract_intervals(intervals, fetched_blocks.index.intervals), fetched_blocks)
        return fetched_blocks

    def _read_verified(
        self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
    ) -> list[NDArray[Any]] | None:
        """Return the views of :meth:`read` if all is mapped and verified, else None."""
        index = self._index
        ends = begins + sizes
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
        cache_files = self._cache_files.cache_files
        arrays = {}
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
        begins = BLOCK_BYTES * intervals[:, 0]
        sizes = self.files.compute_sizes(intervals)
        contents = cached_blocks.view_ranges(begins, sizes, np.dtype(np.uint8))
        damaged_indices = [
            index
            for index, (data, checksums) in enumerate(zip(contents, expected, strict=True))
            if checksums is not None and not np.array_equal(compute_block_checksums(data.data), checksums)
        ]
        return np.array(damaged_indices, np.int64)

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
        starts = []
        stops = []
        heads = set()
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
            root_checksums = parse_root_checksums(head.data, file.checksum, file.entries, file.width)
            if root_checksums is None:
                raise self._fetcher.make_changed_error(file, 0, file.size)
            self._root_checksums[number] = root_checksums
        return self.obtain(merge_intervals(starts, stops)) if starts else CachedBlocks(EMPTY_INDEX, {})

    def _list_expected(self, checksum_blocks: CachedBlocks, intervals: Intervals) -> list[NDArray[np.uint64] | None]:
        """List the checksums of each interval's blocks; None if not verified by blocks."""
        expected_checksums: list[NDArray[np.uint64] | None] = [None] * len(intervals)
        indices = []
        begins = []
        sizes = []
        widths = []
        numbers = self.files.locate_files(intervals).tolist()
        for index, (number, (start, end)) in enumerate(zip(numbers, intervals.tolist(), strict=True)):
            file = self.files.files[number]
            first = start - file.base
            stop = end - file.base
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
                pending.append((group, [self._fetcher.request(*interval) for interval in group.tolist()]))
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
            self._fetcher.receive(future, first, stop, checksums)
            for (first, stop), future, checksums in zip(group.tolist(), futures, expected_checksums, strict=True)
        ]
        numbers = self.files.locate_files(group)
        rows = np.empty(len(group), BLOCK_TABLE_DTYPE)
        rows["low"], rows["high"] = self.files.keys[numbers].T
        rows["first"] = group[:, 0] - self.files.bases[numbers]
        rows["blocks"] = group[:, 1] - group[:, 0]
        name, table, data = self._cache.keep(rows, contents)
        blocks = group[:, 1] - group[:, 0]
        block_offsets = np.cumsum(blocks) - blocks
        is_verified = np.ones(len(group), bool)
        with self._lock:
            owner = self._cache_files.add(CacheFile(name, table, data))
            self._index = add_to_index(self._index, owner, group, block_offsets, is_verified)
            fetched_blocks.index = add_to_index(fetched_blocks.index, owner, group, block_offsets, is_verified)
            fetched_blocks.arrays[owner] = data
            self._pinned_owners.add(owner)
            self._forget(self._cache_files.mark_mapped(owner, self._pinned_owners))
