"""Range groups: the read units of lanes, cut from ``prepare``'s units by size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self, final

from batchloom.core.document import Records
from batchloom.preparation.units import Unit
from batchloom.sources import PartReader, ReadRules, RecordBounds, SourcePart
from batchloom.sources.formats import choose_read_method, is_splittable

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
            group, group_bytes = [], 0
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
        source, self._record = record_range.unit_part.source, record
        self._first, self._base = 0, 0
        self._low, self._high = -1, -1
        self._reads_whole_part = record_range.covers_part and not record
        self._table = choose_read_method(source, rules) == "table"
        at_byte = record > 0 and choose_read_method(source, rules) in _BYTE_KINDS and source.compression is None
        # The records of a sample are counted from the beginning of the source.
        at_byte = at_byte and source.sample is None
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
