"""Samples of inputs: parts to examine, and previews of the first documents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import is_url
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import DamagedFileError
from batchloom.core.fingerprint import derive_key
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents import ChatEncoder, EncodedBatch, RecordParser, UnitEncoder
from batchloom.preparation.units import Unit, UnitTask, UnitTokenizer, plan_units
from batchloom.sources import (
    PartReader,
    ReadRules,
    SampleRange,
    SourcePart,
    iter_sample_ranges,
    locate_record,
    open_table,
)
from batchloom.sources.files import Source, open_source
from batchloom.sources.formats import COLUMNAR_KINDS, choose_read_method
from batchloom.tokens import Tokenizer

# Sample positions in large files (fewer if remote, where each costs a request); limit on sampled small files.
_SAMPLE_POSITIONS = 32
_REMOTE_SAMPLE_POSITIONS = 8
_MAX_SAMPLED_FILES = 512
# Up to this many sources are reported one by one; more are grouped by how they are read.
_MAX_SEPARATE_SOURCES = 20
# Least to read of a compressed file: the decompressor alone reads ahead by a quarter of this.
_MIN_COMPRESSED_BYTES = 2 << 20
# A compressed byte counts as this many bytes.
_COMPRESSED_WEIGHT = 4
# Line numbers are not determined for faults farther into a file than this, since counting lines takes too long.
_MAX_LINE_COUNT_BYTES = 1 << 30
_READ_BLOCK_BYTES = 1 << 20

SampledPart = tuple[SourcePart, int | None]
EncodeFunction = Callable[[RecordParser, list[Any], Sequence[float]], EncodedBatch]
# A longer document is previewed by its first and last tokens.
_HEAD_TOKENS = 384
_TAIL_TOKENS = 128
# Most batches to read in search of documents to preview.
_MAX_PREVIEWED_BATCHES = 256
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_UTF8_BYTES = 4


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """Limits on how much input is read; only tests use other values.

    Attributes:
        whole_bytes: largest input that is read completely, which takes seconds; a compressed byte
            counts as four.
        whole_files: largest number of files that are read completely.
        sample_bytes: bytes to read of a larger input.
        probe_bytes: bytes to read at one position.
    """

    whole_bytes: int = 16 << 20
    whole_files: int = 256
    sample_bytes: int = 8 << 20
    probe_bytes: int = 256 << 10


@final
class InputSample:
    """The parts to read, the bytes they represent, and the records before them.

    Attributes:
        damaged: files that cannot be opened, each with its error.
    """

    def __init__(self, sources: Sequence[Source], rules: ReadRules, sizes: SampleSizes, *, full: bool) -> None:
        self.rules = rules
        self.sizes = sizes
        total = sum(
            source.size * (_COMPRESSED_WEIGHT if source.compression or source.kind in COLUMNAR_KINDS else 1)
            for source in sources
        )
        small = total <= sizes.whole_bytes and len(sources) <= sizes.whole_files
        # If everything is read, and if sources are few enough to report one by one.
        self.complete = full or small
        self.apart = len(sources) <= _MAX_SEPARATE_SOURCES
        self._tables: dict[str, tuple[list[int], list[int] | None]] = {}
        self.parts: list[SampledPart] = []
        self.damaged: list[tuple[Source, DamagedFileError]] = []
        # Opening thousands of tables would take longer than the sample, so only those of the sample are opened.
        is_tried = self.complete or len(sources) <= _MAX_SAMPLED_FILES
        usable = list(filter(self._is_usable, sources)) if is_tried else sources
        if self.complete:
            self.parts = [(part, None) for unit in plan_units(usable, rules) for part in unit.parts]
        elif usable:
            self.parts = self._select_sample_parts(usable)

    def _is_usable(self, source: Source) -> bool:
        """Return whether a source can be opened if it is a table; keep its error."""
        if choose_read_method(source, self.rules) != "table":
            return True
        if any(source.name == damaged.name for damaged, _ in self.damaged):
            return False
        try:
            self._table(source)
        except DamagedFileError as error:
            self.damaged.append((source, error))
            return False
        return True

    def _select_sample_parts(self, sources: Sequence[Source]) -> list[SampledPart]:
        """Select positions in large files, complete small files, and one file per format.

        If sources are reported one by one, each of them is sampled.

        Small files are chosen by number. Choosing by bytes favors larger files, and the estimated number
        of documents would be too low.
        """
        has_remote = any(is_url(source.path) for source in sources)
        position_count = _REMOTE_SAMPLE_POSITIONS if has_remote else _SAMPLE_POSITIONS
        small = [number for number, source in enumerate(sources) if self.is_small(source)]
        large = sorted(set(range(len(sources))) - set(small))
        numbered_probes = self._select_probe_parts(sources, large, position_count) if large else []
        if small:
            average = max(1, sum(sources[number].size for number in small) // len(small))
            max_small_files = (
                position_count if has_remote else min(self.sizes.sample_bytes // average, _MAX_SAMPLED_FILES)
            )
            for number in _select_evenly(small, max(max_small_files, position_count)):
                if self._is_usable(sources[number]):
                    numbered_probes.append((number, SampleRange(SourcePart(sources[number], 0, sources[number].size))))
        firsts: dict[object, int] = {}
        for number, source in enumerate(sources):
            key = source.name if self.apart else (source.kind, source.compression)
            firsts.setdefault(key, number)
        for number in sorted(set(firsts.values()) - {number for number, _ in numbered_probes}):
            numbered_probes += self._select_probe_parts(sources, [number], 1)
        numbered_probes.sort(key=lambda numbered_probe: (numbered_probe[0], numbered_probe[1].part.start))
        return [self._make_sampled_part(sample_range) for _, sample_range in numbered_probes]

    def _select_probe_parts(
        self, sources: Sequence[Source], numbers: Sequence[int], position_count: int
    ) -> list[tuple[int, SampleRange]]:
        selected_sources = [sources[number] for number in numbers]
        probes = iter_sample_ranges(
            selected_sources, self.rules, position_count, self.sizes.probe_bytes, self._is_usable
        )
        return [(numbers[index], sample_range) for index, sample_range in probes]

    def is_small(self, source: Source) -> bool:
        """Return whether a sampled source is read completely."""
        return source.size <= self.sizes.probe_bytes

    def _make_sampled_part(self, sample_range: SampleRange) -> SampledPart:
        # Without row counts, a row group must be read completely to learn how many rows it has.
        has_row_counts = not self.is_table(sample_range.part) or self._table(sample_range.part.source)[1] is not None
        if sample_range.position_count is None or not has_row_counts:
            return sample_range.part, None
        max_characters = sample_range.position_count * self.sizes.probe_bytes
        packed = not sample_range.part.source.is_plain
        return sample_range.part, max(max_characters, _MIN_COMPRESSED_BYTES) if packed else max_characters

    def is_table(self, part: SourcePart) -> bool:
        """Return whether a part belongs to a columnar source."""
        return choose_read_method(part.source, self.rules) == "table"

    def _table(self, source: Source) -> tuple[list[int], list[int] | None]:
        """Return the start of each row group, and its row count if known."""
        if source.path not in self._tables:
            with open_table(source) as table:
                self._tables[source.path] = table.starts, table.rows
        return self._tables[source.path]

    def measure_table_part(self, part: SourcePart) -> tuple[int, int | None]:
        """Return bytes and rows of a table part: one row group, or all of them."""
        source = part.source
        starts, rows = self._table(source)
        group_range = slice(0, len(starts))
        if part.stop - part.start == 1 and part.start in starts:
            group_range = slice(starts.index(part.start), starts.index(part.start) + 1)
        start = starts[group_range.start] if group_range.start else 0
        size = (starts[group_range.stop] if group_range.stop < len(starts) else source.size) - start
        return size, None if rows is None else sum(rows[group_range])

    def count_records_before(self, part: SourcePart) -> int | None:
        """Count the records of a source before a part; None if that takes too long."""
        source = part.source
        read_method = choose_read_method(part.source, self.rules)
        if part.start == 0:
            return 0
        if read_method == "table":
            starts, rows = self._table(source)
            return None if rows is None else sum(rows[: starts.index(part.start)])
        if read_method not in ("jsonl", "line") or part.start > _MAX_LINE_COUNT_BYTES or is_url(source.path):
            return None
        lines = 0
        remaining_bytes = part.start
        with open_source(source) as file:
            while remaining_bytes and (data := file.read(min(_READ_BLOCK_BYTES, remaining_bytes))):
                lines += data.count(b"\n")
                remaining_bytes -= len(data)
        return lines


@final
class SampleReader:
    """Reader of a part that cuts sampled tables short and estimates its share."""

    def __init__(self, reader: PartReader, part: SourcePart, sample: InputSample) -> None:
        self._reader = reader
        self._part = part
        self._sample = sample
        # A table is cut short unless everything is read.
        self._is_cut_table = not sample.complete and sample.is_table(part)
        self._ended = False
        # Records that the reader returned, and those of them that are used.
        self._records_read = self._records = 0
        # Bytes consumed after the first batch and after the last one that consumed more; records returned before that.
        self._first_consumed = self._last_consumed = self._records_before_last = 0
        self.start = reader.start
        self.stop = reader.stop

    @property
    def consumed(self) -> int:
        return self._reader.consumed

    def __iter__(self) -> Iterator[Records]:
        for batch in self._reader:
            first = self._records_read
            consumed = self._reader.consumed
            if not first:
                self._first_consumed = self._last_consumed = consumed
            elif consumed > self._last_consumed:
                self._last_consumed = consumed
                self._records_before_last = first
            self._records_read += batch.records_read
            if self._is_cut_table:
                _truncate_records(batch, first, self._sample.sizes.probe_bytes)
            self._records += batch.records_read
            yield batch

    def finish(self) -> bytes:
        self._ended = True
        return self._reader.finish()

    def estimate_share(self) -> float:
        """Estimate the bytes of the source that the records so far represent."""
        consumed = self._reader.consumed
        part_bytes = self._part.stop - self._part.start
        if self._is_cut_table and self._records_read:
            size, rows = self._sample.measure_table_part(self._part)
            return size * min(1.0, self._records / max(self._records_read if rows is None else rows, 1))
        if self._ended:
            return part_bytes
        if self._records_before_last:
            # Readers read ahead, so the bytes consumed between two refills measure the size of the records.
            measured_bytes = self._last_consumed - self._first_consumed
            return min(measured_bytes * self._records_read / self._records_before_last, part_bytes)
        return consumed


def _truncate_records(batch: Records, first: int, max_characters: int) -> None:
    """Cut table rows to about ``max_characters``; the rest counts as not read."""
    size = 0
    for number, row in enumerate(batch.values[:-1], 1):
        size += len(row) if isinstance(row, str) else len(str(row))
        if size > max_characters:
            end = batch.records[number]
            batch.select(range(number))
            batch.bad = [bad for bad in batch.bad if bad.record < end]
            batch.records_read = end - first
            return


def _select_evenly(numbers: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of the numbers, one per equal interval; all if there are fewer."""
    total = len(numbers)
    if total <= count:
        return list(numbers)
    boundaries = [total * index // count for index in range(count + 1)]
    return [
        numbers[low + derive_key("file", total, index)[0] % (high - low)]
        for index, (low, high) in enumerate(pairwise(boundaries))
    ]


@dataclass(frozen=True, slots=True)
class PreviewSegment:
    """Adjacent tokens with the same loss mask and weight.

    Attributes:
        text: decoded text; empty for tokens left out of the preview.
        trained: whether the tokens are trained, or the weight of their loss if it is neither 0 nor 1; None for
            tokens left out.
        tokens: number of tokens.
    """

    text: str
    trained: bool | float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class DocumentPreview:
    """Preview of one document.

    Attributes:
        file: name of the source.
        line: 1-based line of its record; None if lines have no meaning.
        row: 1-based row of its record; None if rows have no meaning.
        tokens: number of tokens.
        trained: number of trained tokens.
        pieces: segments of the document, in order; a long document lacks its middle.
    """

    file: str
    line: int | None
    row: int | None
    tokens: int
    trained: int
    pieces: tuple[PreviewSegment, ...]


@dataclass(frozen=True, slots=True)
class MemorySink:
    """Document sink that calls functions instead of writing files."""

    take_documents: Callable[[EncodedBatch, NDArray[np.void]], None]
    take_bad: Callable[[int, Sequence[BadRecord]], None] = lambda _number, _bad_records: None

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        self.take_documents(batch, rows)

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Columns are not counted."""

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        self.take_bad(part, bad_records)

    def checksums(self) -> dict[str, str]:
        return {}


def encode_nothing(_parser: RecordParser, documents: list[Any], _weights: Sequence[float]) -> EncodedBatch:
    """Return documents without tokens, where there is no tokenizer or template."""
    return EncodedBatch(np.zeros(0, np.uint32), np.zeros(len(documents), np.uint32), LossFlags.all_trained(0))


@dataclass(frozen=True, kw_only=True)
class SampleContext(UnitEncoder):
    """Context of a unit whose documents are encoded by a function."""

    encode_sample: EncodeFunction = encode_nothing
    chat_encoder: ChatEncoder | None = None

    @property
    def chat(self) -> ChatEncoder | None:
        return self.chat_encoder

    def encode(self, record_parser: RecordParser, documents: list[Any], weights: Sequence[float]) -> EncodedBatch:
        return self.encode_sample(record_parser, documents, weights)


def make_unit_tokenizer(
    parts: Sequence[SourcePart],
    context: SampleContext,
    sink: MemorySink,
    receive: Callable[[Any], None] = lambda _: None,
    whole_files: frozenset[int] = frozenset(),
) -> UnitTokenizer:
    """Return what ``prepare`` runs over a unit, without files."""
    unit_task = UnitTask(Unit(0, 0, parts), Path(), "", whole_files=whole_files)
    return UnitTokenizer(unit_task, context, sink, None, receive)


def preview_documents(
    sources: Sequence[Source], context: SampleContext, tokenizer: Tokenizer, count: int
) -> tuple[DocumentPreview, ...]:
    """Return the first ``count`` documents of sources, as the store would hold them."""
    previews: list[DocumentPreview] = []
    batches = 0

    def take_documents(batch: EncodedBatch, rows: NDArray[np.void]) -> None:
        starts = np.cumsum(rows["length"], dtype=np.int64) - rows["length"]
        for row, start in zip(rows[: count - len(previews)], starts.tolist(), strict=False):
            span = slice(start, start + int(row["length"]))
            record = BadRecord(int(row["record"]), int(row["offset"]), None, "", "")
            position = locate_record(source, record_parser.rules, 0, record)
            ids = batch.ids[span].astype(np.int64)
            previews.append(make_preview(tokenizer, source.name, position, ids, batch.flags[span]))

    for source in sources if count else ():
        part = SourcePart(source, 0, source.size)
        record_parser = context.record_parsers.get_parser(source)
        unit_tokenizer = make_unit_tokenizer([part], context, MemorySink(take_documents))
        with PartReader(part, record_parser.rules) as reader:
            for _ in unit_tokenizer.iter_steps(0, part, reader):
                unit_tokenizer.flush()
                batches += 1
                if len(previews) == count or batches == _MAX_PREVIEWED_BATCHES:
                    return tuple(previews)
    return tuple(previews)


def make_preview(
    tokenizer: Tokenizer,
    file: str,
    position: tuple[int | None, int | None],
    ids: NDArray[np.int64],
    flags: LossFlags,
) -> DocumentPreview:
    """Return the preview of a document; ``position`` is its line and row."""
    segments = tuple(_split_segments(tokenizer, ids, flags))
    return DocumentPreview(file, *position, ids.size, flags.count_trained(), segments)


def _split_segments(tokenizer: Tokenizer, ids: NDArray[np.int64], flags: LossFlags) -> list[PreviewSegment]:
    """Split a document into segments; a long one loses its middle."""
    if ids.size <= _HEAD_TOKENS + _TAIL_TOKENS:
        return _decode_segments(tokenizer, ids, flags)
    head = _HEAD_TOKENS
    tail = ids.size - _TAIL_TOKENS
    # A cut inside a character of several tokens would decode to a replacement character.
    while head > _HEAD_TOKENS - _MAX_UTF8_BYTES and _ends_inside_character(tokenizer, ids[:head]):
        head -= 1
    while tail < ids.size - _TAIL_TOKENS + _MAX_UTF8_BYTES and _begins_inside_character(tokenizer, ids[tail:]):
        tail += 1
    return [
        *_decode_segments(tokenizer, ids[:head], flags[:head]),
        PreviewSegment("", None, tail - head),
        *_decode_segments(tokenizer, ids[tail:], flags[tail:]),
    ]


def _ends_inside_character(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[-_MAX_UTF8_BYTES:]).endswith(_REPLACEMENT_CHARACTER)


def _begins_inside_character(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[:_MAX_UTF8_BYTES]).startswith(_REPLACEMENT_CHARACTER)


def _decode_segments(tokenizer: Tokenizer, ids: NDArray[np.int64], flags: LossFlags) -> list[PreviewSegment]:
    weights = flags.weights
    edges = [0, *(np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist(), ids.size]
    segments = []
    previous_text = ""
    for start, stop in pairwise(edges):
        # Some tokenizers add a space where a text begins, so a segment's text is what it adds to the decoded prefix.
        decoded_text = tokenizer.decode(ids[:stop])
        apart = not decoded_text.startswith(previous_text)
        text = tokenizer.decode(ids[start:stop]) if apart else decoded_text[len(previous_text) :]
        weight = round(float(weights[start]), 2)
        trained = bool(weight) if weight in (0, 1) else weight
        segments.append(PreviewSegment(text, trained, stop - start))
        previous_text = decoded_text
    return segments
