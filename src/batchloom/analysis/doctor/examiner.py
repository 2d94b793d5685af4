"""Main loop of an examination: count, hash and tokenize batches, write nothing."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.findings import BadFacts
from batchloom.analysis.doctor.input_statistics import SourceGroup
from batchloom.analysis.doctor.sampling import InputSample, SampleProgress
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError, TemplateError
from batchloom.preparation import Progress
from batchloom.preparation.dedup import DuplicateCounter
from batchloom.preparation.documents import (
    EncodeContext,
    EncodedBatch,
    ParsedRecords,
    RecordParser,
    compute_document_keys,
    encode_documents,
    estimate_characters,
    fault_rule,
    iter_texts,
    normalize_records,
)
from batchloom.preparation.report import Listener
from batchloom.preparation.units import ReasonCounts, count_reason
from batchloom.sources import SourcePart, make_bad_record_error

_MAX_BAD_RECORDS = 10
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 13


@dataclass(slots=True)
class _PendingDocuments:
    """Documents of one group that are not tokenized yet, with their locations."""

    group: SourceGroup
    record_parser: RecordParser
    documents: list[Any] = field(default_factory=list)
    record_locations: list[tuple[SourcePart, int | None, int, int]] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    characters: int = 0


@final
class InputExaminer:
    """Counter of parsed batches.

    Attributes:
        task: context that encodes documents; None if nothing can be encoded (any more).
        records: number of records read.
        faults: messages about parts that cannot be read.
        bad: the first bad records.
        reasons: number of bad records by kind of reason.
    """

    def __init__(
        self,
        groups: Sequence[SourceGroup],
        sample: InputSample,
        task: EncodeContext | None,
        duplicates: DuplicateCounter,
        listener: Listener,
        total: int,
    ) -> None:
        self._groups = groups
        self._group_of = {source.name: group for group in groups for source in group.sources}
        self._sample, self._duplicates = sample, duplicates
        self._listener, self._total = listener, total
        self._pending: _PendingDocuments | None = None
        self._part: SourcePart | None = None
        self._progress = SampleProgress()
        self._clock = time.perf_counter()
        self.task = task
        self.records = 0
        self.faults: list[str] = []
        self.bad: list[BadFacts] = []
        self.reasons = ReasonCounts()

    def refuse(self, part: SourcePart, error: InputError) -> None:
        """Record that a part cannot be read."""
        self.faults.append(str(error))
        group = self._group_of[part.source.name]
        group.fault = group.fault or str(error)

    def take(self, parsed_records: ParsedRecords) -> None:
        """Count a batch."""
        group, record_batch = self._group_of[parsed_records.part.source.name], parsed_records.batch
        if parsed_records.part is not self._part:
            self._part, self._progress = parsed_records.part, SampleProgress()
        progress, records_read = self._progress, record_batch.records_read
        if not self._sample.complete and self._sample.is_table(parsed_records.part):
            _truncate_records(record_batch, progress.records_read, self._sample.sizes.probe_bytes)
        self.records += record_batch.records_read
        group.records += record_batch.records_read
        progress.advance(records_read, record_batch.records_read, parsed_records.consumed)
        share = self._sample.estimate_share(parsed_records, progress)
        group.read_bytes += share - progress.share
        progress.share = share
        self._record_bad(group, parsed_records.part, parsed_records.before, record_batch.bad)
        normalized = self.task is None or self.task.normalize
        normalize_records(record_batch, parsed_records.record_parser.record_kind, normalized=normalized)
        group.empty += record_batch.records_read - len(record_batch.bad) - len(record_batch.values)
        if record_batch.values:
            self._add(group, parsed_records)
        group.seconds += self._measure_lap()

    def end(self) -> None:
        """Tokenize the pending documents."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.documents:
            self._encode(pending)
            pending.group.seconds += self._measure_lap()

    def _measure_lap(self) -> float:
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def _add(self, group: SourceGroup, parsed_records: ParsedRecords) -> None:
        record_batch, pending = parsed_records.batch, self._pending
        sizes = [sum(map(len, iter_texts(document))) for document in record_batch.values]
        if parsed_records.record_parser.record_kind != "tokens":
            group.characters.update(sizes)
        if pending is None or pending.group is not group:
            self.end()
            pending = self._pending = _PendingDocuments(group, parsed_records.record_parser)
        pending.documents += record_batch.values
        pending.hashes.append(compute_document_keys(record_batch.values))
        pending.record_locations += [
            (parsed_records.part, parsed_records.before, record, offset)
            for record, offset in zip(record_batch.records, record_batch.offsets, strict=True)
        ]
        pending.characters += sum(map(estimate_characters, record_batch.values))
        if pending.characters >= _BATCH_CHARACTERS or len(pending.documents) >= _BATCH_DOCUMENTS:
            self.end()

    def _encode(self, pending: _PendingDocuments) -> None:
        group, count = pending.group, len(pending.documents)
        encoded_batch: EncodedBatch | None = None
        if self.task is not None:
            try:
                encoded_batch = encode_documents(self.task, pending.record_parser, pending.documents)
            except TemplateError as error:
                self.faults.append(str(error))
                self.task = None
        keys = np.concatenate(pending.hashes)
        if encoded_batch is None:
            group.documents += count
        else:
            self._count(group, pending, encoded_batch)
            keys = _make_duplicate_keys(keys, encoded_batch.numbers)
        self._duplicates.add(keys)
        if self._sample.complete:
            self._report_progress()

    def _count(self, group: SourceGroup, pending: _PendingDocuments, encoded_batch: EncodedBatch) -> None:
        for fault in encoded_batch.faults:
            part, before, record, offset = pending.record_locations[fault.number]
            self._record_bad(group, part, before, [BadRecord(record, offset, None, fault.reason, fault.snippet)])
        group.dropped.update(fault_rule(dropped_document) for dropped_document in encoded_batch.dropped)
        group.altered.update(encoded_batch.altered)
        group.documents += len(encoded_batch.lengths)
        group.lengths.update(encoded_batch.lengths.tolist())
        group.count_media(encoded_batch.media)
        group.tokens += encoded_batch.tokens.size
        group.masked |= encoded_batch.trained is not None
        group.trained += (
            encoded_batch.tokens.size if encoded_batch.trained is None else int(np.sum(encoded_batch.trained))
        )

    def _record_bad(
        self,
        group: SourceGroup,
        part: SourcePart,
        before: int | None,
        bad_records: Iterable[BadRecord],
    ) -> None:
        for bad in bad_records:
            group.bad += 1
            count_reason(self.reasons, bad.reason)
            if len(self.bad) < _MAX_BAD_RECORDS:
                self.bad.append(self._make_bad_facts(part, before, bad))

    def _make_bad_facts(self, part: SourcePart, before: int | None, bad: BadRecord) -> BadFacts:
        source = part.source
        records_before = self._sample.count_records_before(part) if before is None else before
        error = make_bad_record_error(source, self._sample.rules, records_before or 0, bad)
        if records_before is None:
            reason = f"at byte {bad.offset:,}: {error.reason}"
            error = RecordError(source.name, None, bad.column, reason)
        return BadFacts(
            *(source.name, error.line, error.row, error.column, bad.offset),
            *(bad.reason, bad.snippet, str(error)),
        )

    def _report_progress(self) -> None:
        groups = self._groups
        done = round(sum(group.read_bytes for group in groups))
        self._listener(
            Progress(
                "tokenize",
                min(done, self._total),
                self._total,
                0,
                sum(group.documents for group in groups),
                sum(group.tokens for group in groups),
                sum(group.bad for group in groups),
            )
        )


def _make_duplicate_keys(keys: NDArray[np.uint64], numbers: NDArray[np.int64] | None) -> NDArray[np.uint64]:
    """Return the keys of encoded documents.

    Documents made from the same record, such as the sides of a pair, get different keys.
    """
    if numbers is None:
        return keys
    document_keys, indices = keys[numbers], np.arange(len(numbers))
    first = np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)]
    within = indices - np.maximum.accumulate(np.where(first, indices, 0))
    document_keys[:, 0] += within.astype(np.uint64)
    return document_keys


def _truncate_records(record_batch: Records, first: int, max_characters: int) -> None:
    """Cut a batch of complete rows to about ``max_characters``.

    The rest counts as not read.
    """
    size = 0
    for number, document in enumerate(record_batch.values):
        size += estimate_characters(document)
        if size > max_characters and number + 1 < len(record_batch.values):
            end = record_batch.records[number + 1]
            record_batch.values, record_batch.records = (
                record_batch.values[: number + 1],
                record_batch.records[: number + 1],
            )
            record_batch.offsets = record_batch.offsets[: number + 1]
            record_batch.bad = [bad for bad in record_batch.bad if bad.record < end]
            record_batch.records_read = end - first
            return
