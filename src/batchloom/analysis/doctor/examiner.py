"""The run of an examination: every stretch is counted, hashed and tokenized, and nothing is written."""

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
    """Documents of one group that wait for the tokenizer, each with its part, record and offset."""

    group: SourceGroup
    reading: RecordParser
    documents: list[Any] = field(default_factory=list)
    places: list[tuple[SourcePart, int | None, int, int]] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    characters: int = 0


@final
class InputExaminer:
    """Takes stretches and counts what is in them.

    Attributes:
        task: what makes tokens; None where nothing does (any more).
        records: records that were read.
        faults: sentences about what cannot be read.
        bad: the first bad records.
        reasons: the number of bad records by kind of reason.
    """

    def __init__(
        self,
        groups: Sequence[SourceGroup],
        looks: InputSample,
        task: EncodeContext | None,
        duplicates: DuplicateCounter,
        listener: Listener,
        total: int,
    ) -> None:
        self._groups = groups
        self._group_of = {source.name: group for group in groups for source in group.sources}
        self._looks, self._duplicates = looks, duplicates
        self._listener, self._total = listener, total
        self._waiting: _PendingDocuments | None = None
        self._part: SourcePart | None = None
        self._progress = SampleProgress()
        self._clock = time.perf_counter()
        self.task = task
        self.records = 0
        self.faults: list[str] = []
        self.bad: list[BadFacts] = []
        self.reasons = ReasonCounts()

    def refuse(self, part: SourcePart, error: InputError) -> None:
        """Take note of a part that cannot be read."""
        self.faults.append(str(error))
        group = self._group_of[part.source.name]
        group.fault = group.fault or str(error)

    def take(self, stretch: ParsedRecords) -> None:
        """Count a stretch."""
        group, found = self._group_of[stretch.part.source.name], stretch.found
        if stretch.part is not self._part:
            self._part, self._progress = stretch.part, SampleProgress()
        progress, given = self._progress, found.seen
        if not self._looks.whole and self._looks.is_table(stretch.part):
            _truncate_records(found, progress.given, self._looks.sizes.probe_bytes)
        self.records += found.seen
        group.records += found.seen
        progress.go_on(given, found.seen, stretch.consumed)
        share = self._looks.share(stretch, progress)
        group.read += share - progress.share
        progress.share = share
        self._record_bad(group, stretch.part, stretch.before, found.bad)
        normalized = self.task is None or self.task.normalize
        normalize_records(found, stretch.reading.way, normalized=normalized)
        group.empty += found.seen - len(found.bad) - len(found.values)
        if found.values:
            self._add(group, stretch)
        group.seconds += self._measure_lap()

    def end(self) -> None:
        """Tokenize what still waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.documents:
            self._encode(waiting)
            waiting.group.seconds += self._measure_lap()

    def _measure_lap(self) -> float:
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def _add(self, group: SourceGroup, stretch: ParsedRecords) -> None:
        found, waiting = stretch.found, self._waiting
        sizes = [sum(map(len, iter_texts(document))) for document in found.values]
        if stretch.reading.way != "tokens":
            group.characters.update(sizes)
        if waiting is None or waiting.group is not group:
            self.end()
            waiting = self._waiting = _PendingDocuments(group, stretch.reading)
        waiting.documents += found.values
        waiting.hashes.append(compute_document_keys(found.values))
        waiting.places += [
            (stretch.part, stretch.before, record, offset)
            for record, offset in zip(found.records, found.offsets, strict=True)
        ]
        waiting.characters += sum(map(estimate_characters, found.values))
        if waiting.characters >= _BATCH_CHARACTERS or len(waiting.documents) >= _BATCH_DOCUMENTS:
            self.end()

    def _encode(self, waiting: _PendingDocuments) -> None:
        group, count = waiting.group, len(waiting.documents)
        made: EncodedBatch | None = None
        if self.task is not None:
            try:
                made = encode_documents(self.task, waiting.reading, waiting.documents)
            except TemplateError as error:
                self.faults.append(str(error))
                self.task = None
        keys = np.concatenate(waiting.hashes)
        if made is None:
            group.documents += count
        else:
            self._count(group, waiting, made)
            keys = _make_duplicate_keys(keys, made.numbers)
        self._duplicates.add(keys)
        if self._looks.whole:
            self._tell()

    def _count(self, group: SourceGroup, waiting: _PendingDocuments, made: EncodedBatch) -> None:
        for left in made.faults:
            part, before, record, offset = waiting.places[left.number]
            self._record_bad(
                group, part, before, [BadRecord(record, offset, None, left.reason, left.snippet)]
            )
        group.dropped.update(fault_rule(left) for left in made.dropped)
        group.altered.update(made.altered)
        group.documents += len(made.lengths)
        group.lengths.update(made.lengths.tolist())
        group.count_media(made.media)
        group.tokens += made.tokens.size
        group.masked |= made.trained is not None
        group.trained += made.tokens.size if made.trained is None else int(np.sum(made.trained))

    def _record_bad(
        self, group: SourceGroup, part: SourcePart, before: int | None, found: Iterable[BadRecord]
    ) -> None:
        for bad in found:
            group.bad += 1
            count_reason(self.reasons, bad.reason)
            if len(self.bad) < _MAX_BAD_RECORDS:
                self.bad.append(self._facts(part, before, bad))

    def _facts(self, part: SourcePart, before: int | None, bad: BadRecord) -> BadFacts:
        source = part.source
        known = self._looks.before(part) if before is None else before
        error = make_bad_record_error(source, self._looks.rules, known or 0, bad)
        if known is None:
            reason = f"at byte {bad.offset:,}: {error.reason}"
            error = RecordError(source.name, None, bad.column, reason)
        return BadFacts(
            *(source.name, error.line, error.row, error.column, bad.offset),
            *(bad.reason, bad.snippet, str(error)),
        )

    def _tell(self) -> None:
        groups = self._groups
        done = round(sum(group.read for group in groups))
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


def _make_duplicate_keys(
    keys: NDArray[np.uint64], numbers: NDArray[np.int64] | None
) -> NDArray[np.uint64]:
    """The keys of what came of documents; those of one document, such as the sides of a pair, are told apart."""
    if numbers is None:
        return keys
    every, places = keys[numbers], np.arange(len(numbers))
    first = np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)]
    within = places - np.maximum.accumulate(np.where(first, places, 0))
    every[:, 0] += within.astype(np.uint64)
    return every


def _truncate_records(found: Records, first: int, most: int) -> None:
    """Keep of a stretch of whole rows what is about so many characters long; the rest was not read."""
    size = 0
    for number, document in enumerate(found.values):
        size += estimate_characters(document)
        if size > most and number + 1 < len(found.values):
            end = found.records[number + 1]
            found.values, found.records = found.values[: number + 1], found.records[: number + 1]
            found.offsets = found.offsets[: number + 1]
            found.bad = [bad for bad in found.bad if bad.record < end]
            found.seen = end - first
            return
