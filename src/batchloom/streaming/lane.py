"""Reader of one lane: tokenizes its range groups and forms pools of documents.

Range groups are the read units of lanes, cut from the units of ``prepare`` by size.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.wording import format_count
from batchloom.media import MediaLimits
from batchloom.plan import PlanSpec
from batchloom.preparation.documents import EncodeContext, EncodedBatch, PlacedMedium, make_chat_encoder
from batchloom.preparation.phases import WorkerSetup
from batchloom.preparation.units import (
    StreamBatchWriter,
    Unit,
    UnitFacts,
    UnitProgress,
    UnitTask,
    UnitTokenizer,
    UnusableError,
)
from batchloom.preparation.workers import MessageCallback, check_versions
from batchloom.sources import PartReader, ReadRules, RecordBounds, SourcePart, format_record_name, make_bad_record_error
from batchloom.sources.files import Source
from batchloom.sources.formats import choose_read_method, is_splittable
from batchloom.store import wrap_write_errors
from batchloom.store.format import OBJECTIVES, SUBSETS, StoredMedium, get_facts_kind, read_blob
from batchloom.store.write import make_folder
from batchloom.streaming.lane_order import compute_lane_pool_size, make_no_sequence_error, order_lane_ranges

# Minimum number if the input is large enough, so that lanes have about equal shares.
_MIN_RANGES = 1024
_MIN_RANGE_BYTES = 1 << 10
# Reading a range of a text starts at the beginning of its part.
_MAX_TEXT_CUTS = 64

# Read methods that find a record by its first byte alone.
_BYTE_KINDS = ("jsonl", "line", "cut")


@dataclass(frozen=True, slots=True)
class RecordRange:
    """A part of a unit, or a range of one."""

    unit_part: SourcePart
    part_index: int  # Index of that part in the unit
    start: int  # First byte, nominal until record bounds are looked up
    stop: int  # One after its last byte

    @property
    def part(self) -> SourcePart:
        return SourcePart(self.unit_part.source, self.start, self.stop)

    @property
    def covers_part(self) -> bool:
        return (self.start, self.stop) == (self.unit_part.start, self.unit_part.stop)


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Neighbouring record ranges of one unit, which a lane reads together."""

    unit: int
    first_part: int  # Index of the unit's first part in the manifest's list of parts
    group_index: int  # Index of the group in the unit
    last: bool
    ranges: tuple[RecordRange, ...]


def make_range_groups(units: Sequence[Unit], rules: ReadRules, unit_bytes: int) -> list[RangeGroup]:
    """Return the range groups of all units in input order, independent of lanes.

    A group has about a thousandth of the input: a power of two of bytes, up to a unit.
    """
    target_bytes = max(_MIN_RANGE_BYTES, sum(unit.bytes for unit in units) // _MIN_RANGES)
    size = min(unit_bytes, 1 << (target_bytes.bit_length() - 1))
    range_groups: list[RangeGroup] = []
    for unit in units:
        groups = list(_group_ranges(_iter_ranges(unit, rules, size), size))
        range_groups += [
            RangeGroup(unit.number, unit.first_part, group_index, group_index == len(groups) - 1, ranges)
            for group_index, ranges in enumerate(groups)
        ]
    return range_groups


def _iter_ranges(unit: Unit, rules: ReadRules, size: int) -> Iterator[RecordRange]:
    for part_index, part in enumerate(unit.parts):
        length = part.stop - part.start
        step = max(size, -(-length // _MAX_TEXT_CUTS)) if is_sequential_text(part, rules) else size
        if length <= step or not is_splittable(part.source, rules):
            yield RecordRange(part, part_index, part.start, part.stop)
            continue
        for a, b in pairwise([*range(part.start, part.stop, step), part.stop]):
            yield RecordRange(part, part_index, a, b)


def is_sequential_text(part: SourcePart, rules: ReadRules) -> bool:
    """Return whether a part must be read from its beginning to find its documents."""
    return choose_read_method(part.source, rules) == "cut"


def _group_ranges(ranges: Iterator[RecordRange], size: int) -> Iterator[tuple[RecordRange, ...]]:
    group: list[RecordRange] = []
    group_bytes = 0
    for record_range in ranges:
        length = record_range.stop - record_range.start
        if group and group_bytes + length > size:
            yield tuple(group)
            group = []
            group_bytes = 0
        group.append(record_range)
        group_bytes += length
    if group:
        yield tuple(group)


@final
class RangeRecordReader:
    """Records of a range, numbered from 0 inside it; use as a context manager."""

    def __init__(
        self,
        record_range: RecordRange,
        rules: ReadRules,
        bounds: RecordBounds,
        record: int = 0,
        offset: int = 0,
    ) -> None:
        source = record_range.unit_part.source
        self._record = record
        self._first = 0
        self._base = 0
        self._low = -1
        self._high = -1
        self._reads_whole_part = record_range.covers_part and not record
        self._table = choose_read_method(source, rules) == "table"
        at_byte = record > 0 and choose_read_method(source, rules) in _BYTE_KINDS and source.is_plain
        # The records of a sample are counted from the beginning of the source.
        at_byte = at_byte and source.sample is None
        text = is_sequential_text(record_range.unit_part, rules)
        if at_byte and source.member is None:
            stop = record_range.unit_part.stop if text else record_range.stop
            part = SourcePart(source, offset, bounds.find_bound(source, stop))
            used = None
            self._base = record
        elif text and not record_range.covers_part:
            part = record_range.unit_part
            used = bounds
        else:
            part = record_range.part
            used = bounds
        if text and not record_range.covers_part:
            self._low = record_range.start if record_range.start > record_range.unit_part.start else -1
            self._high = record_range.stop if record_range.stop < record_range.unit_part.stop else -1
        self._reader = PartReader(part, rules, used)
        self.start = self._reader.start
        self.stop = self._reader.stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)

    def __iter__(self) -> Iterator[Records]:
        for records in self._reader:
            is_past_end = self._trim_to_range(records)
            self._number(records)
            yield records
            if is_past_end:
                return

    def _trim_to_range(self, records: Records) -> bool:
        """Remove records outside of the range; return True at its end."""
        if self._low < 0 and self._high < 0:
            return False
        low = self._low
        high = self._high if self._high >= 0 else 1 << 63
        offsets = [*records.offsets, *(bad.offset for bad in records.bad)]
        is_past_end = any(offset >= high for offset in offsets)
        before = sum(offset < low for offset in offsets)
        # Every record of a text is a document or a bad record.
        self._first += before
        records.records_read = sum(low <= offset < high for offset in offsets)
        records.select([n for n, offset in enumerate(records.offsets) if low <= offset < high])
        records.bad = [bad for bad in records.bad if low <= bad.offset < high]
        return is_past_end

    def _number(self, records: Records) -> None:
        """Number records inside of the range, and remove those before the first requested."""
        shift = self._base - self._first
        if shift:
            records.records = [number + shift for number in records.records]
            records.bad = [replace(bad, record=bad.record + shift) for bad in records.bad]
        if self._record:
            records.select([n for n, number in enumerate(records.records) if number >= self._record])
            records.bad = [bad for bad in records.bad if bad.record >= self._record]

    @property
    def consumed(self) -> int:
        return self._reader.consumed

    def finish(self) -> bytes:
        """Return the XXH3-128 of a completely read part, 16 bytes; else empty bytes."""
        if self._high >= 0 or (self._table and not self._reads_whole_part):
            return b""
        digest = self._reader.finish()
        self.stop = self._reader.stop
        return digest if self._reads_whole_part else b""


class DocumentMedia(NamedTuple):
    media: tuple[StoredMedium, ...]
    folder: str  # Base folder of their paths
    line: str  # File and line of the document, for messages


_NO_MEDIA = DocumentMedia((), "", "")


@final
@dataclass(frozen=True, slots=True)
class PoolMedia:
    documents: Mapping[int, DocumentMedia]  # Documents with media, by their number in the pool
    limits: MediaLimits
    spill_files: tuple[Path, ...]  # Files of bytes that no later pool of the lane needs

    @property
    def remedy(self) -> str:
        return (
            "Restore it, or remove the record. From a store (batchloom prepare) a run can serve padding for "
            "documents with missing media."
        )

    def read_bytes(self, medium: StoredMedium) -> bytes:
        if medium.blob is None:
            raise AssertionError(f"a medium of {self.describe_document(medium.document)} has only a name, no bytes")
        path, begin = medium.blob
        if not path.exists():
            raise StoreError(
                f"its temporary file {path} is missing. Resume from the last state, and do not clear the folder for "
                "temporary files during a run."
            )
        return read_blob(path, begin, medium.size)

    def folder_of(self, document: int) -> str:
        return self.documents[document].folder

    def describe_document(self, document: int) -> str:
        return f"The document at {self.documents[document].line}"

    def of(self, document: int) -> tuple[StoredMedium, ...]:
        document_media = self.documents.get(document)
        return () if document_media is None else document_media.media

    def forget(self) -> None:
        """Delete spill files that no later pool needs."""
        for path in self.spill_files:
            path.unlink(missing_ok=True)


@final
class MediaSpill:
    """Writer of media bytes from records to files, so that pools do not hold them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_media(
        self, media: Sequence[Sequence[PlacedMedium]]
    ) -> tuple[list[tuple[StoredMedium, ...]], Path | None]:
        """Return the stored media of documents, and their spill file; None without bytes."""
        has_data = any(placed_medium.medium.data is not None for some in media for placed_medium in some)
        if not has_data:
            return [tuple(_make_stored_medium(placed_medium, None) for placed_medium in some) for some in media], None
        make_folder(self._folder)
        with (
            wrap_write_errors(self._folder),
            NamedTemporaryFile(dir=self._folder, suffix=".media", delete=False) as file,
        ):
            path = Path(file.name)
            try:
                return [tuple(_write_media_bytes(some, path, file)) for some in media], path
            except OSError:
                path.unlink()
                raise


def _write_media_bytes(media: Sequence[PlacedMedium], path: Path, file: IO[bytes]) -> list[StoredMedium]:
    stored_media: list[StoredMedium] = []
    last: tuple[bytes, int] | None = None
    for placed_medium in media:
        data = placed_medium.medium.data
        if data is None:
            stored_media.append(_make_stored_medium(placed_medium, None))
            continue
        if last is None or last[0] is not data:  # frames of a video share one bytes object
            last = data, file.tell()
            file.write(data)
        stored_media.append(_make_stored_medium(placed_medium, (path, last[1])))
    return stored_media


def _make_stored_medium(placed_medium: PlacedMedium, blob: tuple[Path, int] | None) -> StoredMedium:
    info = placed_medium.medium.info
    if info is None:
        raise AssertionError("media must be inspected before they are encoded")
    return StoredMedium(
        document=0,
        kind=get_facts_kind(info.facts),
        start=placed_medium.start,
        tokens=placed_medium.tokens,
        grid=placed_medium.grid,
        facts=info.facts,
        location=placed_medium.medium.location,
        size=info.size,
        digest=info.digest,
        blob=blob,
    )


_BAD_PREFIX = "bad"
_EMPTY_REASON = "empty"
_SHARE_PREFIX = "for "

_MAX_FAULTS = 8
_MAX_CACHED_BOUNDS = 256


@final
@dataclass(slots=True)
class RecordCounts:
    """Counts of an epoch of a lane."""

    records: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # Number of records without a train document, by reason

    def add(self, facts: UnitFacts, shares: NDArray[np.int64]) -> None:
        """Add a range group's records, and its number of documents per subset."""
        for part in facts.parts:
            self.records += part.records
            self.reasons.update({_BAD_PREFIX: part.bad, _EMPTY_REASON: part.empty, **part.dropped})
        for name, count in zip(SUBSETS[1:], shares[1:].tolist(), strict=True):
            self.reasons[_SHARE_PREFIX + name] += count

    def explain_no_document(self, bad: Sequence[str]) -> tuple[str, str]:
        """Return why there is no document, and a remedy."""
        nonzero_reasons = [(reason, count) for reason, count in self.reasons.most_common() if count > 0]
        if not nonzero_reasons:
            return "the lane received no record of the input", "Give more input"
        reason_text = ", ".join(f"{count:,} {reason}" for reason, count in nonzero_reasons)
        first = f". The first bad record: {bad[0]}" if bad else ""
        why = f"no document to train on remains of {format_count(self.records, 'record')}: {reason_text}{first}"
        return why, _suggest_remedy(nonzero_reasons[0][0])


def _suggest_remedy(reason: str) -> str:
    if reason == _BAD_PREFIX:
        return "Fix the input, or name another"
    if reason == _EMPTY_REASON:
        return "Name other inputs"
    if reason.startswith(_SHARE_PREFIX):
        return f"Give a smaller {reason.removeprefix(_SHARE_PREFIX)}_fraction"
    return "Leave fewer out (clean=, max_tokens=, train_on=), or name other inputs"


class LanePosition(NamedTuple):
    """Resume position of a lane, before the next document of a new pool."""

    epoch: int = 0
    pool: int = 0  # Index of the pool in that epoch
    slot: int = 0  # Index of the range group in the epoch's order
    range_index: int = 0  # Index of the record range in the group
    record: int = 0  # Index of the record in the range
    documents_taken: int = 0  # Number of documents of that record that earlier pools have taken
    offset: int = 0  # Byte offset of the record in its source


# A lane, and the position of the requested pool.
PoolTask = tuple[int, LanePosition]


@dataclass(frozen=True, slots=True)
class StreamPool:
    """Documents of one pool."""

    lane: int
    epoch: int
    pool: int
    tokens: NDArray[np.generic]  # Tokens of its documents, concatenated
    lengths: NDArray[np.uint32]  # Tokens of each document, uint32 [N]
    flags: LossFlags  # Loss flags of the tokens
    next: LanePosition
    records: int = 0  # Number of records read for it; without media, in the lane's first epoch only
    bad: int = 0  # Number of these that cannot be used
    bad_messages: tuple[str, ...] = ()  # Messages about the first of these
    changes: tuple[tuple[str, str], ...] = ()  # Changes that the template made, each with a source that has it
    media: PoolMedia | None = None  # Media of its documents; None if media are not read


@dataclass(slots=True)
class _LaneBatch:
    """Documents of the train subset from one range group, in order.

    ``media`` has one entry per document, or is empty without media; ``spill_file`` holds their bytes.
    """

    slot: int
    tokens: NDArray[np.generic]
    rows: NDArray[np.void]
    flags: LossFlags
    media: Sequence[DocumentMedia]
    spill_file: Path | None

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, count: int) -> tuple["_LaneBatch", "_LaneBatch"]:
        """Split off the first ``count`` documents."""
        at = int(self.rows["length"][:count].sum(dtype=np.int64))
        media = self.media[:count], self.media[count:]
        return (
            _LaneBatch(self.slot, self.tokens[:at], self.rows[:count], self.flags[:at], media[0], None),
            _LaneBatch(self.slot, self.tokens[at:], self.rows[count:], self.flags[at:], media[1], self.spill_file),
        )


# Tokens, rows, loss flags and media of documents.
_RangeDocuments = tuple[NDArray[np.generic], NDArray[np.void], LossFlags, Sequence[Sequence[PlacedMedium]]]


@dataclass(slots=True)
class RangeCollector:
    """Collector of a range group's train documents and bad records."""

    documents: deque[_RangeDocuments] = field(default_factory=deque)
    bad: list[tuple[int, BadRecord]] = field(default_factory=list)
    log: StreamBatchWriter | None = None  # Writes everything for the store; None without ``keep``
    shares: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SUBSETS), np.int64))

    def add(self, batch: EncodedBatch, rows: NDArray[np.void], codes: NDArray[np.uint8]) -> None:
        if self.log is not None:
            self.log.add(batch, rows, codes)
        tokens = batch.ids
        flags = batch.flags
        media = batch.media
        self.shares += np.bincount(codes, minlength=len(SUBSETS))
        in_train = codes == 0
        if not in_train.all():
            kept_tokens = np.repeat(in_train, rows["length"])
            tokens = tokens[kept_tokens]
            rows = rows[in_train]
            flags = flags[kept_tokens]
            media = list(compress(media, in_train))
        if len(rows):
            self.documents.append((tokens, rows, flags, media))

    def add_columns(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        if self.log is not None:
            self.log.add_columns(part, columns)

    def add_bad(self, part: int, bad_records: Sequence[BadRecord]) -> None:
        if self.log is not None:
            self.log.add_bad(part, bad_records)
        self.bad += [(part, bad) for bad in bad_records]

    def checksums(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class CachedRanges:
    """Cache of range groups for the store, by the names of their units."""

    folder: Path  # Folder of all range groups
    names: tuple[str, ...]  # Unit names, by unit number
    attempt: str  # Distinguishes the files of this process from those of others
    start_marker: Path  # File that exists once the store's job has begun

    def begin(self, range_group: RangeGroup) -> StreamBatchWriter | None:
        """Start to cache a range group."""
        folder = self.folder / self.names[range_group.unit] / f"{range_group.group_index:06d}"
        if folder.exists() or not self.start_marker.exists():
            return None
        return StreamBatchWriter(folder, self.attempt)


@dataclass(frozen=True, slots=True)
class StreamSetup:
    """Setup of the lanes that a process reads; it can be sent to other processes."""

    worker_setup: WorkerSetup
    range_groups: Mapping[int, RangeGroup]  # Range groups of the lanes read here, by number
    count: int  # Number of all range groups
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None  # Cache of range groups for a store; None without one
    media: Path | None = None  # Spill folder of media bytes from records; None if media are not read

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """Return the setup of a worker of these lanes, with only their range groups.

        With very many files, the full list is large.
        """
        numbers_by_lane = [order_lane_ranges(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(numbers_by_lane).tolist()
        return replace(self, range_groups={number: self.range_groups[number] for number in numbers})

    def __call__(self) -> "PoolMaker":
        """Create the task function in the process that runs it."""
        check_versions(self.worker_setup.versions)
        return PoolMaker(LaneContext(self))


@final
class PoolMaker:
    """Task function that makes pools.

    A lane stays open at its position, and is reopened at another one.
    """

    def __init__(self, context: "LaneContext") -> None:
        self._context = context
        self._open_lanes: dict[int, LaneReader] = {}

    def __call__(self, pool_task: PoolTask, _send: MessageCallback) -> StreamPool:
        lane, position = pool_task
        # A lane whose reading fails does not stay open.
        reader = self._open_lanes.pop(lane, None)
        if reader is None or reader.position != position:
            reader = LaneReader(self._context, lane, position)
        pool = reader.next()
        self._open_lanes[lane] = reader
        return pool

    def close(self) -> None:
        """Close the files of all lanes."""
        while self._open_lanes:
            self._open_lanes.popitem()[1].close()


@final
class LaneContext:
    """Components shared by the lanes of a process."""

    def __init__(self, setup: StreamSetup) -> None:
        self.setup = setup
        self.encode_context = setup.worker_setup.load_context()
        self.media_spill = None if setup.media is None else MediaSpill(setup.media)
        self._bounds: dict[str, RecordBounds] = {}

    @cached_property
    def templated_context(self) -> EncodeContext:
        """The encode context with a template, loaded at the first conversation."""
        encoder = self.encode_context.encoder
        chat = make_chat_encoder(encoder.tokenizer, self.setup.worker_setup.recipe)
        return replace(self.encode_context, encoder=replace(encoder, chat=chat))

    def bounds(self, source: Source) -> RecordBounds:
        """Return the finder of a source's record bounds, cached with its progress."""
        record_bounds = self._bounds.pop(source.path, None)
        if record_bounds is None:
            record_bounds = RecordBounds(self.encode_context.record_parsers.get_parser(source).rules)
        self._bounds[source.path] = record_bounds
        while len(self._bounds) > _MAX_CACHED_BOUNDS:
            del self._bounds[next(iter(self._bounds))]
        return record_bounds


@final
class LaneReader:
    """Reader of a lane from a position on, pool by pool."""

    def __init__(self, context: LaneContext, lane: int, position: LanePosition) -> None:
        self._context = context
        self._setup = context.setup
        self._lane = lane
        self.position = position
        self._record_parsers = context.encode_context.record_parsers
        self._media_spill = context.media_spill
        self._has_conversations = False
        self._last_progress = UnitProgress()
        self._buffer: deque[_LaneBatch] = deque()
        self._buffered_documents = self._records = self._bad = 0
        self._bad_messages: list[str] = []
        self._changes: dict[str, str] = {}
        self._record_counts = RecordCounts()
        self._source = self._iter_epoch(position)

    def next(self) -> StreamPool:
        while True:
            position = self.position
            size = compute_lane_pool_size(self._setup.spec, position.epoch, position.pool)
            while self._buffered_documents < size and (batch := next(self._source, None)) is not None:
                self._buffer.append(batch)
                self._buffered_documents += len(batch)
            if self._buffered_documents:
                return self._pool(size)
            if position[1:] == LanePosition()[1:]:
                raise make_no_sequence_error(
                    self._lane,
                    self._setup.lanes,
                    *self._record_counts.explain_no_document(self._bad_messages),
                )
            self.position = LanePosition(epoch=position.epoch + 1)
            self._source = self._iter_epoch(self.position)

    def _pool(self, size: int) -> StreamPool:
        batches = []
        count = 0
        while count < size and self._buffer:
            batch = self._buffer.popleft()
            if count + len(batch) > size:
                batch, remainder = batch.split(size - count)
                self._buffer.appendleft(remainder)
            batches.append(batch)
            count += len(batch)
        self._buffered_documents -= count
        before = self.position
        self.position = _advance_position(before, batches)
        bad_messages = tuple(self._bad_messages)
        records = self._records
        bad = self._bad
        self._bad_messages = []
        self._records = 0
        self._bad = 0
        changes = tuple(self._changes.items())
        self._changes = {}
        return StreamPool(
            lane=self._lane,
            epoch=before.epoch,
            pool=before.pool,
            tokens=np.concatenate([batch.tokens for batch in batches]),
            lengths=np.concatenate([batch.rows["length"] for batch in batches]),
            flags=LossFlags.join(batch.flags for batch in batches),
            next=self.position,
            records=records,
            bad=bad,
            bad_messages=bad_messages,
            changes=changes,
            media=None if self._media_spill is None else self._media_of(batches),
        )

    def close(self) -> None:
        """Close the open file."""
        self._source.close()

    def _iter_epoch(self, position: LanePosition) -> Generator[_LaneBatch]:
        self._record_counts = RecordCounts()
        setup = self._setup
        order = order_lane_ranges(setup.count, setup.lanes, setup.spec, self._lane, position.epoch)
        for slot in range(position.slot, len(order)):
            number = int(order[slot])
            begin = position if slot == position.slot else LanePosition(epoch=position.epoch)
            yield from self._read_range_group(number, slot, begin)

    def _read_range_group(self, number: int, slot: int, begin: LanePosition) -> Iterator[_LaneBatch]:
        range_group = self._setup.range_groups[number]
        # Inputs do not change during a run; media that they name may.
        counts_records = begin.epoch == 0 or self._media_spill is not None
        from_start = not (begin.range_index or begin.record or begin.documents_taken)
        log = None
        if self._setup.keep is not None and begin.epoch == 0 and from_start:
            log = self._setup.keep.begin(range_group)
        sink = RangeCollector(log=log)
        unit = Unit(range_group.unit, 0, tuple(record_range.part for record_range in range_group.ranges))
        task = self._get_encode_context(range_group)
        self._last_progress = UnitProgress()
        send = self._count_progress if counts_records else lambda _: None
        run = UnitTokenizer(UnitTask(unit, Path(), ""), task, sink, None, send)
        skip = begin.documents_taken
        try:
            for range_index, record_range in enumerate(range_group.ranges):
                if range_index < begin.range_index:
                    continue
                first_record = begin.record if range_index == begin.range_index else 0
                rules = self._record_parsers.get_parser(record_range.unit_part.source).rules
                bounds = self._context.bounds(record_range.unit_part.source)
                with RangeRecordReader(record_range, rules, bounds, first_record, begin.offset) as reader:
                    for _ in run.iter_steps(range_index, record_range.part, reader):
                        run.flush()
                        run.write_pending()
                        for batch in self._drain_batches(sink, range_group, slot, counts_records=counts_records):
                            if skip:
                                skipped = min(skip, len(batch))
                                skip -= skipped
                                batch = batch.split(skipped)[1]  # noqa: PLW2901
                            if len(batch):
                                yield batch
                            elif batch.spill_file is not None:
                                batch.spill_file.unlink()
            facts = run.make_facts()
            self._record_counts.add(facts, sink.shares)
            changes = {change: unit.parts[first.part].source.name for change, first in facts.altered.items()}
            self._changes = changes | self._changes
            if log is not None:
                parts = [(record_range.part_index, record_range.covers_part) for record_range in range_group.ranges]
                log.finish(range_group.group_index, parts, facts, last=range_group.last)
                log = None
        except UnusableError as error:
            source = range_group.ranges[error.part].unit_part.source
            raise make_bad_record_error(
                source, self._record_parsers.get_parser(source).rules, None, error.bad
            ) from None
        finally:
            if log is not None:
                log.abandon()

    def _count_progress(self, message: Any) -> None:
        if isinstance(message, UnitProgress):
            self._records += message.records - self._last_progress.records
            self._last_progress = message

    def _get_encode_context(self, range_group: RangeGroup) -> EncodeContext:
        """Return the encode context, with a template once the lane has conversations."""
        for source in dict.fromkeys(record_range.unit_part.source for record_range in range_group.ranges):
            record_parser = self._record_parsers.get_parser(source)
            if record_parser.objective:
                raise InputError(
                    f"{source.name} holds {OBJECTIVES[record_parser.objective].contents} "
                    f"({record_parser.detected}), and a stream would train on them as texts. Prepare them (batchloom "
                    "prepare) for a trainer of that objective, or select the trained part with mapping= "
                    "(docs/how-to/prepare/preferences.md)."
                )
            self._has_conversations |= record_parser.templated
        return self._context.templated_context if self._has_conversations else self._context.encode_context

    def _drain_batches(
        self, sink: RangeCollector, range_group: RangeGroup, slot: int, *, counts_records: bool
    ) -> Iterator[_LaneBatch]:
        """Yield the collected documents; record bad ones if ``counts_records`` is set."""
        bad = sink.bad
        sink.bad = []
        if counts_records:
            self._bad += len(bad)
            self._bad_messages += [
                self._describe_bad_record(range_group, *bad_entry)
                for bad_entry in bad[: max(0, _MAX_FAULTS - len(self._bad_messages))]
            ]
        while sink.documents:
            tokens, rows, trained, media = sink.documents.popleft()
            yield _LaneBatch(slot, tokens, rows, trained, *self._spill_media(media, rows, range_group))

    def _spill_media(
        self,
        media: Sequence[Sequence[PlacedMedium]],
        rows: NDArray[np.void],
        range_group: RangeGroup,
    ) -> tuple[list[DocumentMedia], Path | None]:
        """Return the media of documents; write media bytes from records to a spill file."""
        if not media or self._media_spill is None:
            return [], None
        stored_media, path = self._media_spill.write_media(media)
        document_media = []
        for row, some in zip(rows, stored_media, strict=True):
            if not some:
                document_media.append(_NO_MEDIA)
                continue
            record_range = range_group.ranges[int(row["part"])]
            source = record_range.unit_part.source
            record_parsers = self._record_parsers
            before = None if record_range.start else 0
            record = BadRecord(int(row["record"]), int(row["offset"]), None, "", "")
            line = format_record_name(source, record_parsers.get_parser(source).rules, before, record)
            document_media.append(DocumentMedia(some, record_parsers.media_folder(source) or "", line))
        return document_media, path

    def _media_of(self, batches: Sequence[_LaneBatch]) -> PoolMedia:
        media_by_document: dict[int, DocumentMedia] = {}
        first = 0
        for batch in batches:
            for number, document_media in enumerate(batch.media, first):
                if document_media.media:
                    numbered = tuple(medium._replace(document=number) for medium in document_media.media)
                    media_by_document[number] = document_media._replace(media=numbered)
            first += len(batch)
        spill_files = tuple(batch.spill_file for batch in batches if batch.spill_file is not None)
        return PoolMedia(media_by_document, self._record_parsers.media_limits, spill_files)

    def _describe_bad_record(self, range_group: RangeGroup, range_index: int, bad: BadRecord) -> str:
        record_range = range_group.ranges[range_index]
        rules = self._record_parsers.get_parser(record_range.unit_part.source).rules
        before = None if record_range.start else 0
        return str(make_bad_record_error(record_range.unit_part.source, rules, before, bad))


def _advance_position(before: LanePosition, batches: Sequence[_LaneBatch]) -> LanePosition:
    """Return the position after the documents of ``batches``, taken from ``before``."""
    last = batches[-1]
    row = last.rows[-1]
    range_index = int(row["part"])
    record = int(row["record"])
    documents_taken = 0
    for batch in reversed(batches):
        same_record = (batch.rows["part"] == range_index) & (batch.rows["record"] == record)
        if batch.slot != last.slot or not same_record[-1]:
            break
        documents_taken += int(same_record.sum())
        if not same_record.all():
            break
    else:
        if (before.slot, before.range_index, before.record) == (last.slot, range_index, record):
            documents_taken += before.documents_taken
    return LanePosition(
        before.epoch,
        before.pool + 1,
        last.slot,
        range_index,
        record,
        documents_taken,
        int(row["offset"]),
    )
