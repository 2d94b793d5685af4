"""Counts of a unit while it is tokenized: by part, by step and for progress."""

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


@final
class UnitCounts:
    """Counts of a unit that is being read; sends its progress.

    Attributes:
        parts: counts of each part.
        statistics: statistics for the report.
    """

    def __init__(self, unit: Unit, send_message: MessageCallback) -> None:
        self._unit = unit
        self._send_message = send_message
        self.parts = [PartCounts() for _ in unit.parts]
        self.statistics = UnitStatistics()
        # Reports list steps in the order of their first flow.
        self.statistics.flow(StepFlow(step="read"))
        self._progress = UnitProgress()
        self._reasons = ReasonCounts()
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

    def count_bad(self, number: int, bad_records: list[BadRecord]) -> None:
        """Count bad records of a part."""
        self.parts[number].bad += len(bad_records)
        first = min(
            (self._progress.first_bad or (number, bad_records[0]), (number, bad_records[0])),
            key=lambda candidate: (candidate[0], candidate[1].record),
        )
        for candidate in bad_records:
            count_reason(self._reasons, candidate.reason)
        self._progress = msgspec.structs.replace(
            self._progress, bad=self._progress.bad + len(bad_records), first_bad=first, reasons=dict(self._reasons)
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
        for part in parts:
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
