"""Where what reached a model is not what the plan says, and what it is instead."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

import batchloom
from batchloom import Loader
from batchloom.analysis.compare.witness import hash_row, iter_expected_entries
from batchloom.analysis.explanation import ExplainedSequence
from batchloom.core.wording import format_count

BatchEntry = Mapping[str, Any]
# Steps behind the run that are looked at, too: a trainer may fetch ahead.
LOOKAHEAD_STEPS = 8
_MAX_LISTED = 4
_TEXT_CHARACTERS = 40


@dataclass(frozen=True, slots=True, order=True)
class RowLocation:
    """A row of a run: its step, its rank, and its place in the batch of that rank."""

    step: int
    rank: int
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of step {self.step} on rank {self.rank}"


@dataclass(frozen=True, slots=True)
class BatchDifference:
    """The first batch that is not the plan's.

    Attributes:
        step, rank: where.
        kind: ``ended`` (no such step was made), ``more`` (steps past the run's), ``positions``, ``cut``, ``width``,
            ``order`` (the plan's rows, in another order), ``batch`` (another batch of the run), ``dropped``,
            ``repeated``, ``rows`` (other rows of the run) or ``unknown`` (rows that are nowhere in the run).
        sentence: what came instead.
        rows: of the plan's batch, those that did not come as they are.
        found: where in the run each of the rows that came stands; None for nowhere.
        planned: the documents of the first of ``rows``, as ``batchloom explain`` tells them.
        came: the documents of what came in their place, where that is of the run.
    """

    step: int
    rank: int
    kind: str
    sentence: str
    rows: tuple[int, ...]
    found: tuple[RowLocation | None, ...]
    planned: tuple[ExplainedSequence, ...]
    came: tuple[ExplainedSequence, ...]


@final
class ExpectedBatches:
    """What the plain loader gives to every rank, and where each of its rows stands.

    Args:
        loaders: of each rank, ``output="numpy"``, of a run that is longer than ``steps`` by ``LOOKAHEAD_STEPS``.
        steps: of the run.

    Attributes:
        entries: of each rank, of each step up to ``LOOKAHEAD_STEPS`` past the end; see ``StepHash.told``.
        steps: of the run.
    """

    def __init__(self, loaders: Sequence[Loader], steps: int) -> None:
        self._loaders, self.steps = loaders, steps
        self.entries = [
            list(iter_expected_entries(loader, steps + LOOKAHEAD_STEPS)) for loader in loaders
        ]
        self._rows: dict[str, list[RowLocation]] = defaultdict(list)
        self._batches: dict[str, list[RowLocation]] = defaultdict(list)
        for rank, told in enumerate(self.entries):
            for step, entry in enumerate(told):
                self._batches[entry["hash"]].append(RowLocation(step, rank, 0))
                for row, (_, ids, _) in enumerate(entry["each"]):
                    self._rows[ids].append(RowLocation(step, rank, row))

    def row(self, ids: str, near: RowLocation) -> RowLocation | None:
        """Where the row of a hash stands, as near as there is one; None for nowhere."""
        return _find_nearest(self._rows.get(ids, []), near)

    def batch(self, name: str, near: RowLocation) -> RowLocation | None:
        """Where the batch of a hash stands, as near as there is one; None for nowhere."""
        return _find_nearest(self._batches.get(name, []), near)

    def ids(self, step: int, rank: int) -> Any:
        """The ids of a batch, [R, S]."""
        return np.asarray(self._loaders[rank].batch(step)["input_ids"], np.int64)

    def explain(
        self, step: int, rank: int, row: int | None = None, text: int = _TEXT_CHARACTERS
    ) -> tuple[ExplainedSequence, ...]:
        """The documents of a batch, or of one of its rows."""
        return batchloom.explain(self._loaders[rank], step, rank=rank, row=row, text=text)


def _find_nearest(places: Sequence[RowLocation], near: RowLocation) -> RowLocation | None:
    def far(one: RowLocation) -> tuple[int, int, int]:
        return abs(one.step - near.step), abs(one.rank - near.rank), abs(one.row - near.row)

    return min(places, key=far, default=None)


def find_differing_batches(
    wanted: ExpectedBatches, came: Sequence[Sequence[BatchEntry]]
) -> list[tuple[int, int]]:
    """The (step, rank) of every batch that is not the plan's, in order; steps that were not made as well."""
    last = max([wanted.steps, *(len(told) for told in came)])
    found = []
    for step in range(last):
        for rank, planned in enumerate(wanted.entries):
            told = came[rank] if rank < len(came) else []
            name = told[step]["hash"] if step < len(told) else None
            if name != (planned[step]["hash"] if step < wanted.steps else None):
                found.append((step, rank))
    return found


def explain_difference(
    wanted: ExpectedBatches, came: Sequence[Sequence[BatchEntry]], step: int, rank: int
) -> BatchDifference:
    """What stands at a place that differs, and what came."""
    told = came[rank] if rank < len(came) else []
    if step >= len(told):
        made = f"{format_count(len(told), 'step')} of {wanted.steps:,}"
        sentence = f"it made {made}" if rank < len(came) else "this rank told of nothing"
        planned = wanted.explain(step, rank)[:_MAX_LISTED]
        rows = tuple(range(len(wanted.entries[rank][step]["each"])))
        return BatchDifference(step, rank, "ended", sentence, rows, (), planned, ())
    if step >= wanted.steps:
        sentence = f"it made {format_count(len(told), 'step')}; the run has {wanted.steps:,}"
        return BatchDifference(step, rank, "more", sentence, (), (), (), ())
    return _BatchComparison(wanted, step, rank, told[step]).difference()


@final
class _BatchComparison:
    """One batch that came, beside the one that should have."""

    def __init__(self, wanted: ExpectedBatches, step: int, rank: int, entry: BatchEntry) -> None:
        self._wanted, self._step, self._rank, self._entry = wanted, step, rank, entry
        self._mine = [tuple(one) for one in wanted.entries[rank][step]["each"]]
        self._came = [tuple(one) for one in entry["each"]]
        self._found = tuple(
            wanted.row(ids, RowLocation(step, rank, row))
            for row, (_, ids, _) in enumerate(self._came)
        )

    def difference(self) -> BatchDifference:
        kind, sentence = (
            self._positions()
            or self._width()
            or self._order()
            or self._batch()
            or self._few()
            or self._rows()
        )
        pairs = enumerate(self._mine)
        rows = tuple(row for row, one in pairs if row >= len(self._came) or self._came[row] != one)
        planned: list[ExplainedSequence] = []
        came: list[ExplainedSequence] = []
        for row in rows[:_MAX_LISTED]:
            planned += self._wanted.explain(self._step, self._rank, row)
            place = self._found[row] if row < len(self._found) else None
            if place is not None and place != RowLocation(self._step, self._rank, row):
                came += self._wanted.explain(place.step, place.rank, place.row)
        told = (tuple(planned), tuple(came))
        return BatchDifference(self._step, self._rank, kind, sentence, rows, self._found, *told)

    def _positions(self) -> tuple[str, str] | None:
        if [one[:2] for one in self._mine] != [one[:2] for one in self._came]:
            return None
        rows = [row for row, one in enumerate(self._mine) if one != self._came[row]]
        where = f"the ids are the plan's; the positions of {_format_row_numbers(rows)}"
        if all(self._came[row][2] == hash_row(np.arange(self._mine[row][0])) for row in rows):
            return (
                "positions",
                f"{where} do not restart where documents begin: documents of a row see each other",
            )
        return "positions", f"{where} are others"

    def _width(self) -> tuple[str, str] | None:
        """Rows that are narrower or wider, and otherwise the plan's."""
        planned, widths = self._mine[0][0], {one[0] for one in self._came}
        if len(self._mine) != len(self._came) or widths == {planned}:
            return None
        told = " and ".join(f"{width:,}" for width in sorted(widths))
        ids = self._wanted.ids(self._step, self._rank)
        cut = all(
            width <= planned and hash_row(ids[row][:width]) == name
            for row, (width, name, _) in enumerate(self._came)
        )
        if not cut:
            return "width", f"its rows are {told} wide; the plan's are {planned:,}"
        explained = self._wanted.explain(self._step, self._rank, text=0)
        lost = sum(
            max(0, one.seq_len - one.padding - self._came[row][0])
            for row, one in enumerate(explained)
        )
        what = f"{format_count(lost, 'token')} of documents were" if lost else "padding was"
        return "cut", f"{what} cut off: its rows are {told} wide; the plan's are {planned:,}"

    def _order(self) -> tuple[str, str] | None:
        mine, came = ([one[1] for one in each] for each in (self._mine, self._came))
        if sorted(mine) != sorted(came):
            return None
        moved = [row for row, name in enumerate(came) if name != mine[row]]
        said = [f"its row {row} is the plan's row {mine.index(came[row])}" for row in moved]
        return "order", f"the plan's rows came in another order: {_format_list(said)}"

    def _batch(self) -> tuple[str, str] | None:
        place = self._wanted.batch(self._entry["hash"], RowLocation(self._step, self._rank, 0))
        if place is None:
            return None
        where = [f"step {place.step}"] if place.step != self._step else []
        where += [f"rank {place.rank}"] if place.rank != self._rank else []
        return "batch", f"it got the batch of {' on '.join(where)}"

    def _few(self) -> tuple[str, str] | None:
        """All rows are of this batch: some did not come, or came twice."""
        mine, came = ([one[1] for one in each] for each in (self._mine, self._came))
        if not set(came) <= set(mine):
            return None
        gone = [row for row, name in enumerate(mine) if name not in came]
        twice = [row for row, name in enumerate(mine) if came.count(name) > mine.count(name)]
        again = f"{_format_row_numbers(twice)} of the plan came again" if twice else ""
        lacks = f"{_format_row_numbers(gone)} of the plan did not come" if gone else ""
        return "repeated" if twice else "dropped", "; ".join(filter(None, (again, lacks)))

    def _rows(self) -> tuple[str, str]:
        last = self._wanted.steps + LOOKAHEAD_STEPS - 1
        if not any(self._found):
            rows = format_count(len(self._came), "row")
            sentence = (
                f"none of its {rows} is in any step from 0 to {last}: other data, or changed tokens"
            )
            return "unknown", sentence
        said = []
        for row, place in enumerate(self._found):
            if place is None:
                said.append(f"its row {row} is in no step from 0 to {last}")
            elif (place.step, place.rank) != (self._step, self._rank):
                said.append(f"its row {row} is {place}")
        missing = len(self._mine) - len(self._came)
        less = f"; {format_count(missing, 'row')} less than the plan's came" if missing > 0 else ""
        return "rows", _format_list(said) + less


def _format_row_numbers(rows: Sequence[int]) -> str:
    """``row 1``; ``rows 1, 2 and 5 more``."""
    listed = _format_list([str(row) for row in rows])
    return f"row {listed}" if len(rows) == 1 else f"rows {listed}"


def _format_list(said: Sequence[str]) -> str:
    more = len(said) - _MAX_LISTED
    return ", ".join(said[:_MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")
