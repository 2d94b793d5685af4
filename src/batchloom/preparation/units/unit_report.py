"""What a unit tells the report: counts by step, drops with samples, lengths, languages, sources.

Two of them make one, in any grouping: what a report says depends on the order of the units alone.
"""

from collections import Counter
from collections.abc import Mapping
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.wording import visible
from batchloom.preparation.units.stopwatch import Spent, added

# Samples of a reason, the first in input order; characters of the words of one.
MOST_SAMPLES = 5
MOST_WORDS = 200
_LOOKED_AT = 4 * MOST_WORDS
# Bins of lengths: the one numbered b counts lengths of b binary digits.
_BINS = 33


class Flow(msgspec.Struct, frozen=True, kw_only=True):
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

    def __add__(self, other: "Flow") -> "Flow":
        return Flow(
            step=self.step,
            documents_in=self.documents_in + other.documents_in,
            documents_out=self.documents_out + other.documents_out,
            bytes_in=self.bytes_in + other.bytes_in,
            bytes_out=self.bytes_out + other.bytes_out,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            altered=self.altered + other.altered,
        )


class Sample(msgspec.Struct, frozen=True):
    """A document that was left out: its source, its record there, its first words, and what was found."""

    source: str
    record: int
    words: str
    detail: str = ""


class Dropped(msgspec.Struct, frozen=True):
    """Documents that were left out for one reason, and the first of them in input order."""

    step: str
    count: int
    samples: tuple[Sample, ...] = ()

    def __add__(self, other: "Dropped") -> "Dropped":
        samples = (*self.samples, *other.samples)[:MOST_SAMPLES]
        return Dropped(self.step, self.count + other.count, samples)


class SourceCounts(msgspec.Struct, frozen=True):
    """Documents of one source that were tokenized, the bytes of their texts, and their tokens."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        return SourceCounts(
            self.documents + other.documents, self.bytes + other.bytes, self.tokens + other.tokens
        )


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

    flows: tuple[Flow, ...] = ()
    drops: dict[str, Dropped] = {}
    lengths: tuple[int, ...] = (0,) * _BINS
    languages: dict[str, int] = {}
    sources: dict[str, SourceCounts] = {}
    stages: dict[str, Spent] = {}


def first_words(text: str) -> str:
    """The beginning of a text as a report shows it, every character visible."""
    beginning = text[:_LOOKED_AT].lstrip()[:MOST_WORDS]
    return visible(beginning)[:MOST_WORDS]


@final
class UnitTally:
    """Counts what becomes of a unit's documents, told in input order."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._drops: dict[str, Dropped] = {}
        self._lengths = np.zeros(_BINS, np.int64)
        self._languages: Counter[str] = Counter()
        self._sources: dict[str, SourceCounts] = {}

    def flow(self, more: Flow) -> None:
        """Count documents that went through a step."""
        self._flows[more.step] = self._flows.get(more.step, Flow(step=more.step)) + more

    def dropped(self, step: str, reason: str, count: int = 1) -> None:
        """Count documents that a step left out."""
        self._drop(reason, Dropped(step, count))

    def wants_sample(self, reason: str) -> bool:
        """Whether another sample of a reason would be kept."""
        found = self._drops.get(reason)
        return found is None or len(found.samples) < MOST_SAMPLES

    def sample(self, step: str, reason: str, sample: Sample) -> None:
        """Keep a sample of a reason, if there is room; it counts no document."""
        name = sample.source.encode("utf-8", "replace").decode()
        words, detail = first_words(sample.words), first_words(sample.detail)
        cut = Sample(name, sample.record, words, detail)
        self._drop(reason, Dropped(step, 0, (cut,)))

    def lengths(self, lengths: NDArray[np.integer]) -> None:
        """Count documents by their lengths in tokens, uint32 [documents]."""
        # The exponent of a float is the number of binary digits, and 53 of them are exact.
        digits = np.frexp(lengths.astype(np.float64))[1]
        self._lengths += np.bincount(digits, minlength=_BINS)

    def languages(self, found: Mapping[str, int]) -> None:
        """Count documents by language."""
        self._languages.update(found)

    def source(self, name: str, more: SourceCounts) -> None:
        """Count documents of a source."""
        self._sources[name] = self._sources.get(name, SourceCounts()) + more

    def join(self, one: UnitReport) -> None:
        """Count what another unit told, which comes after what is counted."""
        for flow in one.flows:
            self.flow(flow)
        for reason, dropped in one.drops.items():
            self._drop(reason, dropped)
        self._lengths += one.lengths
        self.languages(one.languages)
        for name, counts in one.sources.items():
            self.source(name, counts)

    def _drop(self, reason: str, more: Dropped) -> None:
        self._drops[reason] = self._drops.get(reason, Dropped(more.step, 0)) + more

    def report(self, stages: Mapping[str, Spent]) -> UnitReport:
        """What the unit tells, with where its time went."""
        return UnitReport(
            flows=tuple(self._flows.values()),
            drops=dict(self._drops),
            lengths=tuple(self._lengths.tolist()),
            languages=dict(self._languages),
            sources=dict(self._sources),
            stages=added(stages, {}),
        )


@final
class Merging:
    """Units together, in the order of their numbers, whenever each of them comes.

    What is held is one report, and those of units that came before an earlier one.
    """

    def __init__(self) -> None:
        self._tally, self._stages = UnitTally(), dict[str, Spent]()
        self._waiting: dict[int, UnitReport] = {}
        self._next = 0

    def add(self, number: int, report: UnitReport) -> None:
        """Take the report of a unit; each number once."""
        self._waiting[number] = report
        while (one := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._tally.join(one)
            self._stages = added(self._stages, one.stages)

    def report(self) -> UnitReport:
        """What all units together tell."""
        if self._waiting:
            raise AssertionError(f"unit {self._next} has told nothing")
        return self._tally.report(self._stages)
