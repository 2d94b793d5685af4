"""Records of a unit, batch by batch, as tokens in its files."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.preparation.dedup.line_dedup import LineDeduplicator
from batchloom.preparation.documents.document_facts import estimate_characters, hash_and_measure, split_digests
from batchloom.preparation.documents.encode_documents import UnitEncoder
from batchloom.preparation.documents.encoded_batch import UNTRAINED_RULE, EncodedBatch, OverlongError
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.preparation.units.document_sink import DocumentSink, PartRecordReader
from batchloom.preparation.units.record_ingester import RecordIngester
from batchloom.preparation.units.seen_texts import SeenBatch, SeenTexts
from batchloom.preparation.units.unit_counts import UnitCounts
from batchloom.preparation.units.unit_report import StepFlow, Stopwatch
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.units import CrashIsolation, CrashMarker, RecordPosition, UnitTask, UnusableError
from batchloom.preparation.units.work_folder import PartCounts, UnitFacts
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources import SourcePart
from batchloom.store.format import SUBSETS

# Size of a tokenizer batch in characters and in documents; it does not affect the output.
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1 << 15
# A larger batch is encoded with no other batch in memory.
_LARGE_BATCH_CHARACTERS = 16 << 20


@dataclass(slots=True)
class _EncodeBatch:
    """Documents that wait for tokenization, of parts that are encoded alike."""

    record_parser: RecordParser | None = None
    documents: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    per_part: list[int] = field(default_factory=list)
    characters: int = 0

    @property
    def full(self) -> bool:
        """True when the batch is large enough to tokenize."""
        return self.characters >= _BATCH_CHARACTERS or len(self.documents) >= _BATCH_DOCUMENTS

    def accepts(self, record_parser: RecordParser) -> bool:
        batch_parser = self.record_parser
        return batch_parser is None or (batch_parser.record_kind, batch_parser.chat) == (
            record_parser.record_kind,
            record_parser.chat,
        )


@final
class UnitTokenizer:
    """State of one unit, or a section of one, while it is read.

    Encoding releases the GIL: with an ``encoder``, one batch is encoded on a thread while the next is parsed
    and the one before is written.
    """

    def __init__(
        self,
        unit_task: UnitTask,
        context: UnitEncoder,
        files: DocumentSink,
        encoder: Executor | None,
        send_message: MessageCallback,
    ) -> None:
        self._unit = unit_task.unit
        self._context = context
        self._files = files
        self._encoder = encoder
        self._send_message = send_message
        self._isolation = CrashIsolation(unit_task.suspected_ranges, unit_task.excluded)
        self._counts = UnitCounts(unit_task.unit, unit_task.whole_files, send_message)
        self._stopwatch = Stopwatch()
        line_deduplicator = (
            LineDeduplicator(unit_task.repeated, unit_task.unit.number, context.dedup.repeat_unit)
            if context.dedup.repeat_unit
            else None
        )
        self._ingester = RecordIngester(
            normalized=context.normalize,
            cleaner=context.cleaner,
            line_deduplicator=line_deduplicator,
            statistics=self._counts.statistics,
            stopwatch=self._stopwatch,
        )
        # Of each part, as in the rows.
        self._subset_codes = np.array(
            [1 + SUBSETS.index(part.source.subset) if part.source.subset else 0 for part in unit_task.unit.parts],
            np.uint8,
        )
        self._batch = _EncodeBatch()
        self._pending_batch: _PendingBatch | None = None
        self._seen_texts = SeenTexts() if context.dedup.mode != "none" else None

    def iter_steps(self, number: int, part: SourcePart, reader: PartRecordReader) -> Iterator[None]:
        """Read one complete part, yielding after each record batch."""
        counts = self._counts.parts[number]
        record_parser = self._context.record_parsers.get_parser(part.source)
        if not self._batch.accepts(record_parser):
            self.flush()
        self._counts.begin_part(number)
        consumed = 0
        for record_batch in self._stopwatch.time_each("read", reader):
            bytes_consumed = reader.consumed
            counts.records += record_batch.records_read
            for reason, count in record_batch.left_out.items():
                counts.count_dropped(reason, count)
            self._counts.report_progress(size=bytes_consumed - consumed, records=record_batch.records_read)
            self._counts.statistics.flow(StepFlow(step="read", bytes_in=bytes_consumed - consumed))
            consumed = bytes_consumed
            self._files.add_columns(number, record_batch.columns)
            for record_slice, is_suspected in self._isolation.split_batch(number, record_batch):
                self._ingest_records(number, record_slice, record_parser, is_suspected=is_suspected)
            self._counts.release_bad()
            yield
        counts.hash = reader.finish().hex()
        counts.start = reader.start
        counts.stop = reader.stop
        self._counts.report_progress(size=part.stop - part.start - consumed)

    def leave_out(self, number: int, part: SourcePart, damage: str) -> None:
        """Count a part of a damaged file as read, without records."""
        self._counts.parts[number] = PartCounts(start=part.start, stop=part.start, damage=damage)
        self._counts.report_progress(size=part.stop - part.start)

    def _ingest_records(
        self, number: int, records: Records, record_parser: RecordParser, *, is_suspected: bool
    ) -> None:
        """Process records; suspected ones are processed with no other batch pending."""
        if is_suspected:
            self._flush_all()
        if records.records:
            in_hand = (number, records.records[0]), (number, records.records[-1])
            self._send_message(CrashMarker("clean", in_hand))
        record_count = records.records_read
        source = self._unit.parts[number].source.name
        dropped = self._ingester.ingest(records, record_parser, source)
        for reason, count in dropped.items():
            self._counts.parts[number].count_dropped(reason, count)
        if records.untrained:
            self._counts.parts[number].count_dropped(UNTRAINED_RULE, len(records.untrained))
            self._counts.statistics.dropped("read", UNTRAINED_RULE, len(records.untrained))
        if records.bad:
            self._record_bad(number, records.bad)
        document_count = len(records.values) + dropped.total()
        self._counts.statistics.flow(StepFlow(step="read", documents_in=record_count, documents_out=document_count))
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

    def _record_bad(self, number: int, bad_records: list[BadRecord]) -> None:
        self._files.add_bad(number, bad_records)
        self._counts.count_bad(number, bad_records)

    def _add(self, number: int, records: Records, record_parser: RecordParser) -> None:
        documents = records.values
        records.values = []
        batch = self._batch
        batch.record_parser = record_parser
        batch.characters += sum(
            map(estimate_characters, documents) if record_parser.record_reader else map(len, documents)
        )
        batch.documents += documents
        batch.records += records.records
        batch.offsets += records.offsets
        batch.weights += records.weights or [1.0] * len(documents)
        batch.parts.append(number)
        batch.per_part.append(len(documents))

    def flush(self) -> None:
        """Submit the waiting documents for encoding and write the batch before them."""
        batch = self._batch
        self._batch = _EncodeBatch()
        if not batch.documents or batch.record_parser is None:
            return
        large = batch.characters > _LARGE_BATCH_CHARACTERS
        if large:
            self.write_pending()
        documents = batch.documents
        batch.documents = []
        weights = batch.weights if any(weight != 1 for weight in batch.weights) else []
        rows = np.empty(len(documents), ROW)
        rows["record"] = batch.records
        rows["offset"] = batch.offsets
        rows["part"] = np.repeat(np.array(batch.parts, np.uint32), batch.per_part)
        rows["subset"] = self._subset_codes[rows["part"]]
        rows["side"] = rows["seen"] = 0
        # The previous batch is not written yet, so it may still be the one that crashes the worker.
        first = self._pending_batch[0] if self._pending_batch else rows
        self._send_message(CrashMarker("encode", (_row_position(first[0]), _row_position(rows[-1]))))
        with self._stopwatch.time("hash", documents=len(documents)):
            digests, sizes = hash_and_measure(documents)
            rows["hash"] = split_digests(digests)
            is_text = batch.record_parser.record_kind == "text"
            seen_batch = self._seen_texts.look(digests) if self._seen_texts and is_text else None
        if seen_batch is not None:
            documents = list(itertools.compress(documents, seen_batch.fresh))
            weights = list(itertools.compress(weights, seen_batch.fresh))
        if self._encoder is None:
            encoded_batch = self._encode(rows, batch.record_parser, documents, weights)
            del documents
            self._write(rows, sizes, seen_batch, encoded_batch)
            return
        future = self._encoder.submit(self._encode, rows, batch.record_parser, documents, weights)
        del documents
        if self._pending_batch:
            self.write_pending()
            self._send_message(CrashMarker("encode", (_row_position(rows[0]), _row_position(rows[-1]))))
        self._pending_batch = rows, sizes, seen_batch, future
        if large:
            self.write_pending()

    def _encode(
        self, rows: NDArray[np.void], record_parser: RecordParser, documents: list[Any], weights: list[float]
    ) -> EncodedBatch:
        try:
            with self._stopwatch.time("encode", documents=len(documents)):
                return self._context.encode(record_parser, documents, weights)
        except OverlongError as error:
            row = rows[error.number]
            bad_record = _make_bad_record(row, error.reason)
            raise UnusableError(self._unit.number, int(row["part"]), bad_record) from None

    def write_pending(self) -> None:
        """Write the batch that is being encoded."""
        if self._pending_batch:
            (rows, sizes, seen_batch, future), self._pending_batch = self._pending_batch, None
            self._write(rows, sizes, seen_batch, future.result())

    def _write(
        self,
        rows: NDArray[np.void],
        sizes: NDArray[np.int64],
        seen_batch: SeenBatch | None,
        encoded_batch: EncodedBatch,
    ) -> None:
        # Bad records of a batch are reported together, so that the coordinator sees their share of the batch.
        for part, faults in itertools.groupby(encoded_batch.faults, key=lambda fault: int(rows[fault.number]["part"])):
            bad_records = [_make_bad_record(rows[fault.number], fault.reason, fault.snippet) for fault in faults]
            self._record_bad(part, bad_records)
        for fault in encoded_batch.dropped:
            self._counts.count_dropped(rows[fault.number], fault)
        for number in encoded_batch.truncated:
            self._counts.parts[int(rows[number]["part"])].truncated += 1
        input_count = len(rows)
        input_bytes = int(sizes.sum())
        subject = f"Template {self._context.chat.renderer.name}" if self._context.chat else "The tokenizer"
        self._counts.count_alterations(subject, rows, encoded_batch)
        if encoded_batch.numbers is not None:
            self._counts.count_further(rows, encoded_batch.numbers, encoded_batch.faults + encoded_batch.dropped)
            rows = rows[encoded_batch.numbers]
            sizes = sizes[encoded_batch.numbers]
        if encoded_batch.sides.size:
            rows["side"] = encoded_batch.sides
        if seen_batch is None or self._seen_texts is None:
            rows["length"] = encoded_batch.lengths
        else:
            rows["length"] = self._seen_texts.lengths(seen_batch, encoded_batch.lengths)
            rows["seen"] = ~seen_batch.fresh
        self._counts.count_documents(rows, sizes)
        self._counts.statistics.lengths(rows["length"])
        tokens = int(rows["length"].sum(dtype=np.int64))
        self._counts.statistics.flow(
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
        codes = self._context.membership.codes(rows)
        with self._stopwatch.time("write temporary files", encoded_batch.ids.nbytes, len(rows)):
            self._files.add(encoded_batch, rows, codes)
        self._counts.report_progress(documents=len(rows), tokens=tokens)

    def make_facts(self) -> UnitFacts:
        """Return the facts of the unit, when all its parts are written."""
        return self._counts.make_facts(self._files.checksums(), self._stopwatch.get_stage_times())


_PendingBatch = tuple[NDArray[np.void], NDArray[np.int64], SeenBatch | None, Future[EncodedBatch]]


def _row_position(row: np.void) -> RecordPosition:
    return int(row["part"]), int(row["record"])


def _make_bad_record(row: np.void, reason: str, snippet: str = "") -> BadRecord:
    return BadRecord(int(row["record"]), int(row["offset"]), None, reason, snippet)
