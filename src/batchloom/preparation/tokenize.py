"""Phase A, per unit: parse, normalise, hash and tokenize into temporary files."""

from collections import Counter
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.conversation import Pair
from batchloom.core.document import BadRecord, Records
from batchloom.preparation.chat_encoder import ChatEncoder
from batchloom.preparation.conversations import LeftOut
from batchloom.preparation.encode import (
    Encoded,
    beginning,
    encode_chats,
    encode_rows,
    encode_texts,
    hash_documents,
    size_of,
)
from batchloom.preparation.overlong import OverlongError
from batchloom.preparation.preferences import encode_labels, encode_pairs, encode_text_pairs
from batchloom.preparation.reading import Reading, Readings, Way
from batchloom.preparation.subsets import Membership, Smallest
from batchloom.preparation.tally import Tally
from batchloom.preparation.unit_files import FACTS_NAME, ROW, UnitFiles
from batchloom.preparation.units import Unit
from batchloom.preparation.work import PartCounts, UnitFacts
from batchloom.sources.beginnings import read_ahead
from batchloom.sources.cuts import RecordBounds
from batchloom.sources.parts import PartReader
from batchloom.sources.places import error_of
from batchloom.sources.rules import Part, ReadRules, Source
from batchloom.store.writer import make_folder, sync_folder, write_file
from batchloom.text.normalize import normalize
from batchloom.tokens import Tokenizer

# Handed to the tokenizer at once, in characters and in documents; decides nothing.
_BATCH_CHARACTERS = 2 << 20
_BATCH_DOCUMENTS = 1 << 15
# A batch above this is encoded with no other in memory.
_LARGE_BATCH = 4 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """What every unit of a job needs to know.

    Attributes:
        rules: how sources are cut and text files read.
        readings: how the records of each source become documents.
        bounds: finds where parts meet.
        normalize: whether text is normalised.
        tokenizer: turns text into ids.
        dtype: of a token on disk.
        membership: the shares of the subsets, without overrides.
        chat: tokenizer and template; None where no source has conversations.
    """

    rules: ReadRules
    readings: Readings
    bounds: RecordBounds
    normalize: bool
    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    membership: Membership
    chat: ChatEncoder | None = None


def tokenize_unit(
    unit: Unit, folder: Path, task: Task, tally: Tally, records_before: dict[str, int]
) -> UnitFacts:
    """Write a unit's temporary files into ``folder``, its facts last.

    Args:
        unit: the parts to read.
        folder: where the files go.
        task: the job's settings.
        tally: is told of everything that comes in.
        records_before: records of earlier parts by path of the source, for line numbers.

    Raises:
        InputError: a source cannot be read.
        TooManyBadRecordsError: the job is beyond saving.
        OutputError: the files cannot be written.
    """
    make_folder(folder)
    with UnitFiles(folder) as files, ThreadPoolExecutor(1, "encode") as encoder:
        run = _UnitRun(task, tally, files, encoder, len(unit.parts))
        parts = read_ahead(unit.parts, lambda part: part.source)
        for number, part in enumerate(parts):
            run.read(number, part, records_before)
        run.flush()
        run.settle()
        files.sync()
    facts = run.facts()
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    return facts


def tidy(found: Records, way: Way, *, normalized: bool) -> None:
    """Normalise the texts of a stretch, and leave out those that say nothing."""
    if way == "text-pairs" and normalized:
        found.values = [Pair(normalize(p.chosen), normalize(p.rejected)) for p in found.values]
    if way != "text":
        return
    if normalized:
        # Most stretches need nothing, and a look at each text would show.
        together = "".join(found.values)
        if not together.isascii() or "\r" in together:
            found.values = [normalize(text) for text in found.values]
        del together
    if "" in found.values or any(map(str.isspace, found.values)):
        kept = [at for at, text in enumerate(found.values) if text and not text.isspace()]
        found.values = [found.values[at] for at in kept]
        found.records = [found.records[at] for at in kept]
        found.offsets = [found.offsets[at] for at in kept]


class Encoding(Protocol):
    """What makes tokens of documents: a tokenizer, with a template where there are conversations."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into ids."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of a token."""

    @property
    def chat(self) -> ChatEncoder | None:
        """Tokenizer and template; None where no source has conversations."""


def encode_documents(task: Encoding, reading: Reading, documents: list[Any]) -> Encoded:
    """Tokenize documents of one reading."""
    if reading.way == "tokens":
        made = encode_rows(documents, task.tokenizer.vocab_size, task.dtype)
    elif reading.chat is None:
        return encode_texts(documents, task.tokenizer, task.dtype)
    elif reading.way == "text-pairs":
        made = encode_text_pairs(documents, task.tokenizer, reading.chat, task.dtype)
    elif task.chat is None:
        raise AssertionError("a job with conversations has a template")
    elif reading.way == "pairs":
        made = encode_pairs(documents, task.chat, reading.chat, task.dtype)
    elif reading.way == "labels":
        made = encode_labels(documents, task.chat, reading.chat, task.dtype)
    else:
        made = encode_chats(documents, task.chat, reading.chat, task.dtype)
    faults = [left._replace(snippet=beginning(documents[left.number])) for left in made.faults]
    return replace(made, faults=faults)


@dataclass(slots=True)
class _Batch:
    """Documents waiting to be tokenized, of one part or of several that are read alike."""

    reading: Reading | None = None
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

    def fits(self, reading: Reading) -> bool:
        """Whether documents of this reading can be encoded together with those that wait."""
        mine = self.reading
        return mine is None or (mine.way, mine.chat) == (reading.way, reading.chat)


@dataclass(slots=True)
class _PartRun:
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
class _UnitRun:
    """The state of one unit while it is read.

    Encoding lets go of the interpreter, so one batch is encoded on a thread while the next is
    parsed and the one before is written.
    """

    def __init__(
        self, task: Task, tally: Tally, files: UnitFiles, encoder: Executor, parts: int
    ) -> None:
        self._task, self._tally, self._files, self._encoder = task, tally, files, encoder
        self._parts = [_PartRun() for _ in range(parts)]
        self._sources: dict[int, tuple[Source, int]] = {}
        self._batch = _Batch()
        self._encoding: tuple[NDArray[np.void], Future[Encoded]] | None = None
        self._smallest = Smallest()
        self._first_bad: tuple[int, BadRecord] | None = None

    def read(self, number: int, part: Part, records_before: dict[str, int]) -> None:
        """Read one part to its end."""
        counts, before = self._parts[number], records_before.get(part.source.path, 0)
        self._sources[number] = part.source, before
        reading = self._task.readings.of(part.source)
        if not self._batch.fits(reading):
            self.flush()
        consumed = 0
        with PartReader(part, reading.rules, self._task.bounds) as reader:
            for found in reader:
                now = reader.consumed
                self._tally.read(now - consumed, found.seen)
                consumed = now
                counts.records += found.seen
                reading.take_in(found)
                if found.bad:
                    self._keep_aside(number, found.bad)
                self._add(number, found, reading)
                if self._batch.full:
                    self.flush()
            counts.hash = reader.finish().hex()
            counts.start, counts.stop = reader.start, reader.stop
        self._tally.read(part.stop - part.start - consumed, 0)
        records_before[part.source.path] = before + counts.records

    def _keep_aside(self, number: int, bad: list[BadRecord]) -> None:
        source, before = self._sources[number]
        self._parts[number].bad += len(bad)
        self._files.add_bad(number, bad)
        if self._first_bad is None:
            self._first_bad = (number, bad[0])
        sentence = str(error_of(source, self._task.rules, before, bad[0]))
        self._tally.bad(sentence, len(bad))

    def _add(self, number: int, found: Records, reading: Reading) -> None:
        tidy(found, reading.way, normalized=self._task.normalize)
        documents, found.values = found.values, []
        batch = self._batch
        batch.reading = reading
        batch.characters += sum(map(size_of, documents) if reading.read else map(len, documents))
        batch.documents += documents
        batch.records += found.records
        batch.offsets += found.offsets
        batch.parts.append(number)
        batch.per_part.append(len(documents))

    def flush(self) -> None:
        """Hand the documents that wait to the tokenizer, and write the ones before them."""
        batch, self._batch = self._batch, _Batch()
        if not batch.documents or batch.reading is None:
            return
        large = batch.characters > _LARGE_BATCH
        if large:
            self.settle()
        documents, batch.documents = batch.documents, []
        rows = np.empty(len(documents), ROW)
        rows["hash"] = hash_documents(documents)
        rows["record"] = batch.records
        rows["offset"] = batch.offsets
        rows["part"] = np.repeat(np.array(batch.parts, np.uint32), batch.per_part)
        rows["side"] = 0
        future = self._encoder.submit(encode_documents, self._task, batch.reading, documents)
        del documents
        before, self._encoding = self._encoding, (rows, future)
        if before:
            self._write(*before)
        if large:
            self.settle()

    def settle(self) -> None:
        """Write the documents that are with the tokenizer."""
        before, self._encoding = self._encoding, None
        if before:
            self._write(*before)

    def _write(self, rows: NDArray[np.void], future: Future[Encoded]) -> None:
        try:
            made = future.result()
        except OverlongError as error:
            row = rows[error.number]
            source, before = self._sources[int(row["part"])]
            raise error_of(source, self._task.rules, before, _bad(row, error.reason)) from None
        for left in made.faults:
            row = rows[left.number]
            self._keep_aside(int(row["part"]), [_bad(row, left.reason, left.snippet)])
        for left in made.dropped:
            self._parts[int(rows["part"][left.number])].dropped[rule_of(left)] += 1
        if made.numbers is not None:
            self._count_further(rows, made.numbers, made.faults + made.dropped)
            rows = rows[made.numbers]
        if made.sides is not None:
            rows["side"] = made.sides
        rows["length"] = made.lengths
        self._count(rows)
        codes = self._task.membership.codes(rows["hash"])
        self._smallest.add(rows["hash"], codes)
        self._files.add(made.tokens, rows, codes, made.trained)
        self._tally.kept(len(rows), len(made.tokens))

    def _count_further(
        self, rows: NDArray[np.void], kept: NDArray[np.int64], left: list[LeftOut]
    ) -> None:
        """Count what records gave beyond one document each, kept or left out."""
        gave = np.bincount(np.concatenate([kept, np.array([one.number for one in left], np.int64)]))
        several = np.flatnonzero(gave > 1)
        further = np.bincount(rows["part"][several], gave[several] - 1)
        for number in np.flatnonzero(further).tolist():
            self._parts[number].further += int(further[number])

    def _count(self, rows: NDArray[np.void]) -> None:
        documents = np.bincount(rows["part"])
        tokens = np.bincount(rows["part"], rows["length"])
        for number in np.flatnonzero(documents).tolist():
            self._parts[number].documents += int(documents[number])
            self._parts[number].tokens += int(tokens[number])

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
        return UnitFacts(
            parts=parts,
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            smallest=self._smallest.to_hex(),
            first_bad=self._first_bad,
            checksums=self._files.checksums(),
        )


def _bad(row: np.void, reason: str, snippet: str = "") -> BadRecord:
    """The record of a document that cannot be encoded."""
    return BadRecord(int(row["record"]), int(row["offset"]), None, reason, snippet)


def rule_of(left: LeftOut) -> str:
    """The rule by which a document was left out: the reason up to its figures."""
    return left.reason.partition(":")[0]
