"""Reader of one record range, from its beginning or from a record on."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, final

from batchloom.core.document import BadRecord, Records
from batchloom.sources import PartReader, ReadRules, RecordBounds, SourcePart
from batchloom.sources.files import choose_read_method
from batchloom.streaming.record_ranges import RecordRange, is_sequential_text

# Read methods that find a record by its first byte alone.
_BYTE_KINDS = ("jsonl", "line", "cut")


@final
class RangeRecordReader:
    """Records of a range, numbered from 0 inside it; use as a context manager.

    Args:
        record_range: the range to read.
        rules: read rules of its source.
        bounds: finds the record bounds between ranges.
        record: first record to return; earlier ones are skipped.
        offset: byte offset of that record in the source, used to seek if possible.

    Attributes:
        start: first byte of the range in the (decompressed) source.
        stop: one after its last byte; for a compressed source known after ``finish``.

    Raises:
        InputError: the source cannot be read or has changed.
    """

    def __init__(
        self,
        record_range: RecordRange,
        rules: ReadRules,
        bounds: RecordBounds,
        record: int = 0,
        offset: int = 0,
    ) -> None:
        source, self._record = record_range.unit_part.source, record
        self._first, self._base = 0, 0
        self._low, self._high = -1, -1
        self._reads_whole_part = record_range.covers_part and not record
        self._table = choose_read_method(source, rules) == "table"
        at_byte = record > 0 and choose_read_method(source, rules) in _BYTE_KINDS and source.compression is None
        text = is_sequential_text(record_range.unit_part, rules)
        if at_byte and source.member is None:
            stop = record_range.unit_part.stop if text else record_range.stop
            part, used = SourcePart(source, offset, bounds.find_bound(source, stop)), None
            self._base = record
        elif text and not record_range.covers_part:
            part, used = record_range.unit_part, bounds
        else:
            part, used = record_range.part, bounds
        if text and not record_range.covers_part:
            self._low = record_range.start if record_range.start > record_range.unit_part.start else -1
            self._high = record_range.stop if record_range.stop < record_range.unit_part.stop else -1
        self._reader = PartReader(part, rules, used)
        self.start, self.stop = self._reader.start, self._reader.stop

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
        low, high = self._low, self._high if self._high >= 0 else 1 << 63
        offsets = [*records.offsets, *(bad.offset for bad in records.bad)]
        is_past_end = any(offset >= high for offset in offsets)
        before = sum(offset < low for offset in offsets)
        # Every record of a text is a document or a bad record.
        self._first += before
        records.records_read = sum(low <= offset < high for offset in offsets)
        indices = [n for n, offset in enumerate(records.offsets) if low <= offset < high]
        _select_records(records, indices)
        records.bad = [bad for bad in records.bad if low <= bad.offset < high]
        return is_past_end

    def _number(self, records: Records) -> None:
        """Number records inside of the range, and remove those before the first requested."""
        shift = self._base - self._first
        if shift:
            records.records = [number + shift for number in records.records]
            records.bad = [_shift_record_number(bad, shift) for bad in records.bad]
        if self._record:
            indices = [n for n, number in enumerate(records.records) if number >= self._record]
            if len(indices) < len(records.records):
                _select_records(records, indices)
            records.bad = [bad for bad in records.bad if bad.record >= self._record]

    @property
    def consumed(self) -> int:
        """Bytes of the listed file that were read so far."""
        return self._reader.consumed

    def finish(self) -> bytes:
        """Return the XXH3-128 of a completely read part, 16 bytes; else empty bytes.

        Raises:
            InputError: the file was changed while it was read.
        """
        if self._high >= 0 or (self._table and not self._reads_whole_part):
            return b""
        digest = self._reader.finish()
        self.stop = self._reader.stop
        return digest if self._reads_whole_part else b""


def digest_part(part: SourcePart, rules: ReadRules, bounds: RecordBounds) -> tuple[int, int, bytes]:
    """Return first byte, end and XXH3-128 of a part without parsing its records."""
    with ExitStack() as stack:
        reader = stack.enter_context(PartReader(part, rules, bounds))
        digest = reader.finish()
        return reader.start, reader.stop, digest


def _select_records(records: Records, indices: list[int]) -> None:
    records.values = [records.values[n] for n in indices]
    records.records = [records.records[n] for n in indices]
    records.offsets = [records.offsets[n] for n in indices]


def _shift_record_number(bad: BadRecord, shift: int) -> BadRecord:
    return replace(bad, record=bad.record + shift)
