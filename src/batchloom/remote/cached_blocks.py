"""What a process knows of the blocks that are on this machine: which extents, in which file, where in it."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote.cache_files import BlockTable
from batchloom.remote.intervals import BLOCK_BYTES, Intervals, subtract_intervals

IntArray = NDArray[np.int64]

# Each costs a descriptor, and what was deleted keeps its room on the disk while it is mapped.
_MAX_MAPPED_FILES, _MAX_MAPPED_BYTES = 256, 2 << 30
# Those that could not be written to a disk take memory.
_MAX_MEMORY_BYTES = 256 << 20


@final
class CacheFile:
    """A file of blocks.

    Attributes:
        name: in the cache; None where it is in memory alone.
        table: what it holds.
        data: its blocks, uint8; None while it is not mapped.
        sound: whether this process knows each of its blocks to be right, bool.
        used: whether it was read since others gave way last; set without the lock, so that it orders them and no more.
    """

    __slots__ = ("data", "name", "sound", "table", "used")

    def __init__(
        self,
        name: str | None,
        table: BlockTable,
        data: NDArray[np.uint8] | None,
        sound: NDArray[np.bool_],
    ) -> None:
        self.name, self.table, self.data, self.sound = name, table, data, sound
        self.used = False


class BlockIndex(NamedTuple):
    """Extents that are there, apart from each other, ascending; arrays [N] that are never changed but for ``sound``.

    Attributes:
        starts: first block of each, int64.
        stops: last block + 1 of each, int64.
        block_offsets: at which block of its segment each begins, int64.
        owners: number of the segment of each, int64.
        sound: whether this process knows all blocks of each to be right.
        runs: how many gaps come before each, int64: between two of one number there is none.
        ends: the byte behind each, int64; 4096 times its ``stops``.
        shifts: what to add to a place in bytes to have the place in its segment, int64.
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
    def intervals(self) -> Intervals:
        """First block and last + 1 of each, int64 [N, 2]."""
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
    """An index with a segment more; where its blocks are known already, the other segment's stay.

    Args:
        index: as it is.
        owner: number of the segment.
        intervals: of it, apart from each other, in any order.
        block_offsets: at which block of the segment each begins.
        sound: whether the blocks of each are known to be right.
    """
    order = np.argsort(intervals[:, 0], kind="stable")
    intervals, block_offsets, sound = intervals[order], block_offsets[order], sound[order]
    new_intervals = subtract_intervals(intervals, index.intervals)
    if not new_intervals.size:
        return index
    containing_rows = intervals[:, 0].searchsorted(new_intervals[:, 0], side="right") - 1
    insert_positions = index.starts.searchsorted(new_intervals[:, 0])
    new_offsets = block_offsets[containing_rows] + new_intervals[:, 0] - intervals[containing_rows, 0]
    return _make_index(
        np.insert(index.starts, insert_positions, new_intervals[:, 0]),
        np.insert(index.stops, insert_positions, new_intervals[:, 1]),
        np.insert(index.block_offsets, insert_positions, new_offsets),
        np.insert(index.owners, insert_positions, owner),
        np.insert(index.sound, insert_positions, sound[containing_rows]),
    )


def remove_from_index(index: BlockIndex, owners: set[int]) -> BlockIndex:
    """An index without some segments."""
    is_remaining = ~np.isin(index.owners, list(owners))
    return _make_index(
        index.starts[is_remaining],
        index.stops[is_remaining],
        index.block_offsets[is_remaining],
        index.owners[is_remaining],
        index.sound[is_remaining],
    )


@final
class CacheFileSet:
    """The segments an index is of, by their numbers; a bounded number of them is mapped."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, _MAX_MAPPED_BYTES)
        self._mapped_bytes = 0
        self.cache_files: dict[int, CacheFile] = {}
        self.names: dict[str, int] = {}
        self._mapped_numbers: OrderedDict[int, None] = OrderedDict()
        self._memory_bytes = 0
        self._next_number = 0

    def add(self, cache_file: CacheFile) -> int:
        """Number a segment."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.cache_files[number] = cache_file
        if cache_file.name is not None:
            self.names[cache_file.name] = number
        return number

    def remove(self, number: int) -> None:
        """Forget a segment."""
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
        """Count a segment whose bytes are here now; others give way, and those in memory alone are to be forgotten.

        Args:
            number: of the segment.
            pinned_owners: the segments that somebody waits for, which stay.
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
        used_numbers = [
            other_number
            for other_number in self._mapped_numbers
            if other_number != number and self.cache_files[other_number].used
        ]
        self._move_behind([*used_numbers, number])
        for oldest_number in [
            other_number
            for other_number in self._mapped_numbers
            if other_number != number and other_number not in pinned_owners
        ]:
            if not self._exceeds_limits():
                break
            oldest_file = self.cache_files[oldest_number]
            self._unmap(oldest_number, oldest_file)
            if oldest_file.name is None:
                removed_numbers.add(oldest_number)
        return removed_numbers

    def _move_behind(self, used_numbers: list[int]) -> None:
        """Let others give way first: these were read since the last time."""
        for number in used_numbers:
            self.cache_files[number].used = False
            self._mapped_numbers.move_to_end(number)

    def _exceeds_limits(self) -> bool:
        too_many_mapped = len(self._mapped_numbers) > _MAX_MAPPED_FILES or self._mapped_bytes > self._limit
        return too_many_mapped or self._memory_bytes > _MAX_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Blocks that are there and stay while this is: an index, and the bytes of the segments that were wanted."""

    index: BlockIndex
    arrays: dict[int, NDArray[np.uint8]]


def view_ranges(
    cached_blocks: CachedBlocks, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
) -> list[NDArray[Any]]:
    """Stretches of bytes that are held, as items: views, or copies where they lie in several extents.

    Args:
        cached_blocks: what is there.
        begins: where each begins: 4096 times the number of its file's first block, and its place in the file [N].
        sizes: bytes of each [N].
        dtype: of the items; begins and sizes are multiples of its.
    """
    index, last = cached_blocks.index, (begins + np.maximum(sizes, 1) - 1) // BLOCK_BYTES
    if not begins.size or not index.starts.size:
        return [np.empty(0, dtype) for _ in range(begins.size)]
    rows = index.starts.searchsorted(begins // BLOCK_BYTES, side="right") - 1
    split_ranges = np.flatnonzero((rows < 0) | (index.stops[rows] <= last) | (sizes == 0))
    arrays = cached_blocks.arrays
    if split_ranges.size:
        # Another segment may lie there, which is not wanted: these are put together below.
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
    """Stretches of bytes as items, each in the extent that ``rows`` names; arguments as of :func:`view_ranges`."""
    shift = dtype.itemsize.bit_length() - 1
    typed = {owner: data.view(dtype) for owner, data in arrays.items()}
    firsts = (begins + index.shifts[rows]) >> shift
    owners, counts = index.owners[rows].tolist(), (sizes >> shift).tolist()
    return [
        typed[owner][first : first + count] for owner, first, count in zip(owners, firsts.tolist(), counts, strict=True)
    ]


def join_range(cached_blocks: CachedBlocks, begin: int, size: int) -> NDArray[np.uint8]:
    """Bytes that are held, copied together where they lie in several extents."""
    parts, end, index = [], begin + size, cached_blocks.index
    while begin < end:
        row = int(index.starts.searchsorted(begin // BLOCK_BYTES, side="right")) - 1
        first, stop = int(index.starts[row]), int(index.stops[row])
        if row < 0 or begin >= BLOCK_BYTES * stop:
            raise AssertionError("what is held covers what was wanted")
        offset = BLOCK_BYTES * (int(index.block_offsets[row]) - first) + begin
        part_bytes = min(BLOCK_BYTES * stop, end) - begin
        parts.append(cached_blocks.arrays[int(index.owners[row])][offset : offset + part_bytes])
        begin += part_bytes
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])
