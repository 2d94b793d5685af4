"""Positions of a run, the sequence of each, and their rows.

With ``group_by_length``, for batches that are padded instead of packed, the positions of a run are divided into windows
of this many steps. Inside a window the rows are sorted from the longest down and cut into steps, whose order is
shuffled. Positions move inside their window; nothing else changes. The idea is that of transformers'
LengthGroupedSampler, whose batches come longest first inside each of its windows, and of fairseq's batches by size.
"""

from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.plan.mixture import Mixture
from batchloom.plan.order.rank_slices import WHOLE, RowPart
from batchloom.plan.order.source_order import SequenceLocation
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import ServedSegment
from batchloom.plan.packing.rows import Ints, Rows, join_rows, reorder_rows, set_source, slice_rows

# Each source costs some microseconds per window, so with several sources a window exceeds the request.
_WINDOW_ROWS = 8192
_MAX_CACHED_WINDOWS = 4
_MAX_GROUPED_WINDOWS = 2


def order_by_length(lengths: Ints, size: int, key: HashKey) -> Ints:
    """Return the order of a window's rows: row r is the original row order[r].

    ``lengths`` and the result are int64 [rows]; ``size`` is the rows of a step. Rows that do not fill a step keep
    their position at the end.
    """
    steps = len(lengths) // size
    full_step_rows = steps * size
    longest_first = np.argsort(-lengths[:full_step_rows], kind="stable").reshape(steps, size)
    return np.concatenate([longest_first[shuffle_range(steps, key)].ravel(), np.arange(full_step_rows, len(lengths))])


@final
class RunPositions:
    """Positions of one run, the sequences its sources serve there, and their rows."""

    def __init__(self, orders: SourceOrders) -> None:
        self.orders = orders
        # With one source and no edits, positions are the source's own sequence numbers.
        self._plain = not (isinstance(orders.data, Mixture) or orders.edits)
        # First and last + 1 position and rows of the latest windows, by part.
        self._cached_windows: dict[RowPart, tuple[int, int, Rows]] = {}
        # Order and rows of a length-group window by its first position.
        self._grouped_windows: dict[int, tuple[Ints, Rows]] = {}
        # First position, source and documents, ascending, of each ban.
        self._bans = [
            (segment.start, orders.names.index(name), np.array(numbers, np.int64))
            for segment in orders.run_layout.segments
            for name, numbers in segment.bans.items()
            if numbers
        ]
        self._era = 0
        self._end: int | None = None

    @property
    def end(self) -> int:
        """Number of positions of the run's steps that carry data."""
        with self.orders.lock:
            if self._end is None:
                self._end = self._find_end()
            return self._end

    def _find_end(self) -> int:
        spec = self.orders.spec
        layout = self.orders.run_layout
        timeline = self.orders.timeline
        if spec.steps is not None:
            return layout.first_position(spec.steps)
        if isinstance(self.orders.data, Mixture):
            return timeline.find_end()
        epochs = spec.epochs or 1
        timeline.segment_at(max(segments[0].start for segments in layout.list_eras()))
        for segment in timeline.segments():
            order = self.orders.order(0, segment.era)
            until = timeline.until(segment)
            if until is not None and order.surely_has(int(segment.served(until)[0]), epochs):
                continue
            end_position = segment.find_position(0, order.count_before(epochs))
            end = segment.position if end_position is None else end_position
            if until is None or end < until:
                return end
        raise AssertionError("the last segment of a single store ends only with its epochs")

    @property
    def may_run_out(self) -> bool:
        """True if exhausted sources can end the run before its ``steps``."""
        return isinstance(self.orders.data, Mixture) and self.orders.data.exhausted != "repeat"

    def carries_data(self, position: int) -> bool:
        """Return whether a position carries data."""
        steps = self.orders.spec.steps
        if steps is not None and position >= self.orders.run_layout.first_position(steps):
            return False
        if isinstance(self.orders.data, Mixture):
            with self.orders.lock:
                return self.orders.timeline.segment_at(position) is not None
        return steps is not None or self.locate(position) is not None

    def locate(self, position: int) -> SequenceLocation | None:
        """Return the sequence of a position before rows are grouped by length.

        Return None past the end of the run, and for a single store past its epochs.
        """
        has_epochs = not isinstance(self.orders.data, Mixture) and self.orders.spec.steps is None
        epochs = (self.orders.spec.epochs or 1) if has_epochs else None
        with self.orders.lock:
            if self._plain:
                return self.orders.order(0).find(position, epochs)
            segment = self.orders.timeline.segment_at(position)
            if segment is None:
                return None
            sources, indices = segment.at(np.array([position]))
            return self.orders.order(int(sources[0]), segment.era).find(int(indices[0]), epochs)

    def window(self, position: int) -> tuple[int, int]:
        """Return the first and last + 1 position of the length-group window of a position."""
        steps = self.orders.spec.group_by_length
        if not steps:
            return position, position + 1
        segment = self.orders.run_layout.segment_at(position)
        size = steps * segment.size
        start = position - (position - segment.start) % size
        stop = start + size
        if self.orders.spec.steps is not None:
            # The last window of a run ends with the run.
            end = self.orders.run_layout.first_position(self.orders.spec.steps)
            start, stop = (start, min(stop, end)) if position < end else (max(start, end), stop)
        return start, stop

    def segments_in(self, start: int, stop: int) -> list[tuple[ServedSegment | None, int, int]]:
        """Split positions at timeline segments; the segment is None past the end."""
        parts: list[tuple[ServedSegment | None, int, int]] = []
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

    def rows(self, start: int, stop: int, part: RowPart) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``, or of a part of them.

        Callers of this and of :meth:`find_served_position` must hold the lock of the orders.
        """
        if not self.orders.spec.group_by_length or start == stop:
            return self._load_rows(start, stop, part)
        row_slices = []
        position = start
        while position < stop:
            begin, end = self.window(position)
            _, rows = self._group_window(begin, end)
            row_slices.append(slice_rows(rows, position - begin, min(stop, end) - begin))
            position = end
        return join_rows(row_slices, stop - start)

    def find_served_position(self, position: int) -> int:
        """Return the position that serves a row, given the one before grouping."""
        if not self.orders.spec.group_by_length:
            return position
        begin, stop = self.window(position)
        order = self._group_window(begin, stop)[0]
        return begin + int(np.flatnonzero(order == position - begin)[0])

    def _group_window(self, begin: int, stop: int) -> tuple[Ints, Rows]:
        """Return the order of a length-group window and its rows; the latest are cached."""
        grouped_window = self._grouped_windows.get(begin)
        if grouped_window is not None:
            return grouped_window
        rows = self._load_rows(begin, stop, WHOLE)
        # Each row has one span, its document. Rows past the end of the run have none.
        count = len(rows.lengths)
        key = derive_key(self.orders.spec.seed, "", "grouped steps", -1, begin)
        size = self.orders.run_layout.segment_at(begin).size
        order = np.arange(stop - begin)
        order[:count] = order_by_length(rows.lengths, size, key)
        grouped_window = (order, reorder_rows(rows, order))
        while len(self._grouped_windows) >= _MAX_GROUPED_WINDOWS:
            del self._grouped_windows[next(iter(self._grouped_windows))]
        self._grouped_windows[begin] = grouped_window
        return grouped_window

    def _load_rows(self, start: int, stop: int, part: RowPart) -> Rows:
        count = part.count(stop - start)
        if self._plain:
            epochs = None if self.orders.spec.steps is not None else self.orders.spec.epochs or 1
            end = stop if epochs else max(min(stop, self.end), start)
            return join_rows(self.orders.order(0).rows(part.list_positions(start, end), epochs), count)
        first, last, rows = self._load_window(start, stop, part)
        if (first, last) == (start, stop):
            return rows
        first_row = (start - first) // part.stride
        return slice_rows(rows, first_row, first_row + count)

    def _load_window(self, start: int, stop: int, part: RowPart) -> tuple[int, int, Rows]:
        """Return a window that contains the range; with several sources it is larger."""
        if len(self.orders.names) == 1:
            return start, stop, self._build_rows(start, stop, part)
        cached_window = self._cached_windows.get(part)
        if cached_window and (start - cached_window[0]) % part.stride:
            # Steps of another size do not begin at a row of the part.
            cached_window = None
        if cached_window and cached_window[0] <= start and stop <= cached_window[1]:
            return cached_window
        end = stop
        if (
            cached_window
            and cached_window[0] <= start <= cached_window[1] + 8 * (stop - start)
            and stop - start < _WINDOW_ROWS
        ):
            # Sequential readers, also those that skip a little, get a window larger than the request.
            end = self._find_window_end(start, stop)
        window = (start, end, self._build_rows(start, end, part))
        self._cached_windows[part] = window
        while len(self._cached_windows) > _MAX_CACHED_WINDOWS:
            del self._cached_windows[next(iter(self._cached_windows))]
        return window

    def _find_window_end(self, start: int, stop: int) -> int:
        end = max(stop, start + _WINDOW_ROWS)
        for segments in self.orders.run_layout.list_eras()[1:]:
            if stop <= segments[0].start < end:
                end = segments[0].start
        if self.orders.spec.steps is not None:
            end = max(min(end, self.end), stop)
        return end

    def _build_rows(self, start: int, stop: int, part: RowPart) -> Rows:
        end = stop if self.orders.spec.steps is None else max(min(stop, self.end), start)
        all_positions = part.list_positions(start, stop)
        row_slices = []
        for segment, first, last in self.segments_in(start, end):
            positions = all_positions[slice(*all_positions.searchsorted([first, last]).tolist())]
            if segment is None or not len(positions):
                continue
            if segment.era > self._era:
                # Pools of an era that has ended are not read again.
                self._era = segment.era
                self.orders.forget_rows(segment.era)
            segment_rows = self._gather_rows(segment, positions)
            row_slices.append(self._mark_banned(segment_rows, positions))
        return join_rows(row_slices, len(all_positions))

    def _gather_rows(self, segment: ServedSegment, positions: NDArray[np.int64]) -> Rows:
        epochs = None
        if not isinstance(self.orders.data, Mixture) and self.orders.spec.steps is None:
            epochs = self.orders.spec.epochs or 1
        sources, indices = segment.at(positions)
        order = np.argsort(sources, kind="stable")
        begins = np.flatnonzero(np.diff(sources[order], prepend=-1))
        source_rows = []
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
            number = int(sources[order[begin]])
            row_slices = self.orders.order(number, segment.era).rows(indices[order[begin:end]], epochs)
            source_rows.append(set_source(join_rows(row_slices, end - begin), number))
        if segment.plain:
            return source_rows[0]
        inverse_order = np.empty(len(order), np.int64)
        inverse_order[order] = np.arange(len(order))
        return reorder_rows(join_rows(source_rows, len(order)), inverse_order)

    def _mark_banned(self, rows: Rows, positions: NDArray[np.int64]) -> Rows:
        for start, number, banned_documents in self._bans:
            if not len(positions) or positions[-1] < start:
                continue
            is_after_ban = np.repeat(positions >= start, np.diff(rows.pointers))
            is_after_ban &= rows.sources == number
            nearest = np.minimum(banned_documents.searchsorted(rows.documents), len(banned_documents) - 1)
            is_banned = is_after_ban & (banned_documents[nearest] == rows.documents)
            if is_banned.any():
                rows = replace(rows, banned=is_banned if rows.banned is None else is_banned | rows.banned)
        return rows
