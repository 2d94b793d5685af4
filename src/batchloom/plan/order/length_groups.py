"""Steps of rows of about the same length, for batches that are padded instead of packed.

Positions of a run fall into windows of ``group_by_length`` steps. Inside a window the rows are taken from the longest
down and cut into steps, and its steps come in a shuffled order: positions are moved inside their window, and nothing
else changes. The idea is that of transformers' LengthGroupedSampler, whose batches come longest first inside each of
its windows, and of fairseq's batches by size.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.plan.order.row_windows import RowWindows
from batchloom.plan.packing import Rows, join_rows, reorder_rows, slice_rows

Ints = NDArray[np.int64]

_MAX_CACHED_WINDOWS = 2


def order_by_length(lengths: Ints, size: int, key: HashKey) -> Ints:
    """The order of a window's rows: row r of the window is number order[r] of the positions it holds.

    Rows that fill no whole step stay where they are, behind the others.

    Args:
        lengths: of each row, by position, int64 [rows].
        size: rows of a step.
        key: of the order of the steps.

    Returns:
        int64 [rows], a permutation.
    """
    steps = len(lengths) // size
    full_step_rows = steps * size
    longest_first = np.argsort(-lengths[:full_step_rows], kind="stable").reshape(steps, size)
    return np.concatenate([longest_first[shuffle_range(steps, key)].ravel(), np.arange(full_step_rows, len(lengths))])


@final
class LengthGroupedRows:
    """The rows of positions, moved inside their windows.

    Without ``group_by_length`` they stay where they are. Callers hold the lock of the orders.

    Args:
        windows: Gives the rows in their order before grouping.
    """

    def __init__(self, windows: RowWindows) -> None:
        self._windows, self._run = windows, windows.run
        self._steps = self._run.orders.spec.group_by_length
        # By the first position of a window: its order and its rows, which is 52 bytes a row.
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
        """Return where the row is served whose position before grouping is given; inverts :meth:`held`."""
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
        # One document is a row's only span; past the end of the run there is none.
        count = len(rows.lengths)
        key = derive_key(self._run.orders.spec.seed, "", "grouped steps", -1, begin)
        size = self._run.orders.course.range_at(begin).size
        order = np.arange(stop - begin)
        order[:count] = order_by_length(rows.lengths, size, key)
        window = (order, reorder_rows(rows, order))
        while len(self._cached_windows) >= _MAX_CACHED_WINDOWS:
            del self._cached_windows[next(iter(self._cached_windows))]
        self._cached_windows[begin] = window
        return window
