"""Phase A, per unit: parse, normalise, hash and tokenize into temporary files."""

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
from batchloom.preparation.dedup import LineDeduplicator, SeenBatch, SeenTexts
from batchloom.preparation.documents import (
    EncodeContext,
    EncodedBatch,
    EncodeFault,
    PlacedMedium,
    RecordParser,
    encode_documents,
    estimate_characters,
    fault_rule,
    hash_and_measure,
    split_digests,
)
from batchloom.preparation.phases.ingest import RecordIngester
from batchloom.preparation.settings import OverlongError
from batchloom.preparation.units import (
    FACTS_NAME,
    ROW,
    CrashIsolation,
    CrashMarker,
    DropSample,
    PartCounts,
    ReasonCounts,
    RecordPosition,
    SourceCounts,
    StepFlow,
    Stopwatch,
    UnitFacts,
    UnitFiles,
    UnitProgress,
    UnitStatistics,
    UnitTask,
    UnusableError,
    attempt_folder,
    count_reason,
    move_into_place,
    read_unit_facts,
)
from batchloom.preparation.workers import MessageCallback
from batchloom.sources import PartReader, SourcePart, prefetch_sources
from batchloom.store import write_file
from batchloom.store.write import make_folder, sync_folder

# Handed to the tokenizer at once, in characters and in documents; decides nothing.
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1 << 15
# A batch above this is encoded with no other in memory.
_LARGE_BATCH_CHARACTERS = 16 << 20


def tokenize_unit(order: UnitTask, task: EncodeContext, tell: MessageCallback) -> UnitFacts:
    """Write a unit's temporary files beside their place, its facts last, and move them there.

    Args:
        order: the parts to read, and where the files go.
        task: the job's settings.
        tell: is told of what is taken in hand (:class:`CrashMarker`) and what came of it (:class:`UnitProgress`).

    Raises:
        InputError: a source cannot be read.
        UnusableError: a record that the recipe wants to end the job.
        OutputError: the files cannot be written.
    """
    folder = attempt_folder(order.folder, order.attempt)
    make_folder(folder)
    task.bounds.tell(order.cuts)
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(ThreadPoolExecutor(1, "encode")) if task.overlap else None
        files = stack.enter_context(UnitFiles(folder, task.dedup))
        run = UnitTokenizer(order, task, files, encoder, tell)
        parts = prefetch_sources(order.unit.parts, lambda part: part.source)
        for number, part in enumerate(parts):
            run.read(number, part)
        run.flush()
        run.settle()
        files.sync()
    facts = run.facts()
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    if move_into_place(folder, order.folder):
        return facts
    # Another attempt was first; where a record was kept aside, the two are not the same.
    return read_unit_facts(order.folder) or facts


class DocumentSink(Protocol):
    """What documents and bad records go to, as :class:`UnitFiles` has it."""

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
        """Take documents."""

    def add_bad(self, part: int, found: Sequence[BadRecord]) -> None:
        """Take bad records."""

    def checksums(self) -> dict[str, str]:
        """The XXH3-128 of each file of tokens; nothing where there are none."""


class PartRecordReader(Protocol):
    """What gives the records of a part, as :class:`PartReader` does."""

    @property
    def consumed(self) -> int:
        """Bytes read so far."""

    @property
    def start(self) -> int:
        """The part's first byte."""

    @property
    def stop(self) -> int:
        """One after its last byte."""

    def __iter__(self) -> Iterator[Records]: ...

    def finish(self) -> bytes:
        """Read what is left; the hash of the part's bytes."""


@dataclass(slots=True)
class _EncodeBatch:
    """Documents waiting to be tokenized, of one part or of several that are read alike."""

    reading: RecordParser | None = None
    documents: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    per_part: list[int] = field(default_factory=list)
    characters: int = 0

    @property
    def full(self) -> bool:
        """Whether it is worth handing to the tokenizer."""
        return self.characters >= _BATCH_CHARACTERS or len(self.documents) >= _BATCH_DOCUMENTS

    def fits(self, reading: RecordParser) -> bool:
        """Whether documents of this reading can be encoded together with those that wait."""
        mine = self.reading
        return mine is None or (mine.way, mine.chat) == (reading.way, reading.chat)


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
    """The state of one unit, or of a stretch of one, while it is read.

    Encoding lets go of the interpreter: with an encoder, one batch is encoded on a thread while
    the next is parsed and the one before is written.
    """

    def __init__(
        self,
        order: UnitTask,
        task: EncodeContext,
        files: DocumentSink,
        encoder: Executor | None,
        tell: MessageCallback,
    ) -> None:
        self._unit, self._task, self._files = order.unit, task, files
        self._encoder, self._tell = encoder, tell
        self._isolation = CrashIsolation(order.suspects, order.excluded)
        self._tally, self._watch = UnitStatistics(), Stopwatch()
        # Steps are listed in the order in which they are first told of.
        self._tally.flow(StepFlow(step="read"))
        removal = (
            LineDeduplicator(order.repeated, order.unit.number, task.pieces)
            if task.pieces
            else None
        )
        self._ingester = RecordIngester(
            normalized=task.normalize,
            cleaner=task.cleaner,
            removal=removal,
            tally=self._tally,
            watch=self._watch,
        )
        self._parts = [_PartCounters() for _ in order.unit.parts]
        self._batch = _EncodeBatch()
        self._encoding: _PendingBatch | None = None
        self._seen = SeenTexts() if task.dedup.mode != "none" else None
        self._heard, self._reasons = UnitProgress(), ReasonCounts()
        self._altered: dict[str, str] = {}

    def read(self, number: int, part: SourcePart) -> None:
        """Read one part to its end."""
        rules = self._task.readings.of(part.source).rules
        with PartReader(part, rules, self._task.bounds) as reader:
            for _ in self.steps(number, part, reader):
                pass

    def steps(self, number: int, part: SourcePart, reader: PartRecordReader) -> Iterator[None]:
        """Read one part to its end, a stretch of records between two that are given."""
        counts = self._parts[number]
        reading = self._task.readings.of(part.source)
        if not self._batch.fits(reading):
            self.flush()
        consumed = 0
        for found in self._watch.each("read", reader):
            now = reader.consumed
            counts.records += found.seen
            self._hear(size=now - consumed, records=found.seen)
            self._tally.flow(StepFlow(step="read", bytes_in=now - consumed))
            consumed = now
            for piece, careful in self._isolation.pieces(number, found):
                self._take(number, piece, reading, careful=careful)
            yield
        counts.hash = reader.finish().hex()
        counts.start, counts.stop = reader.start, reader.stop
        self._hear(size=part.stop - part.start - consumed)

    def _take(self, number: int, found: Records, reading: RecordParser, *, careful: bool) -> None:
        """Take records in hand; careful: nothing else is in hand with them."""
        if careful:
            self._let_go()
        if found.records:
            in_hand = (number, found.records[0]), (number, found.records[-1])
            self._tell(CrashMarker("clean", in_hand))
        seen, source = found.seen, self._unit.parts[number].source.name
        dropped = self._ingester.take(found, reading, source)
        self._parts[number].dropped.update(dropped)
        if found.bad:
            self._record_bad(number, found.bad)
        left = len(found.values) + dropped.total()
        self._tally.flow(StepFlow(step="read", documents_in=seen, documents_out=left))
        self._add(number, found, reading)
        if self._batch.full:
            self.flush()
        if careful:
            self._let_go()

    def _let_go(self) -> None:
        """Finish all that is in hand, and say that nothing is: who dies now dies of nothing known."""
        self.flush()
        self.settle()
        for stage in ("clean", "encode"):
            self._tell(CrashMarker(stage, None))

    def _hear(
        self, *, size: int = 0, records: int = 0, documents: int = 0, tokens: int = 0
    ) -> None:
        """Count what was read or made, and tell."""
        so_far = self._heard
        self._heard = msgspec.structs.replace(
            so_far,
            bytes=so_far.bytes + size,
            records=so_far.records + records,
            documents=so_far.documents + documents,
            tokens=so_far.tokens + tokens,
        )
        self._tell(self._heard)

    def _record_bad(self, number: int, bad: list[BadRecord]) -> None:
        self._parts[number].bad += len(bad)
        self._files.add_bad(number, bad)
        first = min(
            (self._heard.first_bad or (number, bad[0]), (number, bad[0])),
            key=lambda one: (one[0], one[1].record),
        )
        for one in bad:
            count_reason(self._reasons, one.reason)
        self._heard = msgspec.structs.replace(
            self._heard,
            bad=self._heard.bad + len(bad),
            first_bad=first,
            reasons=dict(self._reasons),
        )
        self._tell(self._heard)

    def _add(self, number: int, found: Records, reading: RecordParser) -> None:
        documents, found.values = found.values, []
        batch = self._batch
        batch.reading = reading
        batch.characters += sum(
            map(estimate_characters, documents) if reading.read else map(len, documents)
        )
        batch.documents += documents
        batch.records += found.records
        batch.offsets += found.offsets
        batch.parts.append(number)
        batch.per_part.append(len(documents))

    def flush(self) -> None:
        """Hand the documents that wait to the tokenizer, and write the ones before them."""
        batch, self._batch = self._batch, _EncodeBatch()
        if not batch.documents or batch.reading is None:
            return
        large = batch.characters > _LARGE_BATCH_CHARACTERS
        if large:
            self.settle()
        documents, batch.documents = batch.documents, []
        rows = np.empty(len(documents), ROW)
        rows["record"] = batch.records
        rows["offset"] = batch.offsets
        rows["part"] = np.repeat(np.array(batch.parts, np.uint32), batch.per_part)
        rows["side"] = rows["seen"] = 0
        before = self._encoding
        # The batch before is not written yet, and may be what its worker dies of.
        first = before[0] if before else rows
        self._tell(CrashMarker("encode", (_row_position(first[0]), _row_position(rows[-1]))))
        with self._watch.time("hash", documents=len(documents)):
            digests, sizes = hash_and_measure(documents)
            rows["hash"] = split_digests(digests)
            seen = self._look(batch.reading, digests)
        if seen is not None:
            documents = list(itertools.compress(documents, seen.fresh))
        future = self._submit(batch.reading, documents)
        del documents
        self._encoding = rows, sizes, seen, future
        if before:
            self._write(*before)
            self._tell(CrashMarker("encode", (_row_position(rows[0]), _row_position(rows[-1]))))
        if large or self._encoder is None:
            self.settle()

    def _look(self, reading: RecordParser, digests: list[bytes]) -> SeenBatch | None:
        """Which texts of a batch the unit has had already; None where nobody asks."""
        return self._seen.look(digests) if self._seen and reading.way == "text" else None

    def _submit(self, reading: RecordParser, documents: list[Any]) -> "Future[EncodedBatch]":
        if self._encoder is not None:
            return self._encoder.submit(self._encode, reading, documents)
        done: Future[EncodedBatch] = Future()
        try:
            done.set_result(self._encode(reading, documents))
        except OverlongError as error:
            done.set_exception(error)
        return done

    def _encode(self, reading: RecordParser, documents: list[Any]) -> EncodedBatch:
        with self._watch.time("encode", documents=len(documents)):
            return encode_documents(self._task, reading, documents)

    def settle(self) -> None:
        """Write the documents that are with the tokenizer."""
        before, self._encoding = self._encoding, None
        if before:
            self._write(*before)

    def _write(
        self,
        rows: NDArray[np.void],
        sizes: NDArray[np.int64],
        seen: SeenBatch | None,
        future: Future[EncodedBatch],
    ) -> None:
        try:
            made = future.result()
        except OverlongError as error:
            row = rows[error.number]
            bad = _make_bad_record(row, error.reason)
            raise UnusableError(self._unit.number, int(row["part"]), bad) from None
        # A batch is reported as one, so that the coordinator sees the share of its records that are bad.
        for part, faults in itertools.groupby(
            made.faults, key=lambda left: int(rows[left.number]["part"])
        ):
            unusable = [
                _make_bad_record(rows[left.number], left.reason, left.snippet) for left in faults
            ]
            self._record_bad(part, unusable)
        for left in made.dropped:
            self._count_dropped(rows[left.number], left)
        came, size = len(rows), int(sizes.sum())
        for what in made.altered:
            said = f"Template {self._task.chat.renderer.name} {what}" if self._task.chat else what
            self._altered.setdefault(said, self._unit.parts[int(rows["part"][0])].source.name)
        if made.numbers is not None:
            self._count_further(rows, made.numbers, made.faults + made.dropped)
            rows, sizes = rows[made.numbers], sizes[made.numbers]
        if made.sides is not None:
            rows["side"] = made.sides
        if seen is None or self._seen is None:
            rows["length"] = made.lengths
        else:
            rows["length"] = self._seen.lengths(seen, made.lengths)
            rows["seen"] = ~seen.fresh
        self._count(rows, sizes)
        self._tally.lengths(rows["length"])
        tokens = int(rows["length"].sum(dtype=np.int64))
        self._tally.flow(
            StepFlow(
                step="tokenize",
                documents_in=came,
                documents_out=len(rows),
                bytes_in=size,
                bytes_out=int(sizes.sum()),
                tokens_out=tokens,
                altered=made.moved,
            )
        )
        codes = self._task.membership.codes(rows["hash"])
        with self._watch.time("write temporary files", made.tokens.nbytes, len(rows)):
            self._files.add(
                *(made.tokens, rows, codes, made.trained),
                added=made.added,
                plain=made.plain,
                media=made.media,
            )
        self._hear(documents=len(rows), tokens=tokens)

    def _count_further(
        self, rows: NDArray[np.void], kept: NDArray[np.int64], left: list[EncodeFault]
    ) -> None:
        """Count what records gave beyond one document each, kept or left out."""
        gave = np.bincount(np.concatenate([kept, np.array([one.number for one in left], np.int64)]))
        several = np.flatnonzero(gave > 1)
        further = np.bincount(rows["part"][several], gave[several] - 1)
        for number in np.flatnonzero(further).tolist():
            self._parts[number].further += int(further[number])

    def _count_dropped(self, row: np.void, left: EncodeFault) -> None:
        """Count a document that a rule of conversations leaves out."""
        number, rule = int(row["part"]), fault_rule(left)
        self._parts[number].dropped[rule] += 1
        self._tally.dropped("tokenize", rule)
        if self._tally.wants_sample(rule):
            source = self._unit.parts[number].source.name
            sample = DropSample(source, int(row["record"]), left.snippet, left.reason)
            self._tally.sample("tokenize", rule, sample)

    def _count(self, rows: NDArray[np.void], sizes: NDArray[np.int64]) -> None:
        documents = np.bincount(rows["part"])
        tokens = np.bincount(rows["part"], rows["length"])
        texts = np.bincount(rows["part"], sizes)
        for number in np.flatnonzero(documents).tolist():
            counts = self._parts[number]
            counts.documents += int(documents[number])
            counts.tokens += int(tokens[number])
            self._tally.source(
                self._unit.parts[number].source.name,
                SourceCounts(int(documents[number]), int(texts[number]), int(tokens[number])),
            )

    def facts(self) -> UnitFacts:
        """What came of the unit."""
        parts = [
            PartCounts(
                start=run.start,
                stop=run.stop,
                records=run.records,
                documents=run.documents,
                tokens=run.tokens,
                empty=run.records + run.further - run.documents - run.bad - run.dropped.total(),
                bad=run.bad,
                further=run.further,
                dropped=dict(run.dropped),
                hash=run.hash,
            )
            for run in self._parts
        ]
        if empty := sum(part.empty for part in parts):
            self._tally.dropped("read", "empty", empty)
        return UnitFacts(
            parts=parts,
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            first_bad=self._heard.first_bad,
            checksums=self._files.checksums(),
            altered=self._altered,
            report=self._tally.report(self._watch.spent()),
        )


_PendingBatch = tuple[NDArray[np.void], NDArray[np.int64], SeenBatch | None, "Future[EncodedBatch]"]


def _row_position(row: np.void) -> RecordPosition:
    return int(row["part"]), int(row["record"])


def _make_bad_record(row: np.void, reason: str, snippet: str = "") -> BadRecord:
    """The record of a document that cannot be encoded."""
    return BadRecord(int(row["record"]), int(row["offset"]), None, reason, snippet)
