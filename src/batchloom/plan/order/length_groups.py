"""Steps of rows of about the same length, for batches that are padded instead of packed.

Positions of a run fall into windows of ``group_by_length`` steps. Inside a window the rows are taken from the longest
down and cut into steps, and its steps come in a shuffled order: positions are moved inside their window, and nothing
else changes. The idea is that of transformers' LengthGroupedSampler, whose batches come longest first inside each of
its windows, and of fairseq's batches by size.
"""

from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.fingerprint import key128
from batchloom.core.keyed_hashing import Key, shuffled
from batchloom.plan.order.timeline import Course
from batchloom.plan.packing import Rows, inside_window, join_rows, reorder_rows, slice_rows

if TYPE_CHECKING:
    from batchloom.plan.order.plan import Plan
    from batchloom.plan.order.row_windows import Windows

Ints = NDArray[np.int64]

_KEPT = 2


def by_length(lengths: Ints, size: int, key: Key) -> Ints:
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
    whole = steps * size
    longest_first = np.argsort(-lengths[:whole], kind="stable").reshape(steps, size)
    return np.concatenate(
        [longest_first[shuffled(steps, key)].ravel(), np.arange(whole, len(lengths))]
    )


@final
class Grouped:
    """The rows of a plan's positions, moved inside their windows; without any, as they are.

    Args:
        plan: the order; whoever asks holds its lock.
        windows: what gives the rows in the order from before.
    """

    def __init__(self, plan: "Plan", windows: "Windows") -> None:
        self._plan, self._windows = plan, windows
        self._steps = plan.spec.group_by_length
        # By the first position of a window: its order and its rows, which is 52 bytes a row.
        self._kept: dict[int, tuple[Ints, Rows]] = {}

    def window(self, position: int) -> tuple[int, int]:
        """First and last + 1 of the positions of the window that holds one."""
        if not self._steps:
            return position, position + 1
        at = self._plan.course.stretch_at(position)
        size = self._steps * at.size
        begin = position - (position - at.position) % size
        stop = begin + size
        if self._plan.spec.steps is not None:
            # The last window of a run is as long as the run.
            end = self._plan.course.position_of(self._plan.spec.steps)
            begin, stop = (begin, min(stop, end)) if position < end else (max(begin, end), stop)
        return begin, stop

    def rows(self, start: int, stop: int, part: tuple[int, int]) -> Rows:
        """What ``Plan.rows`` gives."""
        if not self._steps or start == stop:
            return self._windows.rows(start, stop, part)
        pieces, position = [], start
        while position < stop:
            begin, end = self.window(position)
            _, rows = self._entered(begin, end)
            pieces.append(slice_rows(rows, position - begin, min(stop, end) - begin))
            position = end
        return join_rows(pieces, stop - start)

    def held(self, position: int) -> int:
        """The position that the row of one has in the order from before."""
        if not self._steps:
            return position
        begin, stop = self.window(position)
        return begin + int(self._entered(begin, stop)[0][position - begin])

    def served(self, position: int) -> int:
        """Where a position of the order from before is served: the way back of :meth:`held`."""
        if not self._steps:
            return position
        begin, stop = self.window(position)
        order = self._entered(begin, stop)[0]
        return begin + int(np.flatnonzero(order == position - begin)[0])

    def _entered(self, begin: int, stop: int) -> tuple[Ints, Rows]:
        """The order of a window and its rows; the latest are kept."""
        known = self._kept.get(begin)
        if known is not None:
            return known
        rows = self._windows.rows(begin, stop, (0, 1))
        # One document is a row's only span; past the end of the run there is none.
        count = len(rows.lengths)
        key = key128(self._plan.spec.seed, "", "grouped steps", -1, begin)
        size = self._plan.course.stretch_at(begin).size
        order = np.arange(stop - begin)
        order[:count] = by_length(rows.lengths, size, key)
        entered = (order, reorder_rows(rows, order))
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[begin] = entered
        return entered


def check_windows(course: Course, steps: int) -> None:
    """Refuse stages that begin inside a window; edits were looked at before.

    Args:
        course: of the run.
        steps: of a window; 0 for none.

    Raises:
        PlanError: names the next step one can begin at.
    """
    for change in course.changes if steps else ():
        step, _ = course.step_at(change.position)
        if step % steps:
            raise PlanError(
                f"A stage of the mixture begins at step {step:,}, {inside_window(step, steps)}"
            )
