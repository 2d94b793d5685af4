"""Stretches: what lanes take turns at, cut out of the units of ``prepare`` by listing alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchloom.preparation.units import Unit
from batchloom.sources import ReadRules, SourcePart
from batchloom.sources.files import choose_read_method, is_splittable

# So many at least, where the input is large enough: then the lanes have about equal shares.
_MIN_RANGES = 1024
_MIN_RANGE_BYTES = 1 << 10
# A text is read from the beginning of its part to where a stretch begins.
_MAX_TEXT_CUTS = 64


@dataclass(frozen=True, slots=True)
class RecordRange:
    """A part of a unit, or a piece of one.

    Attributes:
        unit_part: the part as the unit has it.
        part_index: number of that part inside the unit.
        start: first byte, nominal until record bounds are looked up.
        stop: one after its last.
    """

    unit_part: SourcePart
    part_index: int
    start: int
    stop: int

    @property
    def part(self) -> SourcePart:
        """The piece as a part of its source."""
        return SourcePart(self.unit_part.source, self.start, self.stop)

    @property
    def covers_part(self) -> bool:
        """Whether it is all of its part."""
        return (self.start, self.stop) == (self.unit_part.start, self.unit_part.stop)


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Neighbouring pieces of one unit, which a lane reads together.

    Attributes:
        unit: number of the unit.
        first_part: number of the unit's first part in the manifest's list of parts.
        group_index: number of the stretch inside the unit.
        last: whether it is the unit's last one.
        ranges: in order.
    """

    unit: int
    first_part: int
    group_index: int
    last: bool
    ranges: tuple[RecordRange, ...]


def choose_group_bytes(units: Sequence[Unit], unit_bytes: int) -> int:
    """About how many bytes a stretch has: a power of two, so that there are a thousand; a unit's at most."""
    total = sum(unit.bytes for unit in units)
    target_bytes = max(_MIN_RANGE_BYTES, total // _MIN_RANGES)
    return min(unit_bytes, 1 << (target_bytes.bit_length() - 1))


def make_range_groups(units: Sequence[Unit], rules: ReadRules, unit_bytes: int) -> list[RangeGroup]:
    """The stretches of all units, in the order of the input; they know nothing of lanes or workers."""
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
    """Whether documents of a part are told apart only by reading on from its beginning."""
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
