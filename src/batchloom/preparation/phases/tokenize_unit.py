"""Phase A, per unit: parse, normalize, hash and tokenize into temporary files."""

import contextlib
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import DamagedFileError
from batchloom.preparation.dedup.line_dedup import LineDeduplicator, hash_segments
from batchloom.preparation.dedup.sorted_keys import open_key_writer
from batchloom.preparation.documents.document_facts import estimate_characters, hash_and_measure, split_digests
from batchloom.preparation.documents.encode_documents import EncodeContext, UnitEncoder, normalize_records
from batchloom.preparation.documents.encoded_batch import (
    ROUNDED_WEIGHTS,
    UNTRAINED_RULE,
    EncodedBatch,
    EncodeFault,
    OverlongError,
)
from batchloom.preparation.documents.record_parsers import RecordParser
from batchloom.preparation.units.unit_files import ROW, UnitFiles
from batchloom.preparation.units.unit_report import (
    DropSample,
    ReasonCounts,
    SourceCounts,
    StepFlow,
    Stopwatch,
    UnitStatistics,
    count_reason,
)
from batchloom.preparation.units.units import (
    CrashIsolation,
    CrashMarker,
    DamagedPart,
    RecordPosition,
    Unit,
    UnitProgress,
    UnitTask,
    UnusableError,
)
from batchloom.preparation.units.work_folder import (
    FACTS_NAME,
    Alteration,
    PartCounts,
    UnitFacts,
    attempt_folder,
    move_into_place,
    open_attempt_file,
    read_unit_facts,
)
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources import PartReader, SourcePart, prefetch_sources
from batchloom.store import wrap_write_errors, write_file
from batchloom.store.format import SUBSETS
from batchloom.store.write import make_folder, sync_folder
from batchloom.text import TextCleaner

# Drop reason of a document that consists of repeated lines or paragraphs alone.
REPEATED_REASON = "only repeated lines"

_T = TypeVar("_T")


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
        self._normalized, self._cleaner, self._line_deduplicator = (normalized, cleaner, line_deduplicator)
        self._statistics, self._stopwatch = statistics, stopwatch

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
        names, original_texts = [step.name for step in self._cleaner.steps], records.values
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
        original_texts, step = records.values, self._line_deduplicator.repeat_unit
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


# Maximum number of remembered texts, about 40 MB. Repeats of other texts are tokenized, and removed by deduplication.
_MAX_REMEMBERED = 1 << 18
_UNKNOWN_LENGTH = -1


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """Number of each text of a batch (-1: not remembered), and whether it is new."""

    numbers: NDArray[np.int64]
    fresh: NDArray[np.bool_]


@final
class SeenTexts:
    """Hashes of the texts of a unit, each with its number of tokens.

    This only avoids tokenizing texts that are dropped later: deduplication over all units finds the
    repeats again.
    """

    def __init__(self, most: int = _MAX_REMEMBERED) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lengths = np.zeros(most, np.uint32)

    def look(self, digests: Sequence[bytes]) -> SeenBatch:
        """Return which of the next texts are repeats; remember new ones if possible."""
        numbers_by_digest, before = self._numbers, len(self._numbers)
        if before + len(digests) > len(self._lengths):
            numbers = np.array([numbers_by_digest.get(digest, _UNKNOWN_LENGTH) for digest in digests], np.int64)
            return SeenBatch(numbers, numbers == _UNKNOWN_LENGTH)
        numbers = np.array(
            [numbers_by_digest.setdefault(digest, len(numbers_by_digest)) for digest in digests], np.int64
        )
        # Numbers ascend, so a new number is above all numbers before it.
        highest = np.maximum.accumulate(np.concatenate([[before - 1], numbers[:-1]]))
        return SeenBatch(numbers, numbers > highest)

    def lengths(self, batch: SeenBatch, fresh_lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the tokens of each text of a batch, given those of its new texts.

        A repeat has the length of its first occurrence. Batches come in the order of :meth:`look`.
        """
        lengths = np.empty(len(batch.fresh), np.uint32)
        lengths[batch.fresh] = fresh_lengths
        new = batch.fresh & (batch.numbers != _UNKNOWN_LENGTH)
        self._lengths[batch.numbers[new]] = lengths[new]
        lengths[~batch.fresh] = self._lengths[batch.numbers[~batch.fresh]]
        return lengths


# Size of a tokenizer batch in characters and in documents; it does not affect the output.
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1 << 15
# A larger batch is encoded with no other batch in memory.
_LARGE_BATCH_CHARACTERS = 16 << 20


def tokenize_unit(unit_task: UnitTask, context: EncodeContext, send_message: MessageCallback) -> UnitFacts:
    """Write a unit's files into an attempt folder, facts last, and move it into place.

    ``send_message`` receives a :class:`CrashMarker` before a batch, a :class:`UnitProgress` after it, and a
    :class:`DamagedPart` for a damaged file. A record that ends the job, as the recipe demands, raises UnusableError.
    """
    folder = attempt_folder(unit_task.output_path, unit_task.attempt)
    tokenize_parts = partial(_tokenize_parts, unit_task, context, folder, send_message)
    facts = _retry_without_damaged(tokenize_parts, unit_task.unit, context, send_message)
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    if move_into_place(folder, unit_task.output_path):
        return facts
    # Another attempt was first; its facts differ from ours if a record was excluded.
    return read_unit_facts(unit_task.output_path) or facts


class _DamagedPartError(Exception):
    def __init__(self, part: int, error: DamagedFileError) -> None:
        super().__init__(str(error))
        self.part = part


@contextlib.contextmanager
def _name_part(number: int) -> Iterator[None]:
    try:
        yield
    except DamagedFileError as error:
        raise _DamagedPartError(number, error) from error


def _retry_without_damaged(
    read_parts: Callable[[Mapping[int, str]], _T], unit: Unit, context: EncodeContext, send_message: MessageCallback
) -> _T:
    """Call ``read_parts`` again without the parts whose files turn out to be damaged.

    What was read of such a file before may be wrong, too. Its argument has the damage by part.
    """
    try:
        return read_parts({})
    except _DamagedPartError as error:
        # The other parts are examined at once: with many damaged files, one retry each would take hours.
        damage = {error.part: str(error), **_find_damage(unit, error.part + 1, context)}
    for part, reason in damage.items():
        send_message(DamagedPart(part, reason))
    return read_parts(damage)


def _find_damage(unit: Unit, first: int, context: EncodeContext) -> dict[int, str]:
    """Read the parts from ``first`` on, and return the damage of files by part."""
    damage = {}
    for number, part in enumerate(unit.parts):
        if number < first:
            continue
        try:
            rules = context.record_parsers.get_parser(part.source).rules
            with PartReader(part, rules, context.bounds) as reader:
                for _ in reader:
                    pass
                reader.finish()
        except DamagedFileError as error:
            damage[number] = str(error)
    return damage


def _tokenize_parts(
    unit_task: UnitTask,
    context: EncodeContext,
    folder: Path,
    send_message: MessageCallback,
    damage: Mapping[int, str],
) -> UnitFacts:
    if damage:
        # Not every file of the first try is written again.
        with wrap_write_errors(folder):
            shutil.rmtree(folder)
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(ThreadPoolExecutor(1, "encode")) if context.overlap else None
        files = stack.enter_context(UnitFiles(folder, context.dedup))
        unit_tokenizer = UnitTokenizer(unit_task, context, files, encoder, send_message)
        parts = prefetch_sources(unit_task.unit.parts, lambda part: part.source)
        for number, part in enumerate(parts):
            if number in damage:
                unit_tokenizer.leave_out(number, part, damage[number])
                continue
            rules = context.record_parsers.get_parser(part.source).rules
            with _name_part(number), PartReader(part, rules, context.bounds) as reader:
                for _ in unit_tokenizer.iter_steps(number, part, reader):
                    pass
        unit_tokenizer.flush()
        unit_tokenizer.write_pending()
        files.sync()
    return unit_tokenizer.make_facts()


class DocumentSink(Protocol):
    """Protocol for the output of documents and bad records, like :class:`UnitFiles`."""

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        """Add documents, with their rows and the codes of their subsets."""

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the columns of the next records of a part, by record."""

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
        self._unit, self._context, self._files = unit_task.unit, context, files
        self._encoder, self._send_message = encoder, send_message
        self._isolation = CrashIsolation(unit_task.suspected_ranges, unit_task.excluded)
        self._statistics, self._stopwatch = UnitStatistics(), Stopwatch()
        # Reports list steps in the order of their first flow.
        self._statistics.flow(StepFlow(step="read"))
        line_deduplicator = (
            LineDeduplicator(unit_task.repeated, unit_task.unit.number, context.dedup.repeat_unit)
            if context.dedup.repeat_unit
            else None
        )
        self._ingester = RecordIngester(
            normalized=context.normalize,
            cleaner=context.cleaner,
            line_deduplicator=line_deduplicator,
            statistics=self._statistics,
            stopwatch=self._stopwatch,
        )
        self._parts = [PartCounts() for _ in unit_task.unit.parts]
        # Of each part, as in the rows.
        self._subset_codes = np.array(
            [1 + SUBSETS.index(part.source.subset) if part.source.subset else 0 for part in unit_task.unit.parts],
            np.uint8,
        )
        self._batch = _EncodeBatch()
        self._pending_batch: _PendingBatch | None = None
        self._seen_texts = SeenTexts() if context.dedup.mode != "none" else None
        self._progress, self._reasons = UnitProgress(), ReasonCounts()
        self._alterations: dict[str, Alteration] = {}

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
            for reason, count in record_batch.left_out.items():
                counts.count_dropped(reason, count)
            self._report_progress(size=bytes_consumed - consumed, records=record_batch.records_read)
            self._statistics.flow(StepFlow(step="read", bytes_in=bytes_consumed - consumed))
            consumed = bytes_consumed
            self._files.add_columns(number, record_batch.columns)
            for record_slice, is_suspected in self._isolation.split_batch(number, record_batch):
                self._ingest_records(number, record_slice, record_parser, is_suspected=is_suspected)
            yield
        counts.hash = reader.finish().hex()
        counts.start, counts.stop = reader.start, reader.stop
        self._report_progress(size=part.stop - part.start - consumed)

    def leave_out(self, number: int, part: SourcePart, damage: str) -> None:
        """Count a part of a damaged file as read, without records."""
        self._parts[number] = PartCounts(start=part.start, stop=part.start, damage=damage)
        self._report_progress(size=part.stop - part.start)

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
        for reason, count in dropped.items():
            self._parts[number].count_dropped(reason, count)
        if records.untrained:
            self._parts[number].count_dropped(UNTRAINED_RULE, len(records.untrained))
            self._statistics.dropped("read", UNTRAINED_RULE, len(records.untrained))
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
        batch.weights += records.weights or [1.0] * len(documents)
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
            self._count_dropped(rows[fault.number], fault)
        for number in encoded_batch.truncated:
            self._parts[int(rows[number]["part"])].truncated += 1
        input_count, input_bytes = len(rows), int(sizes.sum())
        subject = f"Template {self._context.chat.renderer.name}" if self._context.chat else "The tokenizer"
        for change, numbers in encoded_batch.altered.items():
            self._note_alteration(f"{subject} {change}", rows[numbers])
        if encoded_batch.flags.rounded:
            self._note_alteration(ROUNDED_WEIGHTS, rows)
        if encoded_batch.numbers is not None:
            self._count_further(rows, encoded_batch.numbers, encoded_batch.faults + encoded_batch.dropped)
            rows, sizes = rows[encoded_batch.numbers], sizes[encoded_batch.numbers]
        if encoded_batch.sides.size:
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
        codes = self._context.membership.codes(rows)
        with self._stopwatch.time("write temporary files", encoded_batch.ids.nbytes, len(rows)):
            self._files.add(encoded_batch, rows, codes)
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
        number, rule = int(row["part"]), fault.rule
        self._parts[number].count_dropped(rule)
        source = self._unit.parts[number].source.name
        sample = DropSample(source, int(row["record"]), fault.snippet, fault.reason)
        self._statistics.dropped("tokenize", rule, sample=sample)

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

    def _note_alteration(self, description: str, rows: NDArray[np.void]) -> None:
        """Count the records that a change concerns, and keep the first."""
        first = rows[0]
        added = Alteration(len(rows), int(first["part"]), int(first["record"]), int(first["offset"]))
        earlier = self._alterations.get(description)
        self._alterations[description] = earlier.add(added) if earlier else added

    def make_facts(self) -> UnitFacts:
        parts = self._parts
        for part in parts:
            used = part.documents + part.bad + sum(part.dropped.values())
            part.empty = part.records + part.further - used
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


_PendingBatch = tuple[NDArray[np.void], NDArray[np.int64], SeenBatch | None, Future[EncodedBatch]]


def _row_position(row: np.void) -> RecordPosition:
    return int(row["part"]), int(row["record"])


def _make_bad_record(row: np.void, reason: str, snippet: str = "") -> BadRecord:
    return BadRecord(int(row["record"]), int(row["offset"]), None, reason, snippet)


def write_segment_keys(unit_task: UnitTask, context: EncodeContext, send_message: MessageCallback) -> int:
    """Write the keys of a unit's lines or paragraphs and return their number.

    The number includes blank lines, which have no key. ``send_message`` receives a :class:`CrashMarker` before
    each batch, and a :class:`DamagedPart` for a damaged file.
    """
    write_keys = partial(_write_part_keys, unit_task, context, send_message)
    return _retry_without_damaged(write_keys, unit_task.unit, context, send_message)


def _write_part_keys(
    unit_task: UnitTask, context: EncodeContext, send_message: MessageCallback, damage: Mapping[int, str]
) -> int:
    if context.dedup.repeat_unit is None:
        raise AssertionError("repeated lines or paragraphs are not removed in this job")
    # Drops and bad records are counted in the tokenization pass, not here.
    ingester = RecordIngester(
        normalized=context.normalize,
        cleaner=context.cleaner,
        line_deduplicator=None,
        statistics=UnitStatistics(),
        stopwatch=Stopwatch(),
    )
    crash_isolation, count = CrashIsolation(unit_task.suspected_ranges, unit_task.excluded), 0
    parts = prefetch_sources(unit_task.unit.parts, lambda part: part.source)
    with (
        open_attempt_file(unit_task.output_path, unit_task.attempt) as attempt_path,
        open_key_writer(attempt_path) as add,
    ):
        for number, part in enumerate(parts):
            record_parser = context.record_parsers.get_parser(part.source)
            if record_parser.record_kind != "text" or number in damage:
                continue
            with _name_part(number), PartReader(part, record_parser.rules, context.bounds) as reader:
                for record_batch in reader:
                    for record_slice, is_suspected in crash_isolation.split_batch(number, record_batch):
                        if record_slice.records:
                            records = record_slice.records[0], record_slice.records[-1]
                            send_message(CrashMarker("clean", ((number, records[0]), (number, records[1]))))
                        ingester.ingest(record_slice, record_parser, part.source.name)
                        numbers = [number] * len(record_slice.values)
                        keys, count = hash_segments(record_slice.values, numbers, count, context.dedup.repeat_unit)
                        add(keys)
                        if is_suspected:
                            send_message(CrashMarker("clean", None))
                reader.finish()
    return count
