"""Counts of a unit while it is tokenized: by part, by step and for progress."""

from collections.abc import Collection
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.preparation.documents.encoded_batch import ROUNDED_WEIGHTS, EncodedBatch, EncodeFault
from batchloom.preparation.units.unit_report import (
    DropSample,
    ReasonCounts,
    SourceCounts,
    StageTime,
    StepFlow,
    UnitStatistics,
    count_reason,
)
from batchloom.preparation.units.units import Unit, UnitProgress
from batchloom.preparation.units.work_folder import Alteration, PartCounts, UnitFacts
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources.files import Source
from batchloom.sources.formats import FORMATS


@final
class _BadCounts:
    """Bad records: their number, the first of them with its part, and their reasons."""

    def __init__(self) -> None:
        self.count = 0
        self.first: tuple[int, BadRecord] | None = None
        self.reasons = ReasonCounts()

    def add(self, count: int, first: tuple[int, BadRecord]) -> None:
        self.count += count
        if self.first is None or (first[0], first[1].record) < (self.first[0], self.first[1].record):
            self.first = first


@final
class UnitCounts:
    """Counts of a unit that is being read; sends its progress.

    The bad records of a file that may be left out are not reported before it has another record.

    Attributes:
        parts: counts of each part.
        statistics: statistics for the report.
    """

    def __init__(self, unit: Unit, whole_files: Collection[int], send_message: MessageCallback) -> None:
        self._unit = unit
        self._whole_files = whole_files
        self._send_message = send_message
        self.parts = [PartCounts() for _ in unit.parts]
        self.statistics = UnitStatistics()
        # Reports list steps in the order of their first flow.
        self.statistics.flow(StepFlow(step="read"))
        self._progress = UnitProgress()
        self._bad = _BadCounts()
        self._held_bad: tuple[int, _BadCounts] | None = None
        self._first_reasons: dict[int, str] = {}
        self._alterations: dict[str, Alteration] = {}

    def report_progress(self, *, size: int = 0, records: int = 0, documents: int = 0, tokens: int = 0) -> None:
        """Send the progress with bytes read, records, documents and tokens added."""
        progress = self._progress
        self._progress = msgspec.structs.replace(
            progress,
            bytes=progress.bytes + size,
            records=progress.records + records,
            documents=progress.documents + documents,
            tokens=progress.tokens + tokens,
        )
        self._send_message(self._progress)

    def begin_part(self, number: int) -> None:
        """Begin to read a part, whose bad records are held back if it may be left out."""
        self._held_bad = (number, _BadCounts()) if number in self._whole_files else None

    def release_bad(self) -> None:
        """Report the bad records of the current part if it has another record."""
        if self._held_bad is None:
            return
        number, held = self._held_bad
        counts = self.parts[number]
        if counts.bad == counts.records:
            return
        self._held_bad = None
        if held.first is not None:
            for count, reason in held.reasons.values():
                count_reason(self._bad.reasons, reason, count)
            self._bad.add(held.count, held.first)
            self._report_bad()

    def count_bad(self, number: int, bad_records: list[BadRecord]) -> None:
        """Count bad records of a part."""
        self.parts[number].bad += len(bad_records)
        self._first_reasons.setdefault(number, bad_records[0].reason)
        is_held = self._held_bad is not None and self._held_bad[0] == number
        counts = self._held_bad[1] if self._held_bad is not None and is_held else self._bad
        counts.add(len(bad_records), (number, bad_records[0]))
        for bad_record in bad_records:
            count_reason(counts.reasons, bad_record.reason)
        if not is_held:
            self._report_bad()

    def _report_bad(self) -> None:
        bad = self._bad
        self._progress = msgspec.structs.replace(
            self._progress, bad=bad.count, first_bad=bad.first, reasons=dict(bad.reasons)
        )
        self._send_message(self._progress)

    def count_further(
        self, rows: NDArray[np.void], document_rows: NDArray[np.int64], faults: list[EncodeFault]
    ) -> None:
        """Count documents beyond the first of each record, kept or dropped."""
        documents_per_row = np.bincount(
            np.concatenate([document_rows, np.array([fault.number for fault in faults], np.int64)])
        )
        multiple_rows = np.flatnonzero(documents_per_row > 1)
        further_counts = np.bincount(rows["part"][multiple_rows], documents_per_row[multiple_rows] - 1)
        for number in np.flatnonzero(further_counts).tolist():
            self.parts[number].further += int(further_counts[number])

    def count_dropped(self, row: np.void, fault: EncodeFault) -> None:
        """Count a document that a conversation rule drops."""
        number = int(row["part"])
        rule = fault.rule
        self.parts[number].count_dropped(rule)
        source = self._unit.parts[number].source.name
        sample = DropSample(source, int(row["record"]), fault.snippet, fault.reason)
        self.statistics.dropped("tokenize", rule, sample=sample)

    def count_documents(self, rows: NDArray[np.void], sizes: NDArray[np.int64]) -> None:
        """Count documents, their tokens and their bytes."""
        documents = np.bincount(rows["part"])
        tokens = np.bincount(rows["part"], rows["length"])
        texts = np.bincount(rows["part"], sizes)
        for number in np.flatnonzero(documents).tolist():
            counts = self.parts[number]
            counts.documents += int(documents[number])
            counts.tokens += int(tokens[number])
            self.statistics.source(
                self._unit.parts[number].source.name,
                SourceCounts(int(documents[number]), int(texts[number]), int(tokens[number])),
            )

    def count_alterations(self, subject: str, rows: NDArray[np.void], encoded_batch: EncodedBatch) -> None:
        """Count the records of a batch that ``subject`` (the template) has changed."""
        for change, numbers in encoded_batch.altered.items():
            self._add_alteration(f"{subject} {change}", rows[numbers])
        if encoded_batch.flags.rounded:
            self._add_alteration(ROUNDED_WEIGHTS, rows)

    def _add_alteration(self, description: str, rows: NDArray[np.void]) -> None:
        """Count the records that a change concerns, and keep the first."""
        first = rows[0]
        added = Alteration(len(rows), int(first["part"]), int(first["record"]), int(first["offset"]))
        earlier = self._alterations.get(description)
        self._alterations[description] = earlier.add(added) if earlier else added

    def make_facts(self, checksums: dict[str, str], stages: dict[str, StageTime]) -> UnitFacts:
        """Return the facts of the unit.

        Args:
            checksums: XXH3-128 of each token file.
            stages: time of each stage.
        """
        parts = self.parts
        for number, part in enumerate(parts):
            if number in self._whole_files and part.records and part.bad == part.records:
                part.damage = _describe_unusable(
                    self._unit.parts[number].source, part.records, self._first_reasons[number]
                )
            used = part.documents + part.bad + sum(part.dropped.values())
            part.empty = part.records + part.further - used
        if empty := sum(part.empty for part in parts):
            self.statistics.dropped("read", "empty", empty)
        return UnitFacts(
            parts=parts,
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            first_bad=self._progress.first_bad,
            checksums=checksums,
            altered=self._alterations,
            report=self.statistics.report(stages),
        )


def _describe_unusable(source: Source, records: int, first_reason: str) -> str:
    """Describe a file without a good record."""
    if not FORMATS[source.kind].method and records == 1:
        return f"{source.name} cannot be used: {first_reason}."
    which = "its only record is bad" if records == 1 else f"all its {records:,} records are bad, first"
    return f"{source.name}: {which}: {first_reason}."
