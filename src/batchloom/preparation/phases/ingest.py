"""Conversion of records to documents, shared by every pass over the input."""

from collections import Counter
from typing import Any, final

from batchloom.core.document import Records
from batchloom.preparation.dedup.line_dedup import LineDeduplicator
from batchloom.preparation.documents.document_encoder import normalize_records
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.preparation.units.stopwatch import Stopwatch
from batchloom.preparation.units.unit_report import DropSample, StepFlow, UnitStatistics
from batchloom.text import TextCleaner

# Drop reason of a document that consists of repeated lines or paragraphs alone.
REPEATED_REASON = "only repeated lines"


@final
class RecordIngester:
    """Parser, normalizer and filter of records.

    ``line_deduplicator`` removes repeated lines or paragraphs. ``statistics`` receives drops and flows.
    """

    def __init__(
        self,
        *,
        normalized: bool,
        cleaner: TextCleaner | None,
        line_deduplicator: LineDeduplicator | None,
        statistics: UnitStatistics,
        stopwatch: Stopwatch,
    ) -> None:
        self._normalized, self._cleaner, self._line_deduplicator = (normalized, cleaner, line_deduplicator)
        self._statistics, self._stopwatch = statistics, stopwatch

    def ingest(self, records: Records, record_parser: RecordParser, source: str) -> Counter[str]:
        """Turn records into documents in place; return the number of drops by reason.

        Unusable records become bad records.
        """
        with self._stopwatch.time("read"):
            record_parser.parse_records(records)
        with self._stopwatch.time("clean", documents=len(records.values)):
            normalize_records(records, record_parser.record_kind, normalized=self._normalized)
            dropped: Counter[str] = Counter()
            if record_parser.record_kind == "text" and records.values:
                self._clean(records, source, dropped)
                self._remove_repeated_lines(records, source, dropped)
        return dropped

    def _clean(self, records: Records, source: str, dropped: Counter[str]) -> None:
        if self._cleaner is None:
            return
        names, original_texts = [step.name for step in self._cleaner.steps], records.values
        clean_result = self._cleaner.clean(original_texts)
        for position, number, drop in clean_result.drops:
            dropped[drop.reason] += 1
            self._statistics.dropped(names[number], drop.reason)
            if self._statistics.wants_sample(drop.reason):
                sample = DropSample(source, records.records[position], original_texts[position], drop.detail)
                self._statistics.sample(names[number], drop.reason, sample)
        for name, counts in zip(names, clean_result.counts, strict=True):
            self._statistics.flow(
                StepFlow(
                    step=name,
                    documents_in=counts.documents_in,
                    documents_out=counts.documents_out,
                    bytes_in=counts.bytes_in,
                    bytes_out=counts.bytes_out,
                    altered=counts.changed,
                )
            )
        if clean_result.languages:
            self._statistics.languages(Counter(clean_result.languages))
        _replace_records(records, clean_result.texts, clean_result.indices)
        # Cleaning may leave only whitespace.
        normalize_records(records, "text", normalized=False)

    def _remove_repeated_lines(self, records: Records, source: str, dropped: Counter[str]) -> None:
        if self._line_deduplicator is None or not records.values:
            return
        original_texts, step = records.values, self._line_deduplicator.repeat_unit
        remaining_texts = self._line_deduplicator(original_texts)
        changed_count = sum(a is not b for a, b in zip(original_texts, remaining_texts, strict=True))
        kept_positions = [position for position, text in enumerate(remaining_texts) if text is not None]
        for position in sorted(set(range(len(remaining_texts))).difference(kept_positions)):
            dropped[REPEATED_REASON] += 1
            self._statistics.dropped(step, REPEATED_REASON)
            if self._statistics.wants_sample(REPEATED_REASON):
                sample = DropSample(source, records.records[position], original_texts[position])
                self._statistics.sample(step, REPEATED_REASON, sample)
        dropped_count = len(remaining_texts) - len(kept_positions)
        self._statistics.flow(
            StepFlow(
                step=step,
                documents_in=len(remaining_texts),
                documents_out=len(kept_positions),
                bytes_in=sum(map(_utf8_size, original_texts)),
                bytes_out=sum(_utf8_size(text) for text in remaining_texts if text is not None),
                altered=changed_count - dropped_count,
            )
        )
        _replace_records(records, [remaining_texts[position] for position in kept_positions], kept_positions)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _replace_records(records: Records, values: list[Any], positions: list[int]) -> None:
    records.values = values
    if len(positions) != len(records.records):
        records.records = [records.records[position] for position in positions]
        records.offsets = [records.offsets[position] for position in positions]
