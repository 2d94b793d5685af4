"""One lane in the process that reads it: its stretches as documents, its documents as pools."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.plan import PlanSpec, order_lane_ranges
from batchloom.plan.order import compute_lane_pool_size, make_no_sequence_error
from batchloom.preparation import ChatEncoder
from batchloom.preparation.documents import EncodeContext, PlacedMedium
from batchloom.preparation.phases import UnitTokenizer
from batchloom.preparation.units import (
    StreamBatchWriter,
    Unit,
    UnitProgress,
    UnitTask,
    UnusableError,
)
from batchloom.sources import RecordBounds, format_record_name, make_bad_record_error
from batchloom.sources.files import Source
from batchloom.store.format import SUBSETS
from batchloom.streaming.range_reading import RangeRecordReader
from batchloom.streaming.record_counts import RecordCounts
from batchloom.streaming.record_ranges import RangeGroup
from batchloom.streaming.stream_media import DocumentMedia, MediaSpill, PoolMedia

_MAX_FAULTS = 8
_MAX_CACHED_BOUNDS = 256


class LanePosition(NamedTuple):
    """Where a lane goes on: before the next document of a pool that begins.

    Attributes:
        epoch: of the lane.
        pool: number of the pool in that epoch.
        slot: place of the stretch in the order in which the epoch takes them.
        piece: number of the piece in the stretch.
        record: number of the record in the piece.
        taken: documents of that record that pools before have taken.
        offset: byte of the record in its source.
    """

    epoch: int = 0
    pool: int = 0
    slot: int = 0
    piece: int = 0
    record: int = 0
    taken: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StreamPool:
    """The documents of one pool.

    Attributes:
        lane, epoch, pool: name it.
        tokens: of its documents back to back.
        lengths: of each, uint32 [N].
        trained: of each token whether it is trained; None where every one is.
        next: where the lane goes on.
        records: records that were read for it, in the lane's first epoch alone where no media are read.
        bad: how many of these cannot be used.
        said: what is wrong with the first of them.
        conversations: whether the lane has come to conversations by now.
        media: what its documents hold; None where media are not read.
    """

    lane: int
    epoch: int
    pool: int
    tokens: NDArray[np.generic]
    lengths: NDArray[np.uint32]
    trained: NDArray[np.bool_] | None
    next: LanePosition
    records: int = 0
    bad: int = 0
    said: tuple[str, ...] = ()
    conversations: bool = False
    media: PoolMedia | None = None


@dataclass(slots=True)
class _LaneBatch:
    """Documents of the train subset, in order, of one stretch.

    ``media`` is of each document, nothing where none holds any; ``spent`` is the file of their bytes.
    """

    slot: int
    tokens: NDArray[np.generic]
    rows: NDArray[np.void]
    trained: NDArray[np.bool_] | None
    media: Sequence[DocumentMedia]
    spent: Path | None

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, count: int) -> tuple["_LaneBatch", "_LaneBatch"]:
        """The first documents, and the others."""
        at = int(self.rows["length"][:count].sum(dtype=np.int64))
        flags = (None, None) if self.trained is None else (self.trained[:at], self.trained[at:])
        media = self.media[:count], self.media[count:]
        return (
            _LaneBatch(self.slot, self.tokens[:at], self.rows[:count], flags[0], media[0], None),
            _LaneBatch(
                self.slot, self.tokens[at:], self.rows[count:], flags[1], media[1], self.spent
            ),
        )


class _RangeDocuments(NamedTuple):
    """What a stretch gives at once."""

    tokens: NDArray[np.generic]
    rows: NDArray[np.void]
    trained: NDArray[np.bool_] | None
    media: Sequence[Sequence[PlacedMedium]]


@dataclass(slots=True)
class RangeCollector:
    """Takes what comes of a stretch: the documents of the train subset, and what is wrong with others.

    Attributes:
        documents: tokens, rows, flags and media, in order.
        bad: records that cannot be used, each with the number of its piece.
        log: keeps everything for the store; None where nothing is kept.
        shares: how many documents each subset has.
    """

    documents: deque[_RangeDocuments] = field(default_factory=deque)
    bad: list[tuple[int, BadRecord]] = field(default_factory=list)
    log: StreamBatchWriter | None = None
    shares: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SUBSETS), np.int64))

    def add(
        self,
        tokens: NDArray[np.generic],
        rows: NDArray[np.void],
        codes: NDArray[np.uint8],
        trained: NDArray[np.bool_] | None = None,
        *,
        added: tuple[int, int] = (0, 0),  # noqa: ARG002 - as files of a unit have it
        plain: tuple[NDArray[np.generic], NDArray[np.uint32]] | None = None,  # noqa: ARG002
        media: Sequence[Sequence[PlacedMedium]] = (),
    ) -> None:
        """Take documents."""
        if self.log is not None:
            self.log.add(tokens, rows, codes, trained, media)
        self.shares += np.bincount(codes, minlength=len(SUBSETS))
        mine = codes == 0
        if not mine.all():
            flags = np.repeat(mine, rows["length"])
            tokens, rows = tokens[flags], rows[mine]
            trained = None if trained is None else trained[flags]
            media = list(compress(media, mine))
        if len(rows):
            self.documents.append(_RangeDocuments(tokens, rows, trained, media))

    def add_bad(self, part: int, found: Sequence[BadRecord]) -> None:
        """Take bad records."""
        if self.log is not None:
            self.log.add_bad(part, found)
        self.bad += [(part, bad) for bad in found]

    def checksums(self) -> dict[str, str]:
        """Nothing: there are no files."""
        return {}


@dataclass(frozen=True, slots=True)
class CachedRanges:
    """Where stretches are kept for the store, by the names of their units.

    Attributes:
        folder: of all stretches.
        names: of the units, by number.
        attempt: sets the files of this process apart from those of another one.
        begun: is there once the job of the store is begun.
    """

    folder: Path
    names: tuple[str, ...]
    attempt: str
    begun: Path

    def begin(self, stretch: RangeGroup) -> StreamBatchWriter | None:
        """Keep what comes of a stretch; None where it is kept already."""
        place = self.folder / self.names[stretch.unit] / f"{stretch.place:06d}"
        if place.exists() or not self.begun.exists():
            return None
        return StreamBatchWriter(place, self.attempt)


@dataclass(frozen=True, slots=True)
class LaneContext:
    """What the lanes of a process share.

    Attributes:
        task: turns records into documents.
        chat: makes tokenizer and template, when the first conversation comes.
        stretches: those of the lanes, by number.
        count: how many stretches there are in all.
        spec: of the order.
        lanes: how many lanes there are.
        keep: where stretches are kept for a store; None where none is.
        aside: where the bytes of media are laid that stand in records; None where media are not read.
    """

    task: EncodeContext
    chat: Callable[[], ChatEncoder]
    stretches: Mapping[int, RangeGroup]
    count: int
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None = None
    aside: MediaSpill | None = None
    _bounds: dict[str, RecordBounds] = field(default_factory=dict)

    def bounds(self, source: Source) -> RecordBounds:
        """What finds where pieces of a source meet, and remembers what it has passed over."""
        found = self._bounds.pop(source.path, None)
        if found is None:
            found = RecordBounds(self.task.readings.of(source).rules)
        self._bounds[source.path] = found
        while len(self._bounds) > _MAX_CACHED_BOUNDS:
            del self._bounds[next(iter(self._bounds))]
        return found


@final
class LaneReader:
    """Reads a lane from a place on; pools are given one after the other.

    Args:
        work: what all lanes share.
        lane: which it is.
        place: where to begin.
    """

    def __init__(
        self,
        work: "LaneContext",
        lane: int,
        place: LanePosition,
    ) -> None:
        self._task, self._stretches, self._spec = work.task, work.stretches, work.spec
        self._count = work.count
        self._lane, self._lanes, self.place = lane, work.lanes, place
        self._keep, self._chat, self._bounds = work.keep, work.chat, work.bounds
        self._aside = work.aside
        self._heard = UnitProgress()
        self._buffer: deque[_LaneBatch] = deque()
        self._held = self._records = self._bad = 0
        self._said: list[str] = []
        self._came = RecordCounts()
        self._source = self._iter_epoch(place)

    def next(self) -> StreamPool:
        """The next pool.

        Raises:
            InputError: a source cannot be read.
            PlanError: the lane has no document at all.
        """
        while True:
            place = self.place
            size = compute_lane_pool_size(self._spec, place.epoch, place.pool)
            while self._held < size and (batch := next(self._source, None)) is not None:
                self._buffer.append(batch)
                self._held += len(batch)
            if self._held:
                return self._pool(size)
            if place[1:] == LanePosition()[1:]:
                raise make_no_sequence_error(
                    self._lane, self._lanes, *self._came.nothing(self._said)
                )
            self.place = LanePosition(epoch=place.epoch + 1)
            self._source = self._iter_epoch(self.place)

    def _pool(self, size: int) -> StreamPool:
        taken, count = [], 0
        while count < size and self._buffer:
            batch = self._buffer.popleft()
            if count + len(batch) > size:
                batch, rest = batch.cut(size - count)
                self._buffer.appendleft(rest)
            taken.append(batch)
            count += len(batch)
        self._held -= count
        before = self.place
        self.place = _advance_position(before, taken)
        said, records, bad = tuple(self._said), self._records, self._bad
        self._said, self._records, self._bad = [], 0, 0
        return StreamPool(
            *(self._lane, before.epoch, before.pool),
            np.concatenate([batch.tokens for batch in taken]),
            np.concatenate([batch.rows["length"] for batch in taken]),
            _join_trained(taken),
            self.place,
            *(records, bad, said),
            conversations=self._task.chat is not None,
            media=None if self._aside is None else self._media_of(taken),
        )

    def _iter_epoch(self, place: LanePosition) -> Iterator[_LaneBatch]:
        """The documents of an epoch from a place on."""
        self._came = RecordCounts()
        order = order_lane_ranges(self._count, self._lanes, self._spec, self._lane, place.epoch)
        for slot in range(place.slot, len(order)):
            number = int(order[slot])
            begin = place if slot == place.slot else LanePosition(epoch=place.epoch)
            yield from self._stretch(number, slot, begin)

    def _stretch(self, number: int, slot: int, begin: LanePosition) -> Iterator[_LaneBatch]:
        stretch = self._stretches[number]
        # What inputs hold does not change under a run; media that they name may.
        counted = begin.epoch == 0 or self._aside is not None
        whole = not (begin.piece or begin.record or begin.taken)
        log = None
        if self._keep is not None and begin.epoch == 0 and whole:
            log = self._keep.begin(stretch)
        sink = RangeCollector(log=log)
        unit = Unit(stretch.unit, 0, tuple(piece.part for piece in stretch.pieces))
        task = self._get_encode_context(stretch)
        self._heard = UnitProgress()
        hear = self._hear if counted else _ignore_message
        run = UnitTokenizer(UnitTask(unit, Path(), ""), task, sink, None, hear)
        skip = begin.taken
        try:
            for at, piece in enumerate(stretch.pieces):
                if at < begin.piece:
                    continue
                mine = begin.record if at == begin.piece else 0
                rules = task.readings.of(piece.whole.source).rules
                bounds = self._bounds(piece.whole.source)
                with RangeRecordReader(piece, rules, bounds, mine, begin.offset) as reader:
                    for _ in run.steps(at, piece.part, reader):
                        run.flush()
                        run.settle()
                        for batch in self._given(sink, stretch, slot, counted=counted):
                            if skip:
                                skipped = min(skip, len(batch))
                                skip -= skipped
                                batch = batch.cut(skipped)[1]  # noqa: PLW2901
                            if len(batch):
                                yield batch
                            elif batch.spent is not None:
                                batch.spent.unlink()
            facts = run.facts()
            self._came.add(facts, sink.shares)
            if log is not None:
                parts = [(piece.place, piece.covers_part) for piece in stretch.pieces]
                log.finish(stretch.place, parts, facts, last=stretch.last)
                log = None
        except UnusableError as error:
            source = stretch.pieces[error.part].whole.source
            raise make_bad_record_error(
                source, task.readings.of(source).rules, None, error.bad
            ) from None
        finally:
            if log is not None:
                log.abandon()

    def _hear(self, message: Any) -> None:
        """Count records as they are read."""
        if isinstance(message, UnitProgress):
            self._records += message.records - self._heard.records
            self._heard = message

    def _get_encode_context(self, stretch: RangeGroup) -> EncodeContext:
        """The task, with a template where the stretch has conversations."""
        templated = False
        for source in dict.fromkeys(piece.whole.source for piece in stretch.pieces):
            reading = self._task.readings.of(source)
            if reading.preferences:
                raise InputError(
                    f"{source.name} holds preferences ({reading.detected}), of which some answers are not to be "
                    "imitated: a stream would train them, too. Prepare them (batchloom prepare), which preference "
                    "trainers read; or say what is to be trained, with mapping= as docs/preferences.md tells."
                )
            templated = templated or reading.templated
        if templated and self._task.chat is None:
            self._task = replace(self._task, chat=self._chat())
        return self._task

    def _given(
        self, sink: RangeCollector, stretch: RangeGroup, slot: int, *, counted: bool
    ) -> Iterator[_LaneBatch]:
        """What a sink holds by now; bad records are said and counted where ``counted``."""
        bad, sink.bad = sink.bad, []
        if counted:
            self._bad += len(bad)
            self._said += [
                self._fault(stretch, *one) for one in bad[: max(0, _MAX_FAULTS - len(self._said))]
            ]
        while sink.documents:
            tokens, rows, trained, media = sink.documents.popleft()
            yield _LaneBatch(slot, tokens, rows, trained, *self._spill_media(media, rows, stretch))

    def _spill_media(
        self, media: Sequence[Sequence[PlacedMedium]], rows: NDArray[np.void], stretch: RangeGroup
    ) -> tuple[list[DocumentMedia], Path | None]:
        """What documents hold; the bytes of media that stand in records are laid aside."""
        if not media or self._aside is None:
            return [], None
        laid, path = self._aside.lay(media)
        found = []
        for row, some in zip(rows, laid, strict=True):
            if not some:
                found.append(_NO_MEDIA)
                continue
            piece = stretch.pieces[int(row["part"])]
            source, readings = piece.whole.source, self._task.readings
            before = None if piece.start else 0
            record = BadRecord(int(row["record"]), int(row["offset"]), None, "", "")
            line = format_record_name(source, readings.of(source).rules, before, record)
            found.append(DocumentMedia(some, readings.media_folder(source) or "", line))
        return found, path

    def _media_of(self, taken: Sequence[_LaneBatch]) -> PoolMedia:
        """The media of the documents of a pool."""
        found: dict[int, DocumentMedia] = {}
        first = 0
        for batch in taken:
            for number, held in enumerate(batch.media, first):
                if held.media:
                    numbered = tuple(one._replace(document=number) for one in held.media)
                    found[number] = held._replace(media=numbered)
            first += len(batch)
        spent = tuple(batch.spent for batch in taken if batch.spent is not None)
        return PoolMedia(found, self._task.readings.media_limits, spent)

    def _fault(self, stretch: RangeGroup, place: int, bad: BadRecord) -> str:
        piece = stretch.pieces[place]
        rules = self._task.readings.of(piece.whole.source).rules
        before = None if piece.start else 0
        return str(make_bad_record_error(piece.whole.source, rules, before, bad))


_NO_MEDIA = DocumentMedia((), "", "")


def _join_trained(taken: Sequence[_LaneBatch]) -> NDArray[np.bool_] | None:
    if all(batch.trained is None for batch in taken):
        return None
    return np.concatenate(
        [
            np.ones(len(batch.tokens), bool) if batch.trained is None else batch.trained
            for batch in taken
        ]
    )


def _advance_position(before: LanePosition, taken: Sequence[_LaneBatch]) -> LanePosition:
    """The place behind documents that were taken from another one."""
    last = taken[-1]
    row = last.rows[-1]
    piece, record = int(row["part"]), int(row["record"])
    mine = 0
    for batch in reversed(taken):
        same = (batch.rows["part"] == piece) & (batch.rows["record"] == record)
        if batch.slot != last.slot or not same[-1]:
            break
        mine += int(same.sum())
        if not same.all():
            break
    else:
        if (before.slot, before.piece, before.record) == (last.slot, piece, record):
            mine += before.taken
    return LanePosition(
        before.epoch, before.pool + 1, last.slot, piece, record, mine, int(row["offset"])
    )


def _ignore_message(_message: Any) -> None:
    """Counts nothing: all of it was counted in the first epoch of the lane."""
