"""Schedule of a mixture: the source of each position, in integer arithmetic.

Each source has a number of slots in a period. Its j-th slot is released at floor(j P / c) and due at ceil((j + 1)
P / c). Among released slots the one due first is served (earliest deadline first, the chairman assignment of
Tijdeman: The Chairman Assignment Problem, Discrete Mathematics 32, 1980; by Liu and Layland one server can always
meet these deadlines). So after t positions a source has had floor(t c / P) or ceil(t c / P) of them: always
within one of its share.
"""

import heapq
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.keyed_hashing import hash_indices

Ints = NDArray[np.int64]

MAX_SOURCES = 1000
# Any fixed shuffle breaks a resonance of sources with lanes. The key is not a secret.
_LANE_KEY = (0x6C616E6573, 0x7363686564756C65)


@lru_cache(maxsize=16)
def build_period(counts: tuple[int, ...]) -> NDArray[np.int32]:
    """Return the source of each slot of a period of ``sum(counts)`` slots, int32.

    Each count is at least 1.
    """
    period, sources = sum(counts), len(counts)
    share = np.array(counts, np.int64)
    owner = np.repeat(np.arange(sources), share)
    number = np.arange(period) - np.repeat(np.cumsum(share) - share, share)
    owner_counts = share[owner]
    deadlines = -(-(number + 1) * period // owner_counts) * sources + owner
    order = np.argsort(number * period // owner_counts, kind="stable")
    # The heap holds (deadline, source) as one integer, because a million of them are pushed and popped.
    heap: list[int] = []
    dates = deadlines[order].tolist()
    ends = np.cumsum(np.bincount(number * period // owner_counts, minlength=period)).tolist()
    push, pop, push_pop = heapq.heappush, heapq.heappop, heapq.heappushpop
    served, begin = [], 0
    for end in ends:
        if begin == end:
            served.append(pop(heap))
            continue
        for date in dates[begin : end - 1]:
            push(heap, date)
        served.append(push_pop(heap, dates[end - 1]))
        begin = end
    slots = (np.array(served, np.int64) % sources).astype(np.int32)
    slots.flags.writeable = False
    return slots


@lru_cache(maxsize=4)
def make_schedule(counts: tuple[int, ...], lanes: int) -> "Schedule":
    """Return the cached schedule of these slots.

    An edit that keeps the weights reuses it.
    """
    return Schedule(counts, lanes)


@final
class Schedule:
    """Endless repetition of one period; positions count from its beginning.

    Args:
        counts: slots of each source in a period, each at least 1.
        lanes: number of lanes the positions are distributed over. With one source, position q belongs to lane q
            mod K. A mixture shuffles the K positions of a group over the lanes and shifts them by one lane every
            period, so that in K periods each source uses each lane equally often.

    Attributes:
        counts, lanes: as given.
        period: positions of a period, a multiple of ``lanes`` for a mixture of several lanes.
    """

    __slots__ = (
        "_begins",
        "_keys",
        "_lane",
        "_occurrence",
        "_share",
        "_turn_slots",
        "_turns",
        "counts",
        "lanes",
        "period",
    )

    def __init__(self, counts: tuple[int, ...], lanes: int = 1) -> None:
        self.counts, self.lanes, self.period = counts, lanes, sum(counts)
        self._share = np.array(counts, np.int64)
        self._lane: Ints | None = None
        self._turn_slots: dict[int, Ints] = {}
        classes = build_period(counts).astype(np.int64)
        if lanes > 1 and len(counts) > 1:
            hashes = hash_indices(np.arange(self.period), _LANE_KEY).reshape(-1, lanes)
            self._lane = np.argsort(hashes, axis=1).ravel().astype(np.int64)
            classes = classes * lanes + self._lane
        # Slots by class (a source, or a source and a lane), ascending in each, each as class * period + slot.
        members = np.argsort(classes, kind="stable")
        self._keys = classes[members] * self.period + members
        sizes = np.bincount(classes, minlength=len(counts) * (lanes if self._lane is not None else 1))
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._occurrence = np.empty(self.period, np.int32)
        self._occurrence[members] = np.arange(self.period) - np.repeat(self._begins[:-1], sizes)
        if self._lane is not None:
            # turns[s, i]: slots of source s in the lanes before i, over two rounds of the lanes.
            table = sizes.reshape(len(counts), lanes)
            twice = np.cumsum(np.concatenate([table, table], axis=1), axis=1)
            self._turns = np.concatenate([np.zeros((len(counts), 1), np.int64), twice], axis=1)

    def at(self, positions: Ints) -> tuple[NDArray[np.int64], Ints, Ints]:
        """Return (source, lane, index) of positions.

        The index counts the earlier positions of that source and lane.
        """
        period_index, slot = np.divmod(positions, self.period)
        sources = build_period(self.counts)[slot].astype(np.int64)
        if self._lane is None:
            indices = period_index * self._share[sources] + self._occurrence[slot]
            if self.lanes == 1:
                return sources, np.zeros(len(positions), np.int64), indices
            return sources, positions % self.lanes, positions // self.lanes
        lanes = (self._lane[slot] + period_index) % self.lanes
        return (
            sources,
            lanes,
            self._count_earlier(sources, lanes, period_index) + self._occurrence[slot],
        )

    def _count_earlier(self, sources: Ints, lanes: Ints, turn: Ints) -> Ints:
        """Count the slots of sources in lanes in the periods before ``turn``."""
        rounds, inside = np.divmod(turn, self.lanes)
        last = lanes + self.lanes + 1
        part: Ints = self._turns[sources, last] - self._turns[sources, last - inside]
        return rounds * self._share[sources] + part

    def count(self, position: int) -> Ints:
        """Count the earlier positions of each source and lane, int64 [sources, lanes]."""
        sources = np.repeat(np.arange(len(self.counts)), self.lanes)
        lanes = np.tile(np.arange(self.lanes), len(self.counts))
        shape = (len(self.counts), self.lanes)
        turn, slot = divmod(position, self.period)
        if len(self.counts) == 1:
            rounds, remainder = divmod(position, self.lanes)
            return (rounds + (np.arange(self.lanes) < remainder)).reshape(shape)
        if self._lane is None:
            classes, before = sources, turn * self._share
        else:
            turns = np.full(len(sources), turn)
            classes = sources * self.lanes + (lanes - turn) % self.lanes
            before = self._count_earlier(sources, lanes, turns)
        inside = self._keys.searchsorted(classes * self.period + slot) - self._begins[classes]
        served: Ints = before + inside
        return served.reshape(shape)

    def turns(self, source: int, positions: Ints) -> Ints:
        """Return the turn of a source at each of its positions, from 0 over all lanes."""
        if len(self.counts) == 1:
            return positions
        period, slot = np.divmod(positions, self.period)
        turns: Ints = period * self.counts[source] + self._get_slots(source).searchsorted(slot)
        return turns

    def turn(self, source: int, number: int) -> int:
        """Return the position of a turn of a source; inverse of :meth:`turns`."""
        if len(self.counts) == 1:
            return number
        period, slot_index = divmod(number, self.counts[source])
        return period * self.period + int(self._get_slots(source)[slot_index])

    def _get_slots(self, source: int) -> Ints:
        if source not in self._turn_slots:
            self._turn_slots[source] = np.flatnonzero(build_period(self.counts) == source)
        return self._turn_slots[source]

    def find_position(self, source: int, lane: int, index: int) -> int:
        """Return the position of a source, lane and index; inverse of :meth:`at`."""
        if len(self.counts) == 1:
            return index * self.lanes + lane
        turn, slot_index = divmod(index, self.counts[source])
        group = source
        if self._lane is not None:
            row = self._turns[source]
            ends = row[lane + self.lanes + 1] - row[lane + self.lanes + 1 - np.arange(self.lanes + 1)]
            inside = int(np.searchsorted(ends, slot_index, side="right")) - 1
            slot_index -= int(ends[inside])
            group = source * self.lanes + (lane - inside) % self.lanes
            turn = turn * self.lanes + inside
        return (turn - group) * self.period + int(self._keys[self._begins[group] + slot_index])
