"""Statistics of a unit for the report: times, drops, lengths, bad records.

Merging is associative: a report depends only on the order of the units. Stages are timed per batch, so that the
clock is read at most some hundred times per second.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Self, TypeVar, final, get_args

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.wording import escape_unprintable
from batchloom.sources import ReadRules, locate_record
from batchloom.sources.files import Source

T = TypeVar("T")

TimedStage = Literal[
    "list",
    "sample",
    "find repeated pieces",
    "read",
    "clean",
    "hash",
    "encode",
    "write temporary files",
    "find duplicates",
    "resolve duplicates",
    "write shards",
    "finish",
]
# In the order in which a job runs them.
STAGES: tuple[TimedStage, ...] = get_args(TimedStage)
_END = object()


class _Sums(msgspec.Struct, frozen=True):
    """Numbers that are added field by field."""

    def __add__(self, other: Self) -> Self:
        numbers = [name for name in self.__struct_fields__ if name != "step"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in numbers})


class StageTime(_Sums, frozen=True):
    """Time of a stage, and the data processed meanwhile.

    Seconds are summed over workers for stages of units, and wall-clock for stages of the job.
    """

    seconds: float = 0.0
    bytes: int = 0
    documents: int = 0


def add_stage_times(first: Mapping[str, StageTime], second: Mapping[str, StageTime]) -> dict[str, StageTime]:
    """Add two timings, in the order of ``STAGES``, unknown stages last."""
    names = [*STAGES, *sorted({*first, *second} - {*STAGES})]
    none = StageTime()
    return {name: first.get(name, none) + second.get(name, none) for name in names if name in first or name in second}


@final
class Stopwatch:
    """Thread-safe accumulator of stage times.

    Concurrent stages count separately, so their sum may exceed the wall-clock time.
    """

    def __init__(self) -> None:
        self._stage_times: dict[str, StageTime] = {}
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: TimedStage, size: int = 0, documents: int = 0) -> Iterator[None]:
        """Time the body of a ``with`` statement, also if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began, size, documents)

    def time_each(self, stage: TimedStage, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, timing how long it takes to get each but not to process it."""
        source = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(source, _END)
            finally:
                self.add(stage, time.perf_counter() - began)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # _END is never yielded

    def add(self, stage: TimedStage, seconds: float, size: int = 0, documents: int = 0) -> None:
        more = StageTime(seconds, size, documents)
        with self._lock:
            self._stage_times[stage] = self._stage_times.get(stage, StageTime()) + more

    def get_stage_times(self) -> dict[str, StageTime]:
        """Return the time of each stage so far, in the order of ``STAGES``."""
        with self._lock:
            return add_stage_times(self._stage_times, {})


# Maximum samples per reason (the first in input order), and maximum characters of a sample.
MAX_SAMPLES = 5
MAX_SNIPPET_CHARACTERS = 200
_SCANNED_CHARACTERS = 4 * MAX_SNIPPET_CHARACTERS
# Histogram bins of lengths: bin b counts lengths of b binary digits.
_LENGTH_BINS = 33


class StepFlow(_Sums, frozen=True, kw_only=True):
    """Documents, bytes of text and tokens that enter and leave a step.

    Of ``read``, ``documents_in`` counts records and ``bytes_in`` bytes of the listed files; of ``write``,
    ``bytes_out`` counts token bytes on disk. ``altered`` counts documents that the step changed.
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    altered: int = 0


class DropSample(msgspec.Struct, frozen=True):
    """Dropped document: its source, its record there, its first words, and details."""

    source: str
    record: int
    words: str
    detail: str = ""


class DropCounts(msgspec.Struct, frozen=True):
    """Documents dropped for one reason, and the first of them in input order."""

    step: str
    count: int
    samples: tuple[DropSample, ...] = ()

    def __add__(self, other: "DropCounts") -> "DropCounts":
        return DropCounts(self.step, self.count + other.count, (*self.samples, *other.samples)[:MAX_SAMPLES])


class SourceCounts(_Sums, frozen=True):
    """Tokenized documents of one source, the bytes of their texts, and their tokens."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one or more units; flows include steps without documents."""

    flows: tuple[StepFlow, ...] = ()
    drops: dict[str, DropCounts] = {}
    # Number of documents whose token count has b binary digits, at index b.
    lengths: tuple[int, ...] = (0,) * _LENGTH_BINS
    languages: dict[str, int] = {}
    sources: dict[str, SourceCounts] = {}
    stages: dict[str, StageTime] = {}


def format_snippet(text: str) -> str:
    """Return the beginning of a text for a report, with every character visible."""
    beginning = text[:_SCANNED_CHARACTERS].lstrip()[:MAX_SNIPPET_CHARACTERS]
    return escape_unprintable(beginning)[:MAX_SNIPPET_CHARACTERS]


@final
class UnitStatistics:
    """Accumulator of a unit's statistics, fed in input order."""

    def __init__(self) -> None:
        self._flows: dict[str, StepFlow] = {}
        self._drops: dict[str, DropCounts] = {}
        self._lengths = np.zeros(_LENGTH_BINS, np.int64)
        self._languages: Counter[str] = Counter()
        self._sources: dict[str, SourceCounts] = {}

    def flow(self, more: StepFlow) -> None:
        self._flows[more.step] = self._flows.get(more.step, StepFlow(step=more.step)) + more

    def dropped(self, step: str, reason: str, count: int = 1, sample: DropSample | None = None) -> None:
        """Add documents that a step dropped; the first samples of a reason stay."""
        samples: tuple[DropSample, ...] = ()
        if sample is not None and len(self._get_drops(step, reason).samples) < MAX_SAMPLES:
            name = sample.source.encode("utf-8", "replace").decode()
            samples = (DropSample(name, sample.record, format_snippet(sample.words), format_snippet(sample.detail)),)
        self._drops[reason] = self._get_drops(step, reason) + DropCounts(step, count, samples)

    def _get_drops(self, step: str, reason: str) -> DropCounts:
        return self._drops.get(reason, DropCounts(step, 0))

    def lengths(self, lengths: NDArray[np.integer]) -> None:
        """Add documents by their lengths in tokens, uint32 [documents]."""
        # The exponent of a float64 is the number of binary digits, exact up to 53 bits.
        digits = np.frexp(lengths.astype(np.float64))[1]
        self._lengths += np.bincount(digits, minlength=_LENGTH_BINS)

    def languages(self, counts: Mapping[str, int]) -> None:
        self._languages.update(counts)

    def source(self, name: str, more: SourceCounts) -> None:
        self._sources[name] = self._sources.get(name, SourceCounts()) + more

    def join(self, report: UnitReport) -> None:
        for flow in report.flows:
            self.flow(flow)
        for reason, dropped in report.drops.items():
            self._drops[reason] = self._get_drops(dropped.step, reason) + dropped
        self._lengths += report.lengths
        self.languages(report.languages)
        for name, counts in report.sources.items():
            self.source(name, counts)

    def report(self, stages: Mapping[str, StageTime]) -> UnitReport:
        return UnitReport(
            flows=tuple(self._flows.values()),
            drops=dict(self._drops),
            lengths=tuple(self._lengths.tolist()),
            languages=dict(self._languages),
            sources=dict(self._sources),
            stages=add_stage_times(stages, {}),
        )


@final
class UnitReportMerger:
    """Merger of unit reports in unit order, whatever order they arrive in.

    Memory holds one merged report, and the reports that wait for an earlier unit.
    """

    def __init__(self) -> None:
        self._statistics = UnitStatistics()
        self._stages = dict[str, StageTime]()
        self._waiting: dict[int, UnitReport] = {}
        self._next = 0

    def add(self, number: int, report: UnitReport) -> None:
        self._waiting[number] = report
        while (next_report := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._statistics.join(next_report)
            self._stages = add_stage_times(self._stages, next_report.stages)

    def report(self) -> UnitReport:
        if self._waiting:
            raise AssertionError(f"unit {self._next} has no report")
        return self._statistics.report(self._stages)


# Kind of reason to (number of bad records, reason of the first one).
ReasonCounts = dict[str, tuple[int, str]]
# Maximum number of counted kinds; an input with more has no common cause.
_MAX_REASONS = 32
_BUDGET_NOTE = "--max-bad is meant for a few bad records, not for a fault in many"
# Values of single records inside a reason: numbers and quoted texts.
_VALUE_PATTERN = re.compile(r"\d[\d,]*|'[^']*'")


def count_reason(reasons: ReasonCounts, reason: str, count: int = 1) -> None:
    """Count bad records by reason, ignoring values that differ between records."""
    kind = _VALUE_PATTERN.sub("0", reason)
    if kind in reasons or len(reasons) < _MAX_REASONS:
        previous_count, first = reasons.get(kind, (0, reason))
        reasons[kind] = previous_count + count, first


def describe_bad_records(bad: float, records: int, reasons: Mapping[str, tuple[int, str]], first: str = "") -> str:
    """Return what to do about too many bad records.

    Args:
        bad: number of bad records.
        records: number of all records.
        reasons: bad records by kind of reason, as far as counted.
        first: description of the first bad record, if the user has just read it.
    """
    if 20 * bad <= records:
        return "fix the input, or raise the budget, for example --max-bad 5%"
    count, reason = max(reasons.values(), default=(0, ""), key=lambda one: one[0])
    if not reason:
        return f"fix the input: {_BUDGET_NOTE}"
    is_first_fault = _VALUE_PATTERN.sub("0", reason) in _VALUE_PATTERN.sub("0", first)
    fault = "this fault" if is_first_fault else "the most common fault"
    reason_suffix = "" if is_first_fault else f" ({reason})"
    verb = "has" if count == 1 else "have"
    return f"fix {fault}, which {count:,} of them {verb}{reason_suffix}; {_BUDGET_NOTE}"


def encode_quarantine_line(source: Source, rules: ReadRules, before: int, bad: BadRecord) -> bytes:
    """Return a JSON line of a bad record after ``before`` records of other parts."""
    line, row = locate_record(source, rules, before, bad)
    facts = {
        "source": source.name,
        "line": line,
        "row": row,
        "column": bad.column,
        "offset": bad.offset,
        "reason": bad.reason,
        "snippet": bad.snippet,
    }
    return msgspec.json.encode(facts) + b"\n"
