"""Length-grouped steps, for batches that are padded instead of packed.

The positions of a run are divided into windows of ``group_by_length`` steps. Inside a window the rows are sorted
from the longest down and cut into steps, whose order is shuffled. Positions move inside their window; nothing
else changes. The idea is that of transformers' LengthGroupedSampler, whose batches come longest first inside each
of its windows, and of fairseq's batches by size.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.plan.order.row_windows import RowWindows
from batchloom.plan.packing.rows import Rows, join_rows, reorder_rows, slice_rows

Ints = NDArray[np.int64]

_MAX_CACHED_WINDOWS = 2


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
class LengthGroupedRows:
    """Rows of positions, moved inside their windows.

    Without ``group_by_length`` they keep their positions. Callers must hold the lock of the orders.
    """

    def __init__(self, windows: RowWindows) -> None:
        self._windows, self._run = windows, windows.run
        self._steps = self._run.orders.spec.group_by_length
        # Order and rows of a window by its first position; a row takes 52 bytes.
        self._cached_windows: dict[int, tuple[Ints, Rows]] = {}

    def rows(self, start: int, stop: int, part: tuple[int, int]) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``, or of a part of them."""
        if not self._steps or start == stop:
            return self._windows.rows(start, stop, part)
        row_slices, position = [], start
        while position < stop:
            begin, end = self._run.window(position)
            _, rows = self._get_window(begin, end)
            row_slices.append(slice_rows(rows, position - begin, min(stop, end) - begin))
            position = end
        return join_rows(row_slices, stop - start)

    def find_original_position(self, position: int) -> int:
        """Return the position before grouping of the row at a position."""
        if not self._steps:
            return position
        begin, stop = self._run.window(position)
        return begin + int(self._get_window(begin, stop)[0][position - begin])

    def find_served_position(self, position: int) -> int:
        """Return the served position of a row, given its position before grouping.

        It is the inverse of :meth:`find_original_position`.
        """
        if not self._steps:
            return position
        begin, stop = self._run.window(position)
        order = self._get_window(begin, stop)[0]
        return begin + int(np.flatnonzero(order == position - begin)[0])

    def _get_window(self, begin: int, stop: int) -> tuple[Ints, Rows]:
        """Return the order of a window and its rows; the latest are cached."""
        cached_window = self._cached_windows.get(begin)
        if cached_window is not None:
            return cached_window
        rows = self._windows.rows(begin, stop, (0, 1))
        # Each row has one span, its document. Rows past the end of the run have none.
        count = len(rows.lengths)
        key = derive_key(self._run.orders.spec.seed, "", "grouped steps", -1, begin)
        size = self._run.orders.run_layout.range_at(begin).size
        order = np.arange(stop - begin)
        order[:count] = order_by_length(rows.lengths, size, key)
        window = (order, reorder_rows(rows, order))
        while len(self._cached_windows) >= _MAX_CACHED_WINDOWS:
            del self._cached_windows[next(iter(self._cached_windows))]
        self._cached_windows[begin] = window
        return window
