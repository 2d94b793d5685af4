"""Log of a run as columns, read on while it grows."""

from __future__ import annotations

import json
import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.analysis.compare import find_log_file, read_loss_curve
from batchloom.core.errors import InputError
from batchloom.core.settings import as_int
from batchloom.plan.packing import MAX_STEPS

Floats = NDArray[np.float64]
METRICS = ("loss", "tokens_per_s", "data_wait")
_CHUNK_BYTES = 1 << 24
# An axis cannot span larger numbers, and a logarithmic axis cannot show numbers below 1 / 1e300.
_LARGEST_NUMBER = 1e300


@dataclass(slots=True)
class LogColumns:
    """Content of a log; entry i of each column belongs to ``steps[i]``.

    Attributes:
        steps: numbers of steps, from 0, ascending.
        metrics: columns by name; NaN where the log has no finite number.
        source_tokens: of a mixture, the tokens of each source.
        offsets: byte offset of the line of each step; empty if lines are not read one by one.
        has_row_losses: 1 where the line holds the loss of each row.
        evaluations: (step, loss) of each evaluation.
        starts: first step of each resumed start.
        damaged_lines: numbers of the lines that are not entries.
        edits: entries of the plan's journal that the log records.
        planned_steps: steps of the complete run; None if the log does not say.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    metrics: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in METRICS})
    source_tokens: dict[str, array[float]] = field(default_factory=dict)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    has_row_losses: array[int] = field(default_factory=lambda: array("b"))
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    damaged_lines: list[int] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    planned_steps: int | None = None

    def add(self, entry: dict[str, Any], step: int, offset: int) -> None:
        """Append a step; steps that a resumed run repeats replace the earlier ones."""
        if self.steps and step <= self.steps[-1]:
            self._cut(bisect_left(self.steps, step))
        self.steps.append(step)
        self.offsets.append(offset)
        self.has_row_losses.append("row_loss" in entry)
        for name, column in self.metrics.items():
            column.append(as_number(entry.get(name)))
        sources = entry.get("sources")
        sources = sources if isinstance(sources, dict) else {}
        for name in sources:
            if name not in self.source_tokens:
                # A source that an edit adds served nothing before.
                self.source_tokens[name] = array("d", [0.0]) * (len(self.steps) - 1)
        for name, column in self.source_tokens.items():
            counts = sources.get(name, {"tokens": 0.0})
            column.append(as_number(counts.get("tokens")) if isinstance(counts, dict) else nan)

    def _cut(self, length: int) -> None:
        for numbers in (self.steps, self.offsets, self.has_row_losses):
            del numbers[length:]
        for column in (*self.metrics.values(), *self.source_tokens.values()):
            del column[length:]

    def find(self, step: int) -> int | None:
        """Return the index of a step; None if the log has no entry of it."""
        index = bisect_left(self.steps, step)
        return index if index < len(self.steps) and self.steps[index] == step else None


@dataclass(frozen=True, slots=True)
class LogView:
    """Columns of a log at one moment, as arrays; see ``LogColumns``.

    ``modified_at`` is the time of its last change, in seconds since 1970.
    """

    kind: str
    steps: NDArray[np.int64]
    metrics: dict[str, Floats]
    source_tokens: dict[str, Floats]
    row_loss_steps: NDArray[np.int64]
    evaluations: list[tuple[int, float]]
    starts: list[int]
    damaged_lines: list[int]
    planned_steps: int | None
    modified_at: float


def as_number(value: Any) -> float:
    """Return a number that can be drawn as float, and NaN for anything else."""
    if isinstance(value, (int, float)) and abs(value) <= _LARGEST_NUMBER:
        return float(value) if abs(value) * _LARGEST_NUMBER >= 1 else 0.0
    return nan


@final
class StepLog:
    """Incremental reader of a run's log.

    Each call reads the lines that ``batchloom train`` has appended. Logs of other trainers are read again if they
    changed.

    Args:
        path: folder or log of a run.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._columns = LogColumns()
        self._stamp: tuple[int, ...] = ()
        self._first_line = b""
        self._offset = self._lines = 0
        self._kind = ""

    def read(self) -> LogView:
        """Return the content of the log.

        Raises:
            InputMissingError: there is no log.
            InputError: it is not the log of a run.
        """
        with self._lock:
            self._read_on()
            return self._make_view()

    def read_edits(self) -> list[dict[str, Any]]:
        """Return the edits of the plan that the log records; none without a log."""
        with self._lock:
            try:
                self._read_on()
            except InputError:
                # The page of the run shows the error.
                return []
            return list(self._columns.edits)

    def _read_on(self) -> None:
        file = find_log_file(Path(self._path))
        status = file.stat()
        first_line = _read_first_line(file)
        is_same = first_line == self._first_line and status.st_size >= self._offset
        if self._kind != "batchloom" or not is_same or status.st_ino != self._stamp[0]:
            # A resumed run replaces its log. The log of a run that begins anew may have the same inode; its first
            # line differs, unless it has the settings of the run before.
            self._kind = "batchloom" if _is_own_entry(first_line) else ""
            self._first_line = first_line
            if self._kind or self._stamp != (status.st_ino, status.st_size, status.st_mtime_ns):
                self._columns = LogColumns()
                self._offset = 0
                self._lines = 0
        if self._kind:
            with file.open("rb") as opened:
                self._read_lines(opened)
        elif not self._columns.steps:
            self._read_curve()
        self._stamp = (status.st_ino, status.st_size, status.st_mtime_ns)

    def _read_curve(self) -> None:
        curve = read_loss_curve(self._path)
        self._columns.steps.extend(curve.steps)
        self._columns.metrics = {"loss": array("d", [as_number(loss) for loss in curve.losses])}
        self._columns.has_row_losses.extend([0] * len(curve.steps))

    def _read_lines(self, file: BinaryIO) -> None:
        """Read complete lines from the last position on; the last one may be unfinished."""
        file.seek(self._offset)
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._lines += 1
                self._add_line(line, self._offset)
                self._offset += len(line) + 1

    def _add_line(self, line: bytes, offset: int) -> None:
        columns = self._columns
        entry = parse_line(line)
        step = None if entry is None else entry.get("step")
        if entry is None or not isinstance(step, int) or not 0 <= step <= MAX_STEPS:
            if line.strip():
                columns.damaged_lines.append(self._lines)
        elif entry.get("kind") == "step":
            columns.add(entry, step, offset)
        elif entry.get("kind") == "val":
            while columns.evaluations and columns.evaluations[-1][0] >= step:
                columns.evaluations.pop()
            columns.evaluations.append((step, as_number(entry.get("loss"))))
        elif entry.get("kind") == "edit" and isinstance(edit := entry.get("edit"), dict):
            columns.edits.append(edit)
        elif entry.get("kind") == "start":
            if step:
                columns.starts.append(step)
            run = entry.get("run")
            columns.planned_steps = as_int(run.get("steps")) if isinstance(run, dict) else None

    def _make_view(self) -> LogView:
        columns = self._columns
        steps = np.array(columns.steps, np.int64)
        return LogView(
            kind=self._kind,
            steps=steps,
            metrics={name: np.array(column, np.float64) for name, column in columns.metrics.items()},
            source_tokens={name: np.array(column, np.float64) for name, column in columns.source_tokens.items()},
            row_loss_steps=steps[np.array(columns.has_row_losses, np.bool_)],
            evaluations=list(columns.evaluations),
            starts=sorted({*columns.starts}),
            damaged_lines=list(columns.damaged_lines),
            planned_steps=columns.planned_steps,
            modified_at=self._stamp[2] / 1e9,
        )

    def read_entry(self, step: int) -> dict[str, Any] | None:
        """Return the complete entry of a step; None if the log has none, or no lines."""
        with self._lock:
            index = self._columns.find(step)
            if index is None or not self._columns.offsets:
                return None
            with find_log_file(Path(self._path)).open("rb") as file:
                file.seek(self._columns.offsets[index])
                entry = parse_line(file.readline())
        # The run may have replaced its log since it was read.
        return entry if entry is not None and entry.get("step") == step else None


def _read_first_line(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.readline(_CHUNK_BYTES)


def _is_own_entry(line: bytes) -> bool:
    """Return whether a line is one that ``batchloom train`` writes."""
    entry = parse_line(line)
    return entry is not None and entry.get("kind") in ("start", "step", "val") and "origin" in entry


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it holds none."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            # The standard library also reads NaN and Infinity.
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return entry if isinstance(entry, dict) else None
