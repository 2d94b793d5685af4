"""Rows of many sources, collected source by source for a window of positions."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.mixture.mixture_spec import Mixture
from batchloom.plan.order.run_positions import WHOLE, RunPositions
from batchloom.plan.order.timeline import TimelineSegment
from batchloom.plan.packing.rows import Rows, join_rows, reorder_rows, set_source, slice_rows

# Each source costs some microseconds per window, so with several sources a window exceeds the request.
_WINDOW_ROWS = 8192
_MAX_CACHED_WINDOWS = 4


@final
class RowWindows:
    """Rows of positions before grouping by length; the latest windows are cached.

    Callers must hold the lock of the orders.
    """

    def __init__(self, run: RunPositions) -> None:
        self.run, self.orders = run, run.orders
        orders = self.orders
        # With one source, one lane and no edits, positions are the source's own sequence numbers.
        self._plain = not (isinstance(orders.data, Mixture) or orders.edits or orders.spec.lanes > 1)
        self._cached_windows: dict[tuple[int, int], tuple[int, int, Rows]] = {}
        # Document numbers of each ban of the run layout, by the ban's number.
        self._banned_documents: dict[int, NDArray[np.int64]] = {}
        self._era = 0

    def rows(self, start: int, stop: int, part: tuple[int, int]) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``, or of a part of them."""
        if self._plain:
            epochs = None if self.orders.spec.steps is not None else self.orders.spec.epochs or 1
            end = stop if epochs else max(min(stop, self.run.end), start)
            return join_rows(self.orders.order(0).rows(0, start, end, epochs), stop - start)
        first, last, rows = self._load_window(start, stop, part)
        if (first, last) == (start, stop):
            return rows
        return slice_rows(rows, self._count_rows(start - first, part), self._count_rows(stop - first, part))

    def _count_rows(self, positions: int, part: tuple[int, int]) -> int:
        """Return the rows of a part in this many positions.

        ``positions`` is a multiple of ``lanes`` unless the part is all of them.
        """
        if part == WHOLE:
            return positions
        return positions // self.orders.spec.lanes * len(range(part[0], self.orders.spec.lanes, part[1]))

    def _load_window(self, start: int, stop: int, part: tuple[int, int]) -> tuple[int, int, Rows]:
        """Return a window that contains the range; with several sources it is larger."""
        if len(self.orders.names) == 1 and self.orders.spec.lanes == 1:
            return start, stop, self._build_rows(start, stop, part)
        cached_window = self._cached_windows.get(part)
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
        lanes = self.orders.spec.lanes
        end = max(stop, (start + _WINDOW_ROWS) // lanes * lanes)
        for position, _ in self.orders.run_layout.seq_len_changes:
            if stop <= position < end:
                end = position
        if self.orders.spec.steps is not None:
            end = max(min(end, self.run.end), stop)
        return end

    def _build_rows(self, start: int, stop: int, part: tuple[int, int]) -> Rows:
        end = stop if self.orders.spec.steps is None else max(min(stop, self.run.end), start)
        row_slices = []
        for segment, a, b in self.run.segments_in(start, end):
            positions = self.run.positions_in(a, b, part)
            if segment is None:
                continue
            if segment.era > self._era:
                # Pools of an era that has ended are not read again.
                self._era = segment.era
                self.orders.forget_rows(segment.era)
            segment_rows = self._gather_rows(segment, positions)
            row_slices.append(self._mark_banned(segment_rows, positions))
        return join_rows(row_slices, self._count_rows(stop - start, part))

    def _gather_rows(self, segment: TimelineSegment, positions: NDArray[np.int64]) -> Rows:
        """Return the rows of positions of one segment, by source and lane."""
        epochs = None
        if not isinstance(self.orders.data, Mixture) and self.orders.spec.steps is None:
            epochs = self.orders.spec.epochs or 1
        if segment.plain:
            number, first = int(segment.sources[0]), segment.index(int(positions[0]))
            row_slices = self.orders.order(number, segment.era).rows(0, first, first + len(positions), epochs)
            return set_source(join_rows(row_slices, len(positions)), number)
        sources, lanes, indices, shared = self.orders.timeline.locate_sequences(segment, positions)
        groups = sources * self.orders.spec.lanes + lanes
        if shared:
            # Lent sequences arrive in any order, so runs of consecutive sequences are determined again.
            order = np.lexsort((indices, groups))
            changes = (np.diff(groups[order]) != 0) | (np.diff(indices[order]) != 1)
            changes |= indices[order[:-1]] < 0
            begins = np.flatnonzero(np.concatenate([[True], changes]))
        else:
            order = np.argsort(groups, kind="stable")
            begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
        group_rows = []
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
            group_start = order[begin]
            number, lane, first = (
                int(sources[group_start]),
                int(lanes[group_start]),
                int(indices[group_start]),
            )
            row_slices = (
                self.orders.order(number, segment.era).rows(lane, first, first + end - begin, epochs)
                if first >= 0
                else []
            )
            group_rows.append(set_source(join_rows(row_slices, end - begin), number))
        inverse_order = np.empty(len(order), np.int64)
        inverse_order[order] = np.arange(len(order))
        return reorder_rows(join_rows(group_rows, len(order)), inverse_order)

    def _mark_banned(self, rows: Rows, positions: NDArray[np.int64]) -> Rows:
        """Mark the spans of documents that are banned at their position."""
        for number, (position, name, numbers) in enumerate(self.orders.run_layout.bans):
            if not numbers or not len(positions) or positions[-1] < position:
                continue
            # A ban may list a million documents in ascending order, so its array is not rebuilt for each step.
            if number not in self._banned_documents:
                self._banned_documents[number] = np.array(numbers, np.int64)
            banned_documents = self._banned_documents[number]
            is_after_ban = np.repeat(positions >= position, np.diff(rows.pointers))
            is_after_ban &= rows.sources == self.orders.names.index(name)
            nearest = np.minimum(banned_documents.searchsorted(rows.documents), len(banned_documents) - 1)
            is_banned = is_after_ban & (banned_documents[nearest] == rows.documents)
            if is_banned.any():
                rows = rows.with_banned(is_banned if rows.banned is None else is_banned | rows.banned)
        return rows
