"""Range groups: the read units of lanes, cut from ``prepare``'s units by size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchloom.preparation.units import Unit
from batchloom.sources import ReadRules, SourcePart
from batchloom.sources.files import choose_read_method, is_splittable

# Minimum number if the input is large enough, so that lanes have about equal shares.
_MIN_RANGES = 1024
_MIN_RANGE_BYTES = 1 << 10
# Reading a range of a text starts at the beginning of its part.
_MAX_TEXT_CUTS = 64


@dataclass(frozen=True, slots=True)
class RecordRange:
    """A part of a unit, or a range of one.

    Attributes:
        unit_part: the part of the unit.
        part_index: index of that part in the unit.
        start: first byte, nominal until record bounds are looked up.
        stop: one after its last byte.
    """

    unit_part: SourcePart
    part_index: int
    start: int
    stop: int

    @property
    def part(self) -> SourcePart:
        """The range as a part of its source."""
        return SourcePart(self.unit_part.source, self.start, self.stop)

    @property
    def covers_part(self) -> bool:
        """True if it is all of its part."""
        return (self.start, self.stop) == (self.unit_part.start, self.unit_part.stop)


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Neighbouring record ranges of one unit, which a lane reads together.

    Attributes:
        unit: number of the unit.
        first_part: index of the unit's first part in the manifest's list of parts.
        group_index: index of the group in the unit.
        last: whether it is the unit's last group.
        ranges: record ranges in order.
    """

    unit: int
    first_part: int
    group_index: int
    last: bool
    ranges: tuple[RecordRange, ...]


def choose_group_bytes(units: Sequence[Unit], unit_bytes: int) -> int:
    """Return the approximate bytes of a range group, a power of two up to a unit.

    There are about a thousand groups.
    """
    total = sum(unit.bytes for unit in units)
    target_bytes = max(_MIN_RANGE_BYTES, total // _MIN_RANGES)
    return min(unit_bytes, 1 << (target_bytes.bit_length() - 1))


def make_range_groups(units: Sequence[Unit], rules: ReadRules, unit_bytes: int) -> list[RangeGroup]:
    """Return the range groups of all units in input order, independent of lanes."""
    size = choose_group_bytes(units, unit_bytes)
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
