"""Index of a process's cached blocks, and arithmetic on block intervals.

Intervals are int64 [N, 2]: first block and last block + 1 of each, ascending and disjoint.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote.block_cache import BLOCK_BYTES, BlockTable

Intervals = NDArray[np.int64]

NO_INTERVALS: Intervals = np.empty((0, 2), np.int64)


def merge_intervals(starts: Any, stops: Any) -> Intervals:
    """Merge block ranges, in any order and overlapping, into intervals."""
    starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    if not starts.size:
        return NO_INTERVALS
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], ends[last]], axis=1)


def subtract_intervals(intervals: Intervals, subtracted: Intervals) -> Intervals:
    """Return the blocks of ``intervals`` that are not in ``subtracted``."""
    overlapping = subtracted[mask_overlaps(subtracted, intervals)]
    if not overlapping.size or not intervals.size:
        return intervals
    points = np.concatenate([intervals[:, 0], intervals[:, 1], overlapping[:, 0], overlapping[:, 1]])
    begins, ends = np.ones(len(intervals), np.int64), -np.ones(len(intervals), np.int64)
    least = 2 * np.ones(len(overlapping), np.int64)
    order = np.argsort(points, kind="stable")
    # The state is 1 in ``intervals`` alone, 2 in ``subtracted`` alone and 3 in both.
    state = np.cumsum(np.concatenate([begins, ends, least, -least])[order])[:-1]
    points = points[order]
    is_remaining = state == 1
    return merge_intervals(points[:-1][is_remaining], points[1:][is_remaining])


def split_by_ranges(intervals: Intervals, starts: Any, stops: Any) -> tuple[NDArray[np.int64], Intervals]:
    """Split intervals at range boundaries; return range numbers and parts.

    Args:
        intervals: intervals that the ranges cover.
        starts: first block of each range, ascending.
        stops: last block + 1 of each range.
    """
    first = starts.searchsorted(intervals[:, 0], side="right") - 1
    counts = starts.searchsorted(intervals[:, 1], side="left") - first
    rows = np.repeat(first, counts)
    rows += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(np.repeat(intervals[:, 0], counts), starts[rows])
    ends = np.minimum(np.repeat(intervals[:, 1], counts), stops[rows])
    return rows, np.stack([begins, ends], axis=1)


def mask_overlaps(intervals: Intervals, other_intervals: Intervals) -> NDArray[np.bool_]:
    """Return, for each of ``intervals``, whether it overlaps ``other_intervals``."""
    first = intervals[:, 1].searchsorted(other_intervals[:, 0], side="right")
    stop = intervals[:, 0].searchsorted(other_intervals[:, 1], side="left")
    marks = np.zeros(len(intervals) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, np.maximum(stop, first), -1)
    overlaps: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return overlaps


def bridge_gaps(intervals: Intervals, files: NDArray[np.int64], share: float, always: NDArray[np.int64]) -> Intervals:
    """Fill the smallest gaps between intervals, since requests cost more than blocks.

    Args:
        intervals: requested intervals.
        files: file number of each interval; gaps between files are not filled.
        share: maximum number of blocks in filled gaps, as a share of the requested blocks.
        always: for each interval, the size in blocks up to which the gap after it is always filled.
    """
    if len(intervals) < 2:
        return intervals
    gaps = intervals[1:, 0] - intervals[:-1, 1]
    in_same_file = files[1:] == files[:-1]
    small_gaps = np.flatnonzero(in_same_file & (gaps <= always[:-1]))
    candidates = np.flatnonzero(in_same_file & (gaps > always[:-1]))
    candidates = candidates[np.argsort(gaps[candidates], kind="stable")]
    allowed = share * float((intervals[:, 1] - intervals[:, 0]).sum())
    bridged_gaps = np.concatenate([small_gaps, candidates[np.cumsum(gaps[candidates]) <= allowed]])
    return merge_intervals(
        np.concatenate([intervals[:, 0], intervals[bridged_gaps, 1]]),
        np.concatenate([intervals[:, 1], intervals[bridged_gaps + 1, 0]]),
    )


def split_intervals(intervals: Intervals, max_blocks: int) -> Intervals:
    """Split intervals into parts of at most ``max_blocks`` blocks, which may touch."""
    sizes = intervals[:, 1] - intervals[:, 0]
    part_counts = -(-sizes // max_blocks)
    starts = np.repeat(intervals[:, 0], part_counts)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(part_counts) - part_counts, part_counts)
    starts = starts + number * max_blocks
    return np.stack([starts, np.minimum(starts + max_blocks, np.repeat(intervals[:, 1], part_counts))], axis=1)


def group_intervals(intervals: Intervals, max_blocks: int) -> list[Intervals]:
    """Group intervals, in order, into groups of about ``max_blocks`` blocks."""
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    bounds = np.flatnonzero(np.diff((ends - 1) // max_blocks)) + 1
    return [group for group in np.split(intervals, bounds) if len(group)]


def count_interval_blocks(intervals: Intervals) -> int:
    """Return the total number of blocks in intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


IntArray = NDArray[np.int64]

# Each mapping costs a file descriptor, and a deleted file uses disk space while it is mapped.
_MAX_MAPPED_FILES, _MAX_MAPPED_BYTES = 256, 2 << 30
# Blocks that could not be written to disk take memory.
_MAX_MEMORY_BYTES = 256 << 20


@final
class CacheFile:
    """Block file that a process knows.

    Attributes:
        name: name in the cache; None if the blocks are only in memory.
        table: table of the file.
        data: blocks, uint8; None while the file is not mapped.
        used: whether the file was read since the last eviction; set without the lock, so it only orders the files.
    """

    __slots__ = ("data", "name", "table", "used")

    def __init__(self, name: str | None, table: BlockTable, data: NDArray[np.uint8] | None) -> None:
        self.name, self.table, self.data, self.used = name, table, data, False


class BlockIndex(NamedTuple):
    """Cached intervals, disjoint and ascending; arrays but ``sound`` are immutable.

    Attributes:
        starts: first block of each, int64.
        stops: last block + 1 of each, int64.
        block_offsets: block offset of each in its cache file, int64.
        owners: number of the cache file of each, int64.
        sound: whether this process has verified all blocks of each, bool.
        runs: number of gaps before each, int64; intervals with the same number are contiguous.
        ends: end of each in bytes, int64; 4096 times its ``stops``.
        shifts: number to add to a byte position for the byte position in the cache file, int64.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    block_offsets: NDArray[np.int64]
    owners: NDArray[np.int64]
    sound: NDArray[np.bool_]
    runs: NDArray[np.int64]
    ends: NDArray[np.int64]
    shifts: NDArray[np.int64]

    @property
    def stored_columns(self) -> tuple[NDArray[Any], ...]:
        """Columns from which the others are computed."""
        return self.starts, self.stops, self.block_offsets, self.owners, self.sound

    @property
    def intervals(self) -> Intervals:
        """First block and last block + 1 of each interval, int64 [N, 2]."""
        return np.stack([self.starts, self.stops], axis=1)


_NO_INTS = np.empty(0, np.int64)
EMPTY_INDEX = BlockIndex(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, bool), _NO_INTS, _NO_INTS, _NO_INTS)


def _make_index(*columns: NDArray[Any]) -> BlockIndex:
    starts, stops, block_offsets, owners, sound = columns
    runs = np.zeros(len(starts), np.int64)
    np.cumsum(starts[1:] != stops[:-1], out=runs[1:])
    return BlockIndex(
        starts,
        stops,
        block_offsets,
        owners,
        sound,
        runs,
        BLOCK_BYTES * stops,
        BLOCK_BYTES * (block_offsets - starts),
    )


def add_to_index(
    index: BlockIndex,
    owner: int,
    intervals: Intervals,
    block_offsets: NDArray[np.int64],
    sound: NDArray[np.bool_],
) -> BlockIndex:
    """Return an index with one more cache file; blocks already known keep their file.

    Args:
        index: existing index.
        owner: number of the cache file.
        intervals: intervals of the file, disjoint, in any order.
        block_offsets: block offset of each interval in the file.
        sound: whether the blocks of each interval are verified.
    """
    order = np.argsort(intervals[:, 0], kind="stable")
    intervals, block_offsets, sound = intervals[order], block_offsets[order], sound[order]
    new_intervals = subtract_intervals(intervals, index.intervals)
    if not new_intervals.size:
        return index
    containing_rows = intervals[:, 0].searchsorted(new_intervals[:, 0], side="right") - 1
    insert_positions = index.starts.searchsorted(new_intervals[:, 0])
    new_offsets = block_offsets[containing_rows] + new_intervals[:, 0] - intervals[containing_rows, 0]
    new_columns = (*new_intervals.T, new_offsets, owner, sound[containing_rows])
    columns = zip(index.stored_columns, new_columns, strict=True)
    return _make_index(*(np.insert(column, insert_positions, new) for column, new in columns))


def remove_from_index(index: BlockIndex, owners: set[int]) -> BlockIndex:
    """Return an index without the cache files ``owners``."""
    is_remaining = ~np.isin(index.owners, list(owners))
    return _make_index(*(column[is_remaining] for column in index.stored_columns))


@final
class CacheFileSet:
    """Cache files of an index by number; count and size of mapped ones are bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, _MAX_MAPPED_BYTES)
        self._mapped_bytes = 0
        self.cache_files: dict[int, CacheFile] = {}
        self.names: dict[str, int] = {}
        self._mapped_numbers: OrderedDict[int, None] = OrderedDict()
        self._memory_bytes = 0
        self._next_number = 0

    def add(self, cache_file: CacheFile) -> int:
        """Add a cache file and return its number."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.cache_files[number] = cache_file
        if cache_file.name is not None:
            self.names[cache_file.name] = number
        return number

    def remove(self, number: int) -> None:
        cache_file = self.cache_files.pop(number, None)
        if cache_file is None:
            return
        if cache_file.name is not None:
            self.names.pop(cache_file.name, None)
        self._unmap(number, cache_file)

    def _unmap(self, number: int, cache_file: CacheFile) -> None:
        if self._mapped_numbers.pop(number, 0) is None:
            self._mapped_bytes -= cache_file.table.size
            if cache_file.name is None:
                self._memory_bytes -= cache_file.table.size
        cache_file.data = None

    def mark_mapped(self, number: int, pinned_owners: set[int]) -> set[int]:
        """Register a mapped cache file and unmap old ones.

        Return the unmapped files that were only in memory, which must be removed.

        Args:
            number: number of the cache file.
            pinned_owners: cache files that a reader waits for, which are not unmapped.
        """
        cache_file = self.cache_files[number]
        if number not in self._mapped_numbers:
            self._mapped_numbers[number] = None
            self._mapped_bytes += cache_file.table.size
            if cache_file.name is None:
                self._memory_bytes += cache_file.table.size
        self._mapped_numbers.move_to_end(number)
        removed_numbers: set[int] = set()
        if not self._exceeds_limits():
            return removed_numbers
        # Recently read files are evicted last.
        used_numbers = [other for other in self._mapped_numbers if other != number and self.cache_files[other].used]
        for other in (*used_numbers, number):
            self.cache_files[other].used = False
            self._mapped_numbers.move_to_end(other)
        evictable_numbers = [other for other in self._mapped_numbers if other not in pinned_owners and other != number]
        for oldest_number in evictable_numbers:
            if not self._exceeds_limits():
                break
            oldest_file = self.cache_files[oldest_number]
            self._unmap(oldest_number, oldest_file)
            if oldest_file.name is None:
                removed_numbers.add(oldest_number)
        return removed_numbers

    def _exceeds_limits(self) -> bool:
        too_many_mapped = len(self._mapped_numbers) > _MAX_MAPPED_FILES or self._mapped_bytes > self._limit
        return too_many_mapped or self._memory_bytes > _MAX_MEMORY_BYTES


@dataclass(slots=True)
class CachedBlocks:
    """Index with the bytes of the requested cache files, valid while it exists."""

    index: BlockIndex
    arrays: dict[int, NDArray[np.uint8]]


def view_ranges(
    cached_blocks: CachedBlocks, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
) -> list[NDArray[Any]]:
    """Return byte ranges as arrays: views, or copies if they span several intervals.

    Args:
        cached_blocks: blocks that cover the ranges.
        begins: byte position of each range, int64 [N]: 4096 times its file's first block, plus the offset in the file.
        sizes: size of each range in bytes, int64 [N].
        dtype: dtype of the items; begins and sizes are multiples of its size.
    """
    index, last = cached_blocks.index, (begins + np.maximum(sizes, 1) - 1) // BLOCK_BYTES
    if not begins.size or not index.starts.size:
        return [np.empty(0, dtype) for _ in range(begins.size)]
    rows = index.starts.searchsorted(begins // BLOCK_BYTES, side="right") - 1
    split_ranges = np.flatnonzero((rows < 0) | (index.stops[rows] <= last) | (sizes == 0))
    arrays = cached_blocks.arrays
    if split_ranges.size:
        # The row may belong to a cache file that was not requested. These ranges are joined below.
        arrays = {**dict.fromkeys(index.owners[rows[split_ranges]].tolist(), np.empty(0, np.uint8)), **arrays}
    views = slice_ranges(index, arrays, rows, begins, sizes, dtype)
    for number in split_ranges.tolist():
        views[number] = join_range(cached_blocks, int(begins[number]), int(sizes[number])).view(dtype)
    return views


def slice_ranges(
    index: BlockIndex,
    arrays: dict[int, NDArray[np.uint8]],
    rows: IntArray,
    begins: IntArray,
    sizes: IntArray,
    dtype: np.dtype[np.generic],
) -> list[NDArray[Any]]:
    """Return byte ranges as views, each inside the interval at its index in ``rows``."""
    shift = dtype.itemsize.bit_length() - 1
    typed = {owner: data.view(dtype) for owner, data in arrays.items()}
    firsts = (begins + index.shifts[rows]) >> shift
    owners, counts = index.owners[rows].tolist(), (sizes >> shift).tolist()
    return [
        typed[owner][first : first + count] for owner, first, count in zip(owners, firsts.tolist(), counts, strict=True)
    ]


def join_range(cached_blocks: CachedBlocks, begin: int, size: int) -> NDArray[np.uint8]:
    """Return a cached byte range, copied if it spans several intervals."""
    parts, end, index = [], begin + size, cached_blocks.index
    while begin < end:
        row = int(index.starts.searchsorted(begin // BLOCK_BYTES, side="right")) - 1
        first, stop = int(index.starts[row]), int(index.stops[row])
        if row < 0 or begin >= BLOCK_BYTES * stop:
            raise AssertionError("the cached blocks must cover the requested range")
        offset = BLOCK_BYTES * (int(index.block_offsets[row]) - first) + begin
        part_bytes = min(BLOCK_BYTES * stop, end) - begin
        parts.append(cached_blocks.arrays[int(index.owners[row])][offset : offset + part_bytes])
        begin += part_bytes
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])
