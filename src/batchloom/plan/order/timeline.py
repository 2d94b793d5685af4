"""Timeline of a run: the source and the index of each position."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.mixture import Schedule, Weights, make_schedule
from batchloom.plan.order.segments import RunLayout
from batchloom.plan.packing.rows import Ints

# Number of positions checked for exhausted sources at once.
_STRIDE = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class ServedSegment:
    """Positions that some sources serve under one schedule.

    With K lanes a source has K positions in turn, so that they are of different lanes.
    """

    position: int  # first position
    era: int  # number of earlier changes of ``seq_len``
    sources: NDArray[np.int32]  # number in the plan of each source of the schedule, int32 [sources of the schedule]
    schedule: Schedule  # schedule of the sources
    bases: Ints  # sequences of each source served earlier in this era, int64 [sources]
    lanes: int

    @property
    def plain(self) -> bool:
        """True for one source; then :meth:`index` suffices."""
        return len(self.sources) == 1

    def index(self, position: int) -> int:
        """Return the index in the era of a position of a plain segment."""
        return int(self.bases[self.sources[0]]) + position - self.position

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source and the index in the era of positions."""
        turns, inside = np.divmod(positions - self.position, self.lanes)
        local, numbers = self.schedule.at(turns)
        sources = self.sources[local].astype(np.int64)
        return sources, self.bases[sources] + numbers * self.lanes + inside

    def served(self, position: int) -> Ints:
        """Return the value of ``bases`` for a segment that starts at a position."""
        turn, inside = divmod(position - self.position, self.lanes)
        counts = self.bases.copy()
        counts[self.sources] += self.schedule.count(turn) * self.lanes
        if inside:
            counts[self.sources[self.schedule.at(np.array([turn]))[0]]] += inside
        return counts

    def find_position(self, source: int, index: int) -> int | None:
        """Return the position of a sequence; None if earlier or absent."""
        local = np.flatnonzero(self.sources == source)
        before = int(self.bases[source])
        if not local.size or index < before:
            return None
        number, inside = divmod(index - before, self.lanes)
        return self.position + self.schedule.find(int(local[0]), number) * self.lanes + inside


class ServedRun(NamedTuple):
    """Beginning of a run: its segments, and the sources that ended in it."""

    segments: list[tuple[ServedSegment, int]]  # segments in order, each with its end
    exhausted: dict[int, int]  # position from which each exhausted source is unavailable, by its number
    has_ended: bool  # whether exhausted sources end the run before its next position


@final
class Timeline:
    """Segments of a run, created on demand.

    Exhaustion of a source depends on its counts, so segments cannot be created in advance.

    Args:
        layout: segments of the run.
        slots: function (weights, exhausted sources, era) -> slots of a period by source number; empty if no
            source is left.
        limit: function (source, era, count) -> sequences of a source in an era if it has fewer than the count; else
            None, without counting pools where that is certain.
        sources: number of sources.
        lanes: number of lanes.
        stop: whether the run ends when the first source is exhausted; else the others take its share.

    Attributes:
        exhausted: position from which each exhausted source is unavailable.
        end: position where the run ends because no sequence is left; None if unknown.
        sure: position up to which all exhausted sources are known.
    """

    def __init__(
        self,
        layout: RunLayout,
        slots: Callable[[Weights, frozenset[int], int], Mapping[int, int]],
        limit: Callable[[int, int, int], int | None],
        *,
        sources: int,
        lanes: int,
        stop: bool,
    ) -> None:
        self._slots = slots
        self._limit = limit
        self._lanes = lanes
        self._stop = stop
        self.exhausted: dict[int, int] = {}
        self.end: int | None = None
        self.sure = 0
        # At these a schedule begins, whatever is exhausted.
        self._planned = layout.list_schedules()
        self._segments: list[ServedSegment] = []
        self._append(0, np.zeros(sources, np.int64))

    def _append(self, position: int, served: Ints) -> None:
        planned = self._planned[bisect_right(self._planned, position, key=lambda segment: segment.start) - 1]
        if self._segments and planned.era != self._segments[-1].era:
            served = np.zeros_like(served)
        exhausted = frozenset(n for n, exhausted_at in self.exhausted.items() if exhausted_at <= position)
        slots = self._slots(planned.weights, exhausted, planned.era)
        if not slots:
            self.end = position if self.end is None else min(self.end, position)
            return
        numbers = np.array(sorted(slots), np.int32)
        schedule = make_schedule(tuple(slots[n] for n in numbers.tolist()))
        self._segments.append(ServedSegment(position, planned.era, numbers, schedule, served, self._lanes))

    def segment_at(self, position: int) -> ServedSegment | None:
        """Return the segment that holds a position; None past the end of the run."""
        while self.sure <= position and (self.end is None or self.sure < self.end):
            self._extend_to(position)
        if self.end is not None and position >= self.end:
            return None
        segment_index = bisect_right(self._segments, position, key=lambda segment: segment.position)
        return self._segments[segment_index - 1]

    def until(self, segment: ServedSegment) -> int | None:
        """Return the currently known end of a segment; None if nothing is known to follow."""
        segment_index = self._segments.index(segment)
        if segment_index + 1 < len(self._segments):
            return self._segments[segment_index + 1].position
        mark = self._find_mark(segment.position)
        ends = [position for position in (mark, self.end) if position is not None]
        return min(ends) if ends else None

    def segments(self) -> Sequence[ServedSegment]:
        return self._segments

    def _find_mark(self, position: int) -> int | None:
        """Return the first planned schedule after a position."""
        number = bisect_right(self._planned, position, key=lambda segment: segment.start)
        return self._planned[number].start if number < len(self._planned) else None

    def _extend_to(self, position: int) -> None:
        """Check the last segment up to its end or past ``position``, whichever is first."""
        segment = self._segments[-1]
        mark = self._find_mark(segment.position)
        # Positions are checked in strides, because sequential lookups would otherwise repeat the check each time.
        target = max(position + 1, self.sure + _STRIDE)
        if mark is not None:
            target = min(target, mark)
        first = self._find_first_exhausted(segment, target)
        if first is None:
            self.sure = target
            if target == mark:
                self._append(target, segment.served(target))
            return
        self._exhaust(*first)
        self.sure = max(self.sure, first[0])

    def _exhaust(self, position: int, number: int) -> None:
        """End a source at a position of the last segment."""
        self.exhausted[number] = position
        if self._stop:
            self.end = position
        else:
            self._append(position, self._segments[-1].served(position))

    def _find_first_exhausted(self, segment: ServedSegment, target: int) -> tuple[int, int] | None:
        """Return (position, source) of the first source exhausted before ``target``."""
        served = segment.served(target)
        exhausted_sources = []
        for number in segment.sources.tolist():
            limit = self._limit(number, segment.era, int(served[number]))
            if limit is not None:
                exhausted_sources.append((segment.find_position(number, limit) or segment.position, number))
        return min(exhausted_sources, default=None)

    def adopt(self, exhausted: Mapping[int, int], position: int) -> None:
        """Load known exhausted sources up to a position.

        No source other than ``exhausted`` ends before it.
        """
        for exhausted_at, number in sorted((exhausted_at, number) for number, exhausted_at in exhausted.items()):
            if number in self.exhausted:
                continue
            self._begin_marked_segments(exhausted_at)
            self._exhaust(exhausted_at, number)
            self.sure = max(self.sure, exhausted_at)
        self._begin_marked_segments(position)
        self.sure = max(self.sure, position)

    def _begin_marked_segments(self, position: int) -> None:
        while (mark := self._find_mark(self._segments[-1].position)) is not None:
            # No segment begins past the end of the run.
            if mark > position or self.end is not None:
                break
            self._append(mark, self._segments[-1].served(mark))

    def find_end(self) -> int:
        """Return the position at which exhausted sources end the run."""
        stride = 1 << 16
        while self.end is None:
            self.segment_at(self.sure + stride)
            stride *= 2
        return self.end
