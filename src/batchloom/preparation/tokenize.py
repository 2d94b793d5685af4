"""Phase A, per unit: parse, normalise, hash and tokenize into temporary files."""

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.preparation.subsets import Membership, Smallest
from batchloom.preparation.tally import Tally
from batchloom.preparation.unit_files import FACTS_NAME, ROW, UnitFiles, hash_texts, with_control
from batchloom.preparation.units import Unit
from batchloom.preparation.work import PartCounts, UnitFacts
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

# Tokens of documents back to back, and how many each has.
Encoded = tuple[NDArray[np.generic], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Task:
    """What every unit of a job needs to know.

    Attributes:
        rules: how sources are read.
        bounds: finds where parts meet.
        normalize: whether text is normalised.
        tokenizer: turns text into ids.
        dtype: of a token on disk.
        membership: the shares of the subsets, without overrides.
    """

    rules: ReadRules
    bounds: RecordBounds
    normalize: bool
    tokenizer: Tokenizer
    dtype: np.dtype[np.generic]
    membership: Membership


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
        for number, part in enumerate(unit.parts):
            run.read(number, part, records_before)
        run.flush()
        run.settle()
        files.sync()
    facts = run.facts()
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    return facts


def _encode(task: Task, texts: list[str]) -> Encoded:
    """Tokenize ``texts``, which are let go of as soon as they are not needed."""
    ids, bounds = task.tokenizer.encode_batch(texts)
    texts.clear()
    plain = ids.astype(task.dtype)
    del ids
    lengths = np.diff(bounds) + (1 if task.tokenizer.bos_id is None else 2)
    return with_control(plain, bounds, task.tokenizer), lengths.astype(np.uint32)


@dataclass(slots=True)
class _Batch:
    """Documents waiting to be tokenized, of one part or of several."""

    texts: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    per_part: list[int] = field(default_factory=list)
    characters: int = 0

    @property
    def full(self) -> bool:
        """Whether it is worth handing to the tokenizer."""
        return self.characters >= _BATCH_CHARACTERS or len(self.texts) >= _BATCH_DOCUMENTS


@dataclass(slots=True)
class _PartRun:
    start: int = 0
    stop: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
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
        self._batch = _Batch()
        self._encoding: tuple[_Batch, NDArray[np.void], Future[Encoded]] | None = None
        self._smallest = Smallest()
        self._first_bad: tuple[int, BadRecord] | None = None

    def read(self, number: int, part: Part, records_before: dict[str, int]) -> None:
        """Read one part to its end."""
        counts, before = self._parts[number], records_before.get(part.source.path, 0)
        consumed = 0
        with PartReader(part, self._task.rules, self._task.bounds) as reader:
            for found in reader:
                now = reader.consumed
                self._tally.read(now - consumed, found.seen)
                consumed = now
                counts.records += found.seen
                if found.bad:
                    self._keep_aside(number, part.source, before, found)
                self._add(number, found)
                if self._batch.full:
                    self.flush()
            counts.hash = reader.finish().hex()
            counts.start, counts.stop = reader.start, reader.stop
        self._tally.read(part.stop - part.start - consumed, 0)
        records_before[part.source.path] = before + counts.records

    def _keep_aside(self, number: int, source: Source, before: int, found: Records) -> None:
        first = found.bad[0]
        self._parts[number].bad += len(found.bad)
        self._files.add_bad(number, found)
        if self._first_bad is None:
            self._first_bad = (number, first)
        sentence = str(error_of(source, self._task.rules, before, first))
        self._tally.bad(sentence, len(found.bad))

    def _add(self, number: int, found: Records) -> None:
        texts, found.values = found.values, []
        if self._task.normalize:
            # Most stretches need nothing, and a look at each text would show.
            together = "".join(texts)
            if not together.isascii() or "\r" in together:
                texts = [normalize(text) for text in texts]
            del together
        records, offsets = found.records, found.offsets
        if "" in texts or any(map(str.isspace, texts)):
            kept = [at for at, text in enumerate(texts) if text and not text.isspace()]
            texts = [texts[at] for at in kept]
            records = [records[at] for at in kept]
            offsets = [offsets[at] for at in kept]
        batch = self._batch
        batch.texts += texts
        batch.records += records
        batch.offsets += offsets
        batch.parts.append(number)
        batch.per_part.append(len(texts))
        batch.characters += sum(map(len, texts))

    def flush(self) -> None:
        """Hand the documents that wait to the tokenizer, and write the ones before them."""
        batch, self._batch = self._batch, _Batch()
        if not batch.texts:
            return
        large = batch.characters > _LARGE_BATCH
        if large:
            self.settle()
        texts, batch.texts = batch.texts, []
        rows = np.empty(len(texts), ROW)
        rows["hash"] = hash_texts(texts)
        rows["record"] = batch.records
        rows["offset"] = batch.offsets
        rows["part"] = np.repeat(np.array(batch.parts, np.uint32), batch.per_part)
        future = self._encoder.submit(_encode, self._task, texts)
        del texts
        before, self._encoding = self._encoding, (batch, rows, future)
        if before:
            self._write(*before)
        if large:
            self.settle()

    def settle(self) -> None:
        """Write the documents that are with the tokenizer."""
        before, self._encoding = self._encoding, None
        if before:
            self._write(*before)

    def _write(self, batch: _Batch, rows: NDArray[np.void], future: Future[Encoded]) -> None:
        tokens, rows["length"] = future.result()
        self._count(batch, rows["length"])
        codes = self._task.membership.codes(rows["hash"])
        self._smallest.add(rows["hash"], codes)
        self._files.add(tokens, rows, codes)
        self._tally.kept(len(rows), len(tokens))

    def _count(self, batch: _Batch, lengths: NDArray[np.uint32]) -> None:
        at = 0
        for number, documents in zip(batch.parts, batch.per_part, strict=True):
            counts = self._parts[number]
            counts.documents += documents
            counts.tokens += int(lengths[at : at + documents].sum(dtype=np.int64))
            at += documents

    def facts(self) -> UnitFacts:
        """What came of the unit."""
        parts = [
            PartCounts(
                start=run.start,
                stop=run.stop,
                records=run.records,
                documents=run.documents,
                tokens=run.tokens,
                empty=run.records - run.documents - run.bad,
                bad=run.bad,
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
