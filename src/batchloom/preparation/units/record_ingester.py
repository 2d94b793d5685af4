"""Records of one part, parsed, cleaned and without repeated lines."""

from collections import Counter
from typing import final

from batchloom.core.document import Records
from batchloom.preparation.dedup.line_dedup import LineDeduplicator
from batchloom.preparation.documents.encode_documents import normalize_records
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.preparation.units.unit_report import DropSample, StepFlow, Stopwatch, UnitStatistics
from batchloom.text import TextCleaner

# Drop reason of a document that consists of repeated lines or paragraphs alone.
REPEATED_REASON = "only repeated lines"


@final
class RecordIngester:
    def __init__(
        self,
        *,
        normalized: bool,
        cleaner: TextCleaner | None,
        line_deduplicator: LineDeduplicator | None,
        statistics: UnitStatistics,
        stopwatch: Stopwatch,
    ) -> None:
        self._normalized = normalized
        self._cleaner = cleaner
        self._line_deduplicator = line_deduplicator
        self._statistics = statistics
        self._stopwatch = stopwatch

    def ingest(self, records: Records, record_parser: RecordParser, source: str) -> Counter[str]:
        """Turn records into documents or bad records in place; count drops by reason."""
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
        names = [step.name for step in self._cleaner.steps]
        original_texts = records.values
        clean_result = self._cleaner.clean(original_texts)
        for position, number, drop in clean_result.drops:
            dropped[drop.reason] += 1
            sample = DropSample(source, records.records[position], original_texts[position], drop.detail)
            self._statistics.dropped(names[number], drop.reason, sample=sample)
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
        records.select(clean_result.indices)
        records.values = clean_result.texts
        # Cleaning may leave only whitespace.
        normalize_records(records, "text", normalized=False)

    def _remove_repeated_lines(self, records: Records, source: str, dropped: Counter[str]) -> None:
        if self._line_deduplicator is None or not records.values:
            return
        original_texts = records.values
        step = self._line_deduplicator.repeat_unit
        remaining_texts = self._line_deduplicator(original_texts)
        changed_count = sum(a is not b for a, b in zip(original_texts, remaining_texts, strict=True))
        kept_positions = [position for position, text in enumerate(remaining_texts) if text is not None]
        for position in sorted(set(range(len(remaining_texts))).difference(kept_positions)):
            dropped[REPEATED_REASON] += 1
            sample = DropSample(source, records.records[position], original_texts[position])
            self._statistics.dropped(step, REPEATED_REASON, sample=sample)
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
        records.select(kept_positions)
        records.values = [remaining_texts[position] for position in kept_positions]


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
