"""Records to documents, as every pass over the input makes them: read, tidied, cleaned."""

from collections import Counter
from typing import Any, final

from batchloom.core.document import Records
from batchloom.preparation.dedup import LineDeduplicator
from batchloom.preparation.documents import RecordParser, normalize_records
from batchloom.preparation.units import DropSample, StepFlow, Stopwatch, UnitStatistics
from batchloom.text import TextCleaner

# What a document that is nothing but repeated lines or paragraphs is left out for.
REPEATED_REASON = "only repeated lines"


@final
class RecordIngester:
    """What becomes of records before they are tokenized.

    Args:
        normalized: whether text is normalised.
        cleaner: the steps of cleaning; None where there are none.
        removal: takes repeated lines out; None where nobody asked.
        tally: is told of drops and flows.
        watch: is told where the time goes.
    """

    def __init__(
        self,
        *,
        normalized: bool,
        cleaner: TextCleaner | None,
        removal: LineDeduplicator | None,
        tally: UnitStatistics,
        watch: Stopwatch,
    ) -> None:
        self._normalized, self._cleaner, self._removal = normalized, cleaner, removal
        self._tally, self._watch = tally, watch

    def take(self, found: Records, reading: RecordParser, source: str) -> Counter[str]:
        """Make documents of records; those that cannot be used become bad ones.

        Args:
            found: what a reader gave; its columns are changed.
            reading: how the source is read.
            source: its name.

        Returns:
            How many documents were left out, by reason.
        """
        with self._watch.time("read"):
            reading.parse_records(found)
        with self._watch.time("clean", documents=len(found.values)):
            normalize_records(found, reading.way, normalized=self._normalized)
            dropped: Counter[str] = Counter()
            if reading.way == "text" and found.values:
                self._clean(found, source, dropped)
                self._remove(found, source, dropped)
        return dropped

    def _clean(self, found: Records, source: str, dropped: Counter[str]) -> None:
        if self._cleaner is None:
            return
        names, before = [step.name for step in self._cleaner.steps], found.values
        made = self._cleaner.clean(before)
        for place, number, drop in made.drops:
            dropped[drop.reason] += 1
            self._tally.dropped(names[number], drop.reason)
            if self._tally.wants_sample(drop.reason):
                sample = DropSample(source, found.records[place], before[place], drop.detail)
                self._tally.sample(names[number], drop.reason, sample)
        for name, counts in zip(names, made.counts, strict=True):
            self._tally.flow(
                StepFlow(
                    step=name,
                    documents_in=counts.documents_in,
                    documents_out=counts.documents_out,
                    bytes_in=counts.bytes_in,
                    bytes_out=counts.bytes_out,
                    altered=counts.changed,
                )
            )
        if made.languages:
            self._tally.languages(Counter(made.languages))
        _replace_records(found, made.texts, made.places)
        # Cleaning may leave nothing but white space.
        normalize_records(found, "text", normalized=False)

    def _remove(self, found: Records, source: str, dropped: Counter[str]) -> None:
        if self._removal is None or not found.values:
            return
        before, step = found.values, self._removal.pieces
        left = self._removal(before)
        altered = sum(a is not b for a, b in zip(before, left, strict=True))
        places = [place for place, text in enumerate(left) if text is not None]
        for place in sorted(set(range(len(left))).difference(places)):
            dropped[REPEATED_REASON] += 1
            self._tally.dropped(step, REPEATED_REASON)
            if self._tally.wants_sample(REPEATED_REASON):
                sample = DropSample(source, found.records[place], before[place])
                self._tally.sample(step, REPEATED_REASON, sample)
        gone = len(left) - len(places)
        self._tally.flow(
            StepFlow(
                step=step,
                documents_in=len(left),
                documents_out=len(places),
                bytes_in=sum(map(_utf8_size, before)),
                bytes_out=sum(_utf8_size(text) for text in left if text is not None),
                altered=altered - gone,
            )
        )
        _replace_records(found, [left[place] for place in places], places)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _replace_records(found: Records, values: list[Any], places: list[int]) -> None:
    found.values = values
    if len(places) != len(found.records):
        found.records = [found.records[place] for place in places]
        found.offsets = [found.offsets[place] for place in places]
