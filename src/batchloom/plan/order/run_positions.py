"""Positions of a run that carry data, and the sequence of each position."""

from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.mixture.mixture_spec import Mixture
from batchloom.plan.order.source_order import SequenceLocation
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import TimelineSegment

WHOLE = (0, 1)


@final
class RunPositions:
    """Positions of one run and the sequences its sources serve there."""

    def __init__(self, orders: SourceOrders) -> None:
        self.orders = orders

    @cached_property
    def end(self) -> int:
        """Number of positions of the run's steps that carry data."""
        spec, course, timeline = self.orders.spec, self.orders.run_layout, self.orders.timeline
        if spec.steps is not None:
            return course.first_position(spec.steps)
        if isinstance(self.orders.data, Mixture):
            return timeline.find_end()
        epochs = spec.epochs or 1
        timeline.segment_at(max((position for position, _ in course.seq_len_changes), default=0))
        for segment in timeline.segments():
            order, until = self.orders.order(0, segment.era), timeline.until(segment)
            if until is not None and order.surely_has(segment.served(until)[0], epochs):
                continue
            quotas = order.quotas(epochs).tolist()
            # The run ends at the first position of any lane that has no sequence left.
            end_positions = [segment.find_position(0, lane, end) for lane, end in enumerate(quotas)]
            end = min(segment.position if end_position is None else end_position for end_position in end_positions)
            if until is None or end < until:
                return end
        raise AssertionError("the last segment of a single store ends only with its epochs")

    @property
    def may_run_out(self) -> bool:
        """True if exhausted sources can end the run before its ``steps``."""
        return isinstance(self.orders.data, Mixture) and self.orders.data.exhausted != "repeat"

    def carries_data(self, position: int) -> bool:
        """Return whether a position carries data, in a run without ``steps``."""
        if isinstance(self.orders.data, Mixture):
            with self.orders.lock:
                return self.orders.timeline.segment_at(position) is not None
        return self.locate(position) is not None

    def locate(self, position: int) -> SequenceLocation | None:
        """Return the sequence of a position before rows are grouped by length.

        Return None past the end of the run, and for a single store past its epochs.
        """
        epochs = None if isinstance(self.orders.data, Mixture) else self.orders.spec.epochs or 1
        with self.orders.lock:
            segment = self.orders.timeline.segment_at(position)
            if segment is None:
                return None
            if segment.plain:
                number, lane, index = int(segment.sources[0]), 0, segment.index(position)
            else:
                sources, lanes, indices = segment.at(np.array([position]))
                number, lane, index = int(sources[0]), int(lanes[0]), int(indices[0])
            return self.orders.order(number, segment.era).find(lane, index, epochs)

    def window(self, position: int) -> tuple[int, int]:
        """Return the first and last + 1 position of the length-group window of a position."""
        steps = self.orders.spec.group_by_length
        if not steps:
            return position, position + 1
        step_range = self.orders.run_layout.range_at(position)
        size = steps * step_range.size
        start = position - (position - step_range.position) % size
        stop = start + size
        if self.orders.spec.steps is not None:
            # The last window of a run ends with the run.
            end = self.orders.run_layout.first_position(self.orders.spec.steps)
            start, stop = (start, min(stop, end)) if position < end else (max(start, end), stop)
        return start, stop

    def segments_in(self, start: int, stop: int) -> list[tuple[TimelineSegment | None, int, int]]:
        """Split a range of positions at timeline segments.

        The segment is None past the end of the run.
        """
        parts: list[tuple[TimelineSegment | None, int, int]] = []
        while start < stop:
            segment = self.orders.timeline.segment_at(start)
            until = stop if segment is None else self.orders.timeline.until(segment) or stop
            # segment_at may have just determined the end of the segment, so read it again.
            if segment is not None:
                self.orders.timeline.segment_at(min(until, stop) - 1)
                until = self.orders.timeline.until(segment) or stop
            parts.append((segment, start, min(until, stop)))
            start = min(until, stop)
        return parts

    def lanes_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the lane of each position from ``start`` to ``stop - 1``, int64 [N]."""
        with self.orders.lock:
            lanes = np.arange(start, stop) % self.orders.spec.lanes
            for segment, first, last in self.segments_in(start, stop):
                if segment is not None:
                    lanes[first - start : last - start] = segment.at(np.arange(first, last))[1]
            return lanes

    def positions_in(self, start: int, stop: int, part: tuple[int, int]) -> NDArray[np.int64]:
        """Return the positions of a part of ``start`` to ``stop - 1``, in row order."""
        positions = np.arange(start, stop)
        if part == WHOLE or start == stop:
            return positions
        rank, ranks = part
        own_positions: NDArray[np.int64] = positions[self.lanes_of(start, stop) % ranks == rank]
        return own_positions
