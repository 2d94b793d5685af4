"""What a process knows of the blocks that are on this machine: which extents, in which file, where in it."""

from collections import OrderedDict
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.store.extents import Extents, minus
from batchloom.store.segments import Table

# Each costs a descriptor, and what was deleted keeps its room on the disk while it is mapped.
_MOST_MAPPED, _MOST_BYTES = 256, 2 << 30
# Those that could not be written to a disk take memory.
_MOST_IN_MEMORY = 256 << 20


@final
class Segment:
    """A file of blocks.

    Attributes:
        name: in the cache; None where it is in memory alone.
        table: what it holds.
        data: its blocks, uint8; None while it is not mapped.
    """

    __slots__ = ("data", "name", "table")

    def __init__(self, name: str | None, table: Table, data: NDArray[np.uint8] | None) -> None:
        self.name, self.table, self.data = name, table, data


class Index(NamedTuple):
    """Extents that are there, apart from each other, ascending; arrays [N] that are never changed but for ``sound``.

    Attributes:
        starts: first block of each, int64.
        stops: last block + 1 of each, int64.
        places: at which block of its segment each begins, int64.
        owners: number of the segment of each, int64.
        sound: whether this process knows its blocks to be right.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    places: NDArray[np.int64]
    owners: NDArray[np.int64]
    sound: NDArray[np.bool_]

    @property
    def extents(self) -> Extents:
        """First block and last + 1 of each, int64 [N, 2]."""
        return np.stack([self.starts, self.stops], axis=1)


_NONE = np.empty(0, np.int64)
EMPTY = Index(_NONE, _NONE, _NONE, _NONE, np.empty(0, bool))


def added(
    index: Index, owner: int, extents: Extents, places: NDArray[np.int64], *, sound: bool
) -> Index:
    """An index with a segment more; where its blocks are known already, the other segment's stay.

    Args:
        index: as it is.
        owner: number of the segment.
        extents: of it, apart from each other, in any order.
        places: at which block of the segment each begins.
        sound: whether its blocks are known to be right.
    """
    order = np.argsort(extents[:, 0], kind="stable")
    extents, places = extents[order], places[order]
    fresh = minus(extents, index.extents)
    if not fresh.size:
        return index
    whole = extents[:, 0].searchsorted(fresh[:, 0], side="right") - 1
    at = index.starts.searchsorted(fresh[:, 0])
    begins = places[whole] + fresh[:, 0] - extents[whole, 0]
    return Index(
        np.insert(index.starts, at, fresh[:, 0]),
        np.insert(index.stops, at, fresh[:, 1]),
        np.insert(index.places, at, begins),
        np.insert(index.owners, at, owner),
        np.insert(index.sound, at, sound),
    )


def without(index: Index, owners: set[int]) -> Index:
    """An index without some segments."""
    kept = ~np.isin(index.owners, list(owners))
    return Index(
        index.starts[kept],
        index.stops[kept],
        index.places[kept],
        index.owners[kept],
        index.sound[kept],
    )


@final
class Segments:
    """The segments an index is of, by their numbers; a bounded number of them is mapped."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, _MOST_BYTES)
        self._bytes = 0
        self.known: dict[int, Segment] = {}
        self.names: dict[str, int] = {}
        self._mapped: OrderedDict[int, None] = OrderedDict()
        self._in_memory = 0
        self._next = 0

    def add(self, segment: Segment) -> int:
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

    def _unmap(self, number: int, segment: Segment) -> None:
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
        for oldest in [one for one in self._mapped if one != number and one not in busy]:
            many = len(self._mapped) > _MOST_MAPPED or self._bytes > self._limit
            if not many and self._in_memory <= _MOST_IN_MEMORY:
                break
            old = self.known[oldest]
            self._unmap(oldest, old)
            if old.name is None:
                gone.add(oldest)
        return gone
