"""Phase A, per unit: parse, normalize, hash and tokenize into temporary files."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.preparation.dedup.line_dedup import LineDeduplicator
from batchloom.preparation.dedup.seen_texts import SeenBatch, SeenTexts
from batchloom.preparation.documents.conversation_encoder import EncodeFault
from batchloom.preparation.documents.document_encoder import EncodeContext, encode_documents, fault_rule
from batchloom.preparation.documents.media_tokens import PlacedMedium
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.preparation.documents.token_encoder import (
    EncodedBatch,
    estimate_characters,
    hash_and_measure,
    split_digests,
)
from batchloom.preparation.phases.ingest import RecordIngester
from batchloom.preparation.settings.chat_rules import OverlongError
from batchloom.preparation.units.crash_isolation import CrashIsolation
from batchloom.preparation.units.quarantine import ReasonCounts, count_reason
from batchloom.preparation.units.stopwatch import Stopwatch
from batchloom.preparation.units.tasks import CrashMarker, RecordPosition, UnitProgress, UnitTask, UnusableError
from batchloom.preparation.units.unit_files import FACTS_NAME, ROW, UnitFiles
from batchloom.preparation.units.unit_report import DropSample, SourceCounts, StepFlow, UnitStatistics
from batchloom.preparation.units.work_folder import (
    PartCounts,
    UnitFacts,
    attempt_folder,
    move_into_place,
    read_unit_facts,
)
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources import PartReader, SourcePart, prefetch_sources
from batchloom.store import write_file
from batchloom.store.write import make_folder, sync_folder

# Size of a tokenizer batch in characters and in documents; it does not affect the output.
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1 << 15
# A larger batch is encoded with no other batch in memory.
_LARGE_BATCH_CHARACTERS = 16 << 20


def tokenize_unit(unit_task: UnitTask, context: EncodeContext, send_message: MessageCallback) -> UnitFacts:
    """Write a unit's files into an attempt folder, facts last, and move it into place.

    ``send_message`` receives a :class:`CrashMarker` before a batch and a :class:`UnitProgress` after it. A record
    that ends the job, as the recipe demands, raises UnusableError.
    """
    folder = attempt_folder(unit_task.folder, unit_task.attempt)
    make_folder(folder)
    context.bounds.set_known_cuts(unit_task.known_cuts)
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(ThreadPoolExecutor(1, "encode")) if context.overlap else None
        files = stack.enter_context(UnitFiles(folder, context.dedup))
        unit_tokenizer = UnitTokenizer(unit_task, context, files, encoder, send_message)
        parts = prefetch_sources(unit_task.unit.parts, lambda part: part.source)
        for number, part in enumerate(parts):
            unit_tokenizer.read_part(number, part)
        unit_tokenizer.flush()
        unit_tokenizer.write_pending()
        files.sync()
    facts = unit_tokenizer.make_facts()
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    if move_into_place(folder, unit_task.folder):
        return facts
    # Another attempt was first; its facts differ from ours if a record was excluded.
    return read_unit_facts(unit_task.folder) or facts


class DocumentSink(Protocol):
    """Protocol for the output of documents and bad records, like :class:`UnitFiles`."""

    def add(
        self,
        tokens: NDArray[np.generic],
        rows: NDArray[np.void],
        codes: NDArray[np.uint8],
        trained: NDArray[np.bool_] | None = None,
        *,
        added: tuple[int, int] = (0, 0),
        plain: tuple[NDArray[np.generic], NDArray[np.uint32]] | None = None,
        media: Sequence[Sequence[PlacedMedium]] = (),
    ) -> None:
        """Add documents."""

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        """Add bad records."""

    def checksums(self) -> dict[str, str]:
        """Return the XXH3-128 of each token file; empty if there are none."""


class PartRecordReader(Protocol):
    """Protocol for the records of a part, like :class:`PartReader`."""

    @property
    def consumed(self) -> int:
        """Number of bytes read so far."""

    @property
    def start(self) -> int:
        """Offset of the part's first byte."""

    @property
    def stop(self) -> int:
        """Offset after the part's last byte."""

    def __iter__(self) -> Iterator[Records]: ...

    def finish(self) -> bytes:
        """Read the rest and return the hash of the part's bytes."""


@dataclass(slots=True)
class _EncodeBatch:
    """Documents that wait for tokenization, of parts that are encoded alike."""

    record_parser: RecordParser | None = None
    documents: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    per_part: list[int] = field(default_factory=list)
    characters: int = 0

    @property
    def full(self) -> bool:
        """True when the batch is large enough to tokenize."""
        return self.characters >= _BATCH_CHARACTERS or len(self.documents) >= _BATCH_DOCUMENTS

    def accepts(self, record_parser: RecordParser) -> bool:
        """Return whether documents of this parser can join the batch."""
        batch_parser = self.record_parser
        return batch_parser is None or (batch_parser.record_kind, batch_parser.chat) == (
            record_parser.record_kind,
            record_parser.chat,
        )


@dataclass(slots=True)
class _PartCounters:
    start: int = 0
    stop: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    further: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    hash: str = ""


@final
class UnitTokenizer:
    """State of one unit, or a section of one, while it is read.

    Encoding releases the GIL: with an ``encoder``, one batch is encoded on a thread while the next is parsed
    and the one before is written.
    """

    def __init__(
        self,
        unit_task: UnitTask,
        context: EncodeContext,
        files: DocumentSink,
        encoder: Executor | None,
        send_message: MessageCallback,
    ) -> None:
        self._unit, self._context, self._files = unit_task.unit, context, files
        self._encoder, self._send_message = encoder, send_message
        self._isolation = CrashIsolation(unit_task.suspected_ranges, unit_task.excluded)
        self._statistics, self._stopwatch = UnitStatistics(), Stopwatch()
        # Reports list steps in the order of their first flow.
        self._statistics.flow(StepFlow(step="read"))
        line_deduplicator = (
            LineDeduplicator(unit_task.repeated, unit_task.unit.number, context.repeat_unit)
            if context.repeat_unit
            else None
        )
        self._ingester = RecordIngester(
            normalized=context.normalize,
            cleaner=context.cleaner,
            line_deduplicator=line_deduplicator,
            statistics=self._statistics,
            stopwatch=self._stopwatch,
        )
        self._parts = [_PartCounters() for _ in unit_task.unit.parts]
        self._batch = _EncodeBatch()
        self._pending_batch: _PendingBatch | None = None
        self._seen_texts = SeenTexts() if context.dedup.mode != "none" else None
        self._progress, self._reasons = UnitProgress(), ReasonCounts()
        self._alterations: dict[str, str] = {}

    def read_part(self, number: int, part: SourcePart) -> None:
        """Read one complete part."""
        rules = self._context.record_parsers.get_parser(part.source).rules
        with PartReader(part, rules, self._context.bounds) as reader:
            for _ in self.iter_steps(number, part, reader):
                pass

    def iter_steps(self, number: int, part: SourcePart, reader: PartRecordReader) -> Iterator[None]:
        """Read one complete part, yielding after each record batch."""
        counts = self._parts[number]
        record_parser = self._context.record_parsers.get_parser(part.source)
        if not self._batch.accepts(record_parser):
            self.flush()
        consumed = 0
        for record_batch in self._stopwatch.time_each("read", reader):
            bytes_consumed = reader.consumed
            counts.records += record_batch.records_read
            self._report_progress(size=bytes_consumed - consumed, records=record_batch.records_read)
            self._statistics.flow(StepFlow(step="read", bytes_in=bytes_consumed - consumed))
            consumed = bytes_consumed
            for record_slice, is_suspected in self._isolation.split_batch(number, record_batch):
                self._ingest_records(number, record_slice, record_parser, is_suspected=is_suspected)
            yield
        counts.hash = reader.finish().hex()
        counts.start, counts.stop = reader.start, reader.stop
        self._report_progress(size=part.stop - part.start - consumed)

    def _ingest_records(
        self, number: int, records: Records, record_parser: RecordParser, *, is_suspected: bool
    ) -> None:
        """Process records; suspected ones are processed with no other batch pending."""
        if is_suspected:
            self._flush_all()
        if records.records:
            in_hand = (number, records.records[0]), (number, records.records[-1])
            self._send_message(CrashMarker("clean", in_hand))
        record_count, source = records.records_read, self._unit.parts[number].source.name
        dropped = self._ingester.ingest(records, record_parser, source)
        self._parts[number].dropped.update(dropped)
        if records.bad:
            self._record_bad(number, records.bad)
        document_count = len(records.values) + dropped.total()
        self._statistics.flow(StepFlow(step="read", documents_in=record_count, documents_out=document_count))
        self._add(number, records, record_parser)
        if self._batch.full:
            self.flush()
        if is_suspected:
            self._flush_all()

    def _flush_all(self) -> None:
        """Flush pending batches and clear the crash markers."""
        self.flush()
        self.write_pending()
        for stage in ("clean", "encode"):
            self._send_message(CrashMarker(stage, None))

    def _report_progress(self, *, size: int = 0, records: int = 0, documents: int = 0, tokens: int = 0) -> None:
        """Add to the progress and send it."""
        progress = self._progress
        self._progress = msgspec.structs.replace(
            progress,
            bytes=progress.bytes + size,
            records=progress.records + records,
            documents=progress.documents + documents,
            tokens=progress.tokens + tokens,
        )
        self._send_message(self._progress)

    def _record_bad(self, number: int, bad_records: list[BadRecord]) -> None:
        self._parts[number].bad += len(bad_records)
        self._files.add_bad(number, bad_records)
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

    def _add(self, number: int, records: Records, record_parser: RecordParser) -> None:
        documents, records.values = records.values, []
        batch = self._batch
        batch.record_parser = record_parser
        batch.characters += sum(
            map(estimate_characters, documents) if record_parser.record_reader else map(len, documents)
        )
        batch.documents += documents
        batch.records += records.records
        batch.offsets += records.offsets
        batch.parts.append(number)
        batch.per_part.append(len(documents))

    def flush(self) -> None:
        """Submit the waiting documents for encoding and write the batch before them."""
        batch, self._batch = self._batch, _EncodeBatch()
        if not batch.documents or batch.record_parser is None:
            return
        large = batch.characters > _LARGE_BATCH_CHARACTERS
        if large:
            self.write_pending()
        documents, batch.documents = batch.documents, []
        rows = np.empty(len(documents), ROW)
        rows["record"] = batch.records
        rows["offset"] = batch.offsets
        rows["part"] = np.repeat(np.array(batch.parts, np.uint32), batch.per_part)
        rows["side"] = rows["seen"] = 0
        previous_batch = self._pending_batch
        # The previous batch is not written yet, so it may still be the one that crashes the worker.
        first = previous_batch[0] if previous_batch else rows
        self._send_message(CrashMarker("encode", (_row_position(first[0]), _row_position(rows[-1]))))
        with self._stopwatch.time("hash", documents=len(documents)):
            digests, sizes = hash_and_measure(documents)
            rows["hash"] = split_digests(digests)
            seen_batch = self._find_seen(batch.record_parser, digests)
        if seen_batch is not None:
            documents = list(itertools.compress(documents, seen_batch.fresh))
        future = self._submit(batch.record_parser, documents)
        del documents
        self._pending_batch = rows, sizes, seen_batch, future
        if previous_batch:
            self._write(*previous_batch)
            self._send_message(CrashMarker("encode", (_row_position(rows[0]), _row_position(rows[-1]))))
        if large or self._encoder is None:
            self.write_pending()

    def _find_seen(self, record_parser: RecordParser, digests: list[bytes]) -> SeenBatch | None:
        """Find the texts that the unit has had already; None without deduplication."""
        return self._seen_texts.look(digests) if self._seen_texts and record_parser.record_kind == "text" else None

    def _submit(self, record_parser: RecordParser, documents: list[Any]) -> "Future[EncodedBatch]":
        if self._encoder is not None:
            return self._encoder.submit(self._encode, record_parser, documents)
        future: Future[EncodedBatch] = Future()
        try:
            future.set_result(self._encode(record_parser, documents))
        except OverlongError as error:
            future.set_exception(error)
        return future

    def _encode(self, record_parser: RecordParser, documents: list[Any]) -> EncodedBatch:
        with self._stopwatch.time("encode", documents=len(documents)):
            return encode_documents(self._context, record_parser, documents)

    def write_pending(self) -> None:
        """Write the batch that is being encoded."""
        pending_batch, self._pending_batch = self._pending_batch, None
        if pending_batch:
            self._write(*pending_batch)

    def _write(
        self,
        rows: NDArray[np.void],
        sizes: NDArray[np.int64],
        seen_batch: SeenBatch | None,
        future: Future[EncodedBatch],
    ) -> None:
        try:
            encoded_batch = future.result()
        except OverlongError as error:
            row = rows[error.number]
            bad_record = _make_bad_record(row, error.reason)
            raise UnusableError(self._unit.number, int(row["part"]), bad_record) from None
        # Bad records of a batch are reported together, so that the coordinator sees their share of the batch.
        for part, faults in itertools.groupby(encoded_batch.faults, key=lambda fault: int(rows[fault.number]["part"])):
            bad_records = [_make_bad_record(rows[fault.number], fault.reason, fault.snippet) for fault in faults]
            self._record_bad(part, bad_records)
        for fault in encoded_batch.dropped:
            self._count_dropped(rows[fault.number], fault)
        input_count, input_bytes = len(rows), int(sizes.sum())
        for alteration in encoded_batch.altered:
            description = (
                f"Template {self._context.chat.renderer.name} {alteration}" if self._context.chat else alteration
            )
            self._alterations.setdefault(description, self._unit.parts[int(rows["part"][0])].source.name)
        if encoded_batch.numbers is not None:
            self._count_further(rows, encoded_batch.numbers, encoded_batch.faults + encoded_batch.dropped)
            rows, sizes = rows[encoded_batch.numbers], sizes[encoded_batch.numbers]
        if encoded_batch.sides is not None:
            rows["side"] = encoded_batch.sides
        if seen_batch is None or self._seen_texts is None:
            rows["length"] = encoded_batch.lengths
        else:
            rows["length"] = self._seen_texts.lengths(seen_batch, encoded_batch.lengths)
            rows["seen"] = ~seen_batch.fresh
        self._count(rows, sizes)
        self._statistics.lengths(rows["length"])
        tokens = int(rows["length"].sum(dtype=np.int64))
        self._statistics.flow(
            StepFlow(
                step="tokenize",
                documents_in=input_count,
                documents_out=len(rows),
                bytes_in=input_bytes,
                bytes_out=int(sizes.sum()),
                tokens_out=tokens,
                altered=encoded_batch.moved,
            )
        )
        codes = self._context.membership.codes(rows["hash"])
        with self._stopwatch.time("write temporary files", encoded_batch.tokens.nbytes, len(rows)):
            self._files.add(
                *(encoded_batch.tokens, rows, codes, encoded_batch.trained),
                added=encoded_batch.added,
                plain=encoded_batch.plain,
                media=encoded_batch.media,
            )
        self._report_progress(documents=len(rows), tokens=tokens)

    def _count_further(
        self, rows: NDArray[np.void], document_rows: NDArray[np.int64], faults: list[EncodeFault]
    ) -> None:
        """Count documents beyond the first of each record, kept or dropped."""
        documents_per_row = np.bincount(
            np.concatenate([document_rows, np.array([fault.number for fault in faults], np.int64)])
        )
        multiple_rows = np.flatnonzero(documents_per_row > 1)
        further_counts = np.bincount(rows["part"][multiple_rows], documents_per_row[multiple_rows] - 1)
        for number in np.flatnonzero(further_counts).tolist():
            self._parts[number].further += int(further_counts[number])

    def _count_dropped(self, row: np.void, fault: EncodeFault) -> None:
        """Count a document that a conversation rule drops."""
        number, rule = int(row["part"]), fault_rule(fault)
        self._parts[number].dropped[rule] += 1
        self._statistics.dropped("tokenize", rule)
        if self._statistics.wants_sample(rule):
            source = self._unit.parts[number].source.name
            sample = DropSample(source, int(row["record"]), fault.snippet, fault.reason)
            self._statistics.sample("tokenize", rule, sample)

    def _count(self, rows: NDArray[np.void], sizes: NDArray[np.int64]) -> None:
        documents = np.bincount(rows["part"])
        tokens = np.bincount(rows["part"], rows["length"])
        texts = np.bincount(rows["part"], sizes)
        for number in np.flatnonzero(documents).tolist():
            counts = self._parts[number]
            counts.documents += int(documents[number])
            counts.tokens += int(tokens[number])
            self._statistics.source(
                self._unit.parts[number].source.name,
                SourceCounts(int(documents[number]), int(texts[number]), int(tokens[number])),
            )

    def make_facts(self) -> UnitFacts:
        """Return the facts of the finished unit."""
        parts = [
            PartCounts(
                start=part_counters.start,
                stop=part_counters.stop,
                records=part_counters.records,
                documents=part_counters.documents,
                tokens=part_counters.tokens,
                empty=part_counters.records
                + part_counters.further
                - part_counters.documents
                - part_counters.bad
                - part_counters.dropped.total(),
                bad=part_counters.bad,
                further=part_counters.further,
                dropped=dict(part_counters.dropped),
                hash=part_counters.hash,
            )
            for part_counters in self._parts
        ]
        if empty := sum(part.empty for part in parts):
            self._statistics.dropped("read", "empty", empty)
        return UnitFacts(
            parts=parts,
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            first_bad=self._progress.first_bad,
            checksums=self._files.checksums(),
            altered=self._alterations,
            report=self._statistics.report(self._stopwatch.get_stage_times()),
        )


_PendingBatch = tuple[NDArray[np.void], NDArray[np.int64], SeenBatch | None, "Future[EncodedBatch]"]


def _row_position(row: np.void) -> RecordPosition:
    return int(row["part"]), int(row["record"])


def _make_bad_record(row: np.void, reason: str, snippet: str = "") -> BadRecord:
    """Return the bad record of a document that cannot be encoded."""
    return BadRecord(int(row["record"]), int(row["offset"]), None, reason, snippet)
