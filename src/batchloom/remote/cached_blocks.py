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
        places: at which block of its segment each begins, int64.
        owners: number of the segment of each, int64.
        sound: whether this process knows all blocks of each to be right.
        runs: how many gaps come before each, int64: between two of one number there is none.
        ends: the byte behind each, int64; 4096 times its ``stops``.
        shifts: what to add to a place in bytes to have the place in its segment, int64.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    places: NDArray[np.int64]
    owners: NDArray[np.int64]
    sound: NDArray[np.bool_]
    runs: NDArray[np.int64]
    ends: NDArray[np.int64]
    shifts: NDArray[np.int64]

    @property
    def extents(self) -> Intervals:
        """First block and last + 1 of each, int64 [N, 2]."""
        return np.stack([self.starts, self.stops], axis=1)


_NO_INTS = np.empty(0, np.int64)
EMPTY_INDEX = BlockIndex(
    _NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, bool), _NO_INTS, _NO_INTS, _NO_INTS
)


def _make_index(*columns: NDArray[Any]) -> BlockIndex:
    starts, stops, places, owners, sound = columns
    runs = np.zeros(len(starts), np.int64)
    np.cumsum(starts[1:] != stops[:-1], out=runs[1:])
    return BlockIndex(
        starts,
        stops,
        places,
        owners,
        sound,
        runs,
        BLOCK_BYTES * stops,
        BLOCK_BYTES * (places - starts),
    )


def add_to_index(
    index: BlockIndex,
    owner: int,
    extents: Intervals,
    places: NDArray[np.int64],
    sound: NDArray[np.bool_],
) -> BlockIndex:
    """An index with a segment more; where its blocks are known already, the other segment's stay.

    Args:
        index: as it is.
        owner: number of the segment.
        extents: of it, apart from each other, in any order.
        places: at which block of the segment each begins.
        sound: whether the blocks of each are known to be right.
    """
    order = np.argsort(extents[:, 0], kind="stable")
    extents, places, sound = extents[order], places[order], sound[order]
    fresh = subtract_intervals(extents, index.extents)
    if not fresh.size:
        return index
    whole = extents[:, 0].searchsorted(fresh[:, 0], side="right") - 1
    at = index.starts.searchsorted(fresh[:, 0])
    begins = places[whole] + fresh[:, 0] - extents[whole, 0]
    return _make_index(
        np.insert(index.starts, at, fresh[:, 0]),
        np.insert(index.stops, at, fresh[:, 1]),
        np.insert(index.places, at, begins),
        np.insert(index.owners, at, owner),
        np.insert(index.sound, at, sound[whole]),
    )


def remove_from_index(index: BlockIndex, owners: set[int]) -> BlockIndex:
    """An index without some segments."""
    kept = ~np.isin(index.owners, list(owners))
    return _make_index(
        index.starts[kept],
        index.stops[kept],
        index.places[kept],
        index.owners[kept],
        index.sound[kept],
    )


@final
class CacheFileSet:
    """The segments an index is of, by their numbers; a bounded number of them is mapped."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, _MAX_MAPPED_BYTES)
        self._bytes = 0
        self.known: dict[int, CacheFile] = {}
        self.names: dict[str, int] = {}
        self._mapped: OrderedDict[int, None] = OrderedDict()
        self._in_memory = 0
        self._next = 0

    def add(self, segment: CacheFile) -> int:
        """Number a segment."""
        number, self._next = self._next, self._next + 1
        self.known[number] = segment
        if segment.name is not None:
            self.names[segment.name] = number
        return number

    def remove(self, number: int) -> None:
        """Forget a segment."""
        segment = self.known.pop(number, None)
        if segment is None:
            return
        if segment.name is not None:
            self.names.pop(segment.name, None)
        self._unmap(number, segment)

    def _unmap(self, number: int, segment: CacheFile) -> None:
        if self._mapped.pop(number, 0) is None:
            self._bytes -= segment.table.size
            if segment.name is None:
                self._in_memory -= segment.table.size
        segment.data = None

    def mapped(self, number: int, busy: set[int]) -> set[int]:
        """Count a segment whose bytes are here now; others give way, and those in memory alone are to be forgotten.

        Args:
            number: of the segment.
            busy: the segments that somebody waits for, which stay.
        """
        segment = self.known[number]
        if number not in self._mapped:
            self._mapped[number] = None
            self._bytes += segment.table.size
            if segment.name is None:
                self._in_memory += segment.table.size
        self._mapped.move_to_end(number)
        gone: set[int] = set()
        if not self._too_many():
            return gone
        used = [one for one in self._mapped if one != number and self.known[one].used]
        self._move_behind([*used, number])
        for oldest in [one for one in self._mapped if one != number and one not in busy]:
            if not self._too_many():
                break
            old = self.known[oldest]
            self._unmap(oldest, old)
            if old.name is None:
                gone.add(oldest)
        return gone

    def _move_behind(self, used: list[int]) -> None:
        """Let others give way first: these were read since the last time."""
        for number in used:
            self.known[number].used = False
            self._mapped.move_to_end(number)

    def _too_many(self) -> bool:
        many = len(self._mapped) > _MAX_MAPPED_FILES or self._bytes > self._limit
        return many or self._in_memory > _MAX_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Blocks that are there and stay while this is: an index, and the bytes of the segments that were wanted."""

    index: BlockIndex
    segments: dict[int, NDArray[np.uint8]]


def view_ranges(
    held: CachedBlocks, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]
) -> list[NDArray[Any]]:
    """Stretches of bytes that are held, as items: views, or copies where they lie in several extents.

    Args:
        held: what is there.
        begins: where each begins: 4096 times the number of its file's first block, and its place in the file [N].
        sizes: bytes of each [N].
        dtype: of the items; begins and sizes are multiples of its.
    """
    index, last = held.index, (begins + np.maximum(sizes, 1) - 1) // BLOCK_BYTES
    if not begins.size or not index.starts.size:
        return [np.empty(0, dtype) for _ in range(begins.size)]
    at = index.starts.searchsorted(begins // BLOCK_BYTES, side="right") - 1
    apart = np.flatnonzero((at < 0) | (index.stops[at] <= last) | (sizes == 0))
    known = held.segments
    if apart.size:
        # Another segment may lie there, which is not wanted: these are put together below.
        known = {**dict.fromkeys(index.owners[at[apart]].tolist(), np.empty(0, np.uint8)), **known}
    views = slice_ranges(index, known, at, begins, sizes, dtype)
    for number in apart.tolist():
        views[number] = join_range(held, int(begins[number]), int(sizes[number])).view(dtype)
    return views


def slice_ranges(
    index: BlockIndex,
    segments: dict[int, NDArray[np.uint8]],
    at: IntArray,
    begins: IntArray,
    sizes: IntArray,
    dtype: np.dtype[np.generic],
) -> list[NDArray[Any]]:
    """Stretches of bytes as items, each in the extent that ``at`` names; arguments as of :func:`view_ranges`."""
    shift = dtype.itemsize.bit_length() - 1
    typed = {owner: data.view(dtype) for owner, data in segments.items()}
    firsts = (begins + index.shifts[at]) >> shift
    owners, counts = index.owners[at].tolist(), (sizes >> shift).tolist()
    return [
        typed[owner][first : first + count]
        for owner, first, count in zip(owners, firsts.tolist(), counts, strict=True)
    ]


def join_range(held: CachedBlocks, begin: int, size: int) -> NDArray[np.uint8]:
    """Bytes that are held, copied together where they lie in several extents."""
    pieces, end, index = [], begin + size, held.index
    while begin < end:
        at = int(index.starts.searchsorted(begin // BLOCK_BYTES, side="right")) - 1
        first, stop = int(index.starts[at]), int(index.stops[at])
        if at < 0 or begin >= BLOCK_BYTES * stop:
            raise AssertionError("what is held covers what was wanted")
        offset = BLOCK_BYTES * (int(index.places[at]) - first) + begin
        some = min(BLOCK_BYTES * stop, end) - begin
        pieces.append(held.segments[int(index.owners[at])][offset : offset + some])
        begin += some
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])
