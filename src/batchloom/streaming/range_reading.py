"""Reading one piece of a part: from its beginning, or from a record on."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, final

from batchloom.core.document import BadRecord, Records
from batchloom.sources import PartReader, ReadRules, RecordBounds, SourcePart
from batchloom.sources.files import choose_read_method
from batchloom.streaming.record_ranges import RecordRange, is_sequential_text

# Ways in which a record is found by its first byte alone.
_BYTE_KINDS = ("jsonl", "line", "cut")


@final
class RangeRecordReader:
    """The records of a piece, numbered from 0 inside it; use as a context manager.

    Args:
        piece: what to read.
        rules: how its source is read.
        bounds: finds where pieces meet.
        record: the first record to give; those before it are read over.
        offset: its byte in the source, which is gone to where that is possible.

    Attributes:
        start: the first byte of the piece in the (decompressed) source.
        stop: one after its last; of a compressed source known after ``finish``.

    Raises:
        InputError: the source cannot be read or has changed.
    """

    def __init__(
        self,
        piece: RecordRange,
        rules: ReadRules,
        bounds: RecordBounds,
        record: int = 0,
        offset: int = 0,
    ) -> None:
        source, self._record = piece.whole.source, record
        self._first, self._base = 0, 0
        self._low, self._high = -1, -1
        self._whole = piece.covers_part and not record
        self._table = choose_read_method(source, rules) == "table"
        at_byte = (
            record > 0
            and choose_read_method(source, rules) in _BYTE_KINDS
            and source.compression is None
        )
        text = is_sequential_text(piece.whole, rules)
        if at_byte and source.member is None:
            stop = piece.whole.stop if text else piece.stop
            part, used = SourcePart(source, offset, bounds.at(source, stop)), None
            self._base = record
        elif text and not piece.covers_part:
            part, used = piece.whole, bounds
        else:
            part, used = piece.part, bounds
        if text and not piece.covers_part:
            self._low = piece.start if piece.start > piece.whole.start else -1
            self._high = piece.stop if piece.stop < piece.whole.stop else -1
        self._reader = PartReader(part, rules, used)
        self.start, self.stop = self._reader.start, self._reader.stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__(*exc)

    def __iter__(self) -> Iterator[Records]:
        for found in self._reader:
            over = self._cut(found)
            self._number(found)
            yield found
            if over:
                return

    def _cut(self, found: Records) -> bool:
        """Leave out what lies outside of the piece; whether nothing more of it can follow."""
        if self._low < 0 and self._high < 0:
            return False
        low, high = self._low, self._high if self._high >= 0 else 1 << 63
        places = [*found.offsets, *(bad.offset for bad in found.bad)]
        over = any(place >= high for place in places)
        before = sum(place < low for place in places)
        # Every record of a text is a document or a bad one.
        self._first += before
        found.seen = sum(low <= place < high for place in places)
        kept = [n for n, place in enumerate(found.offsets) if low <= place < high]
        _select_records(found, kept)
        found.bad = [bad for bad in found.bad if low <= bad.offset < high]
        return over

    def _number(self, found: Records) -> None:
        """Number records inside of the piece, and leave out those before the first that is asked for."""
        shift = self._base - self._first
        if shift:
            found.records = [number + shift for number in found.records]
            found.bad = [_shift_record_number(bad, shift) for bad in found.bad]
        if self._record:
            kept = [n for n, number in enumerate(found.records) if number >= self._record]
            if len(kept) < len(found.records):
                _select_records(found, kept)
            found.bad = [bad for bad in found.bad if bad.record >= self._record]

    @property
    def consumed(self) -> int:
        """Bytes of the listed file that were read so far."""
        return self._reader.consumed

    def finish(self) -> bytes:
        """The XXH3-128 of a part that was read whole, 16 bytes; of any other one nothing.

        Raises:
            InputError: the file was changed while it was read.
        """
        if self._high >= 0 or (self._table and not self._whole):
            return b""
        digest = self._reader.finish()
        self.stop = self._reader.stop
        return digest if self._whole else b""


def digest_part(part: SourcePart, rules: ReadRules, bounds: RecordBounds) -> tuple[int, int, bytes]:
    """First byte, end and XXH3-128 of a part, whose records nobody looks at."""
    with ExitStack() as stack:
        reader = stack.enter_context(PartReader(part, rules, bounds))
        digest = reader.finish()
        return reader.start, reader.stop, digest


def _select_records(found: Records, kept: list[int]) -> None:
    found.values = [found.values[n] for n in kept]
    found.records = [found.records[n] for n in kept]
    found.offsets = [found.offsets[n] for n in kept]


def _shift_record_number(bad: BadRecord, shift: int) -> BadRecord:
    return replace(bad, record=bad.record + shift)
