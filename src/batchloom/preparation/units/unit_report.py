"""What a unit tells the report: counts by step, drops with samples, lengths, languages, sources.

Two of them make one, in any grouping: what a report says depends on the order of the units alone.
"""

from collections import Counter
from collections.abc import Mapping
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.wording import escape_unprintable
from batchloom.preparation.units.stopwatch import StageTime, add_stage_times

# Samples of a reason, the first in input order; characters of the words of one.
MAX_SAMPLES = 5
MAX_SNIPPET_CHARACTERS = 200
_SCANNED_CHARACTERS = 4 * MAX_SNIPPET_CHARACTERS
# Bins of lengths: the one numbered b counts lengths of b binary digits.
_LENGTH_BINS = 33


class StepFlow(msgspec.Struct, frozen=True, kw_only=True):
    """What came to a step and what left it.

    Attributes:
        step: its name (``read``, a step of cleaning, ``tokenize``, ``dedup``, ``write``).
        documents_in, documents_out: documents; records where ``read`` begins.
        bytes_in, bytes_out: bytes of text in UTF-8; of the listed files where ``read`` begins, of
            tokens on disk where ``write`` ends.
        tokens_in, tokens_out: tokens; 0 before there are any.
        altered: documents that left it otherwise than they came.
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    altered: int = 0

    def __add__(self, other: "StepFlow") -> "StepFlow":
        return StepFlow(
            step=self.step,
            documents_in=self.documents_in + other.documents_in,
            documents_out=self.documents_out + other.documents_out,
            bytes_in=self.bytes_in + other.bytes_in,
            bytes_out=self.bytes_out + other.bytes_out,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            altered=self.altered + other.altered,
        )


class DropSample(msgspec.Struct, frozen=True):
    """A document that was left out: its source, its record there, its first words, and what was found."""

    source: str
    record: int
    words: str
    detail: str = ""


class DropCounts(msgspec.Struct, frozen=True):
    """Documents that were left out for one reason, and the first of them in input order."""

    step: str
    count: int
    samples: tuple[DropSample, ...] = ()

    def __add__(self, other: "DropCounts") -> "DropCounts":
        samples = (*self.samples, *other.samples)[:MAX_SAMPLES]
        return DropCounts(self.step, self.count + other.count, samples)


class SourceCounts(msgspec.Struct, frozen=True):
    """Documents of one source that were tokenized, the bytes of their texts, and their tokens."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        return SourceCounts(self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens)


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one unit tells, or several together.

    Attributes:
        flows: by step, in the order documents came to them; steps that nothing came to, too.
        drops: by reason.
        lengths: how many documents have a length in tokens of b binary digits, at place b.
        languages: documents by language, where one was told.
        sources: by name, in the order they were read.
        stages: where the time went.
    """

    flows: tuple[StepFlow, ...] = ()
    drops: dict[str, DropCounts] = {}
    lengths: tuple[int, ...] = (0,) * _LENGTH_BINS
    languages: dict[str, int] = {}
    sources: dict[str, SourceCounts] = {}
    stages: dict[str, StageTime] = {}


def format_snippet(text: str) -> str:
    """The beginning of a text as a report shows it, every character visible."""
    beginning = text[:_SCANNED_CHARACTERS].lstrip()[:MAX_SNIPPET_CHARACTERS]
    return escape_unprintable(beginning)[:MAX_SNIPPET_CHARACTERS]


@final
class UnitStatistics:
    """Counts what becomes of a unit's documents, told in input order."""

    def __init__(self) -> None:
        self._flows: dict[str, StepFlow] = {}
        self._drops: dict[str, DropCounts] = {}
        self._lengths = np.zeros(_LENGTH_BINS, np.int64)
        self._languages: Counter[str] = Counter()
        self._sources: dict[str, SourceCounts] = {}

    def flow(self, more: StepFlow) -> None:
        """Count documents that went through a step."""
        self._flows[more.step] = self._flows.get(more.step, StepFlow(step=more.step)) + more

    def dropped(self, step: str, reason: str, count: int = 1) -> None:
        """Count documents that a step left out."""
        self._drop(reason, DropCounts(step, count))

    def wants_sample(self, reason: str) -> bool:
        """Whether another sample of a reason would be kept."""
        drop_counts = self._drops.get(reason)
        return drop_counts is None or len(drop_counts.samples) < MAX_SAMPLES

    def sample(self, step: str, reason: str, sample: DropSample) -> None:
        """Keep a sample of a reason, if there is room; it counts no document."""
        name = sample.source.encode("utf-8", "replace").decode()
        words, detail = format_snippet(sample.words), format_snippet(sample.detail)
        short_sample = DropSample(name, sample.record, words, detail)
        self._drop(reason, DropCounts(step, 0, (short_sample,)))

    def lengths(self, lengths: NDArray[np.integer]) -> None:
        """Count documents by their lengths in tokens, uint32 [documents]."""
        # The exponent of a float is the number of binary digits, and 53 of them are exact.
        digits = np.frexp(lengths.astype(np.float64))[1]
        self._lengths += np.bincount(digits, minlength=_LENGTH_BINS)

    def languages(self, counts: Mapping[str, int]) -> None:
        """Count documents by language."""
        self._languages.update(counts)

    def source(self, name: str, more: SourceCounts) -> None:
        """Count documents of a source."""
        self._sources[name] = self._sources.get(name, SourceCounts()) + more

    def join(self, report: UnitReport) -> None:
        """Count what another unit told, which comes after what is counted."""
        for flow in report.flows:
            self.flow(flow)
        for reason, dropped in report.drops.items():
            self._drop(reason, dropped)
        self._lengths += report.lengths
        self.languages(report.languages)
        for name, counts in report.sources.items():
            self.source(name, counts)

    def _drop(self, reason: str, more: DropCounts) -> None:
        self._drops[reason] = self._drops.get(reason, DropCounts(more.step, 0)) + more

    def report(self, stages: Mapping[str, StageTime]) -> UnitReport:
        """What the unit tells, with where its time went."""
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
    """Units together, in the order of their numbers, whenever each of them comes.

    What is held is one report, and those of units that came before an earlier one.
    """

    def __init__(self) -> None:
        self._statistics, self._stages = UnitStatistics(), dict[str, StageTime]()
        self._waiting: dict[int, UnitReport] = {}
        self._next = 0

    def add(self, number: int, report: UnitReport) -> None:
        """Take the report of a unit; each number once."""
        self._waiting[number] = report
        while (next_report := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._statistics.join(next_report)
            self._stages = add_stage_times(self._stages, next_report.stages)

    def report(self) -> UnitReport:
        """What all units together tell."""
        if self._waiting:
            raise AssertionError(f"unit {self._next} has told nothing")
        return self._statistics.report(self._stages)
