"""Where a large input is looked at: places chosen by hash, spread evenly over all of its bytes."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchloom.core.fingerprint import key128
from batchloom.sources.files import Part, ReadRules, Source, in_order, splittable, way_of
from batchloom.sources.record_bounds import RecordBounds


@dataclass(frozen=True, slots=True)
class Probe:
    """A stretch of a source that is looked at.

    Attributes:
        part: it begins and ends where records do.
        places: for how many places it stands, where only as much of its beginning is meant; None
            where the part is one probe long and all of it is meant.
    """

    part: Part
    places: int | None = None


def probes(
    sources: Sequence[Source], rules: ReadRules, count: int, size: int
) -> Iterator[tuple[int, Probe]]:
    """Probes at ``count`` places of the input, each with the number of its source.

    Plain files are looked at in the places themselves; compressed files and files that are one
    document offer their beginning only, and tables the beginnings of groups of rows.

    Args:
        sources: the inputs.
        rules: how they are cut.
        count: places.
        size: bytes of a probe.
    """
    sizes = [source.size for source in sources]
    for number, offsets in _places(sizes, count, size).items():
        for probe in _of_source(sources[number], rules, offsets, size):
            yield number, probe


def _places(sizes: Sequence[int], count: int, size: int) -> dict[int, list[int]]:
    """One place in each of ``count`` equal stretches of the input: source number to offsets."""
    ends = list(accumulate(sizes))
    total = ends[-1]
    places: dict[int, list[int]] = {}
    for i in range(count):
        low, high = total * i // count, total * (i + 1) // count
        place = low + key128("sample", total, size, i)[0] % max(high - low, 1)
        number = bisect_right(ends, place)
        places.setdefault(number, []).append(place - ends[number] + sizes[number])
    return places


def _of_source(
    source: Source, rules: ReadRules, offsets: Sequence[int], size: int
) -> Iterator[Probe]:
    if not splittable(source, rules) or in_order(source, rules):
        yield Probe(Part(source, 0, source.size), len(offsets))
        return
    bounds, read_to = RecordBounds(rules), 0
    if way_of(source, rules) == "table":
        yield from _of_table(source, bounds.starts(source), offsets)
        return
    for offset in offsets:
        start = _bound(bounds, source, max(offset, read_to), size)
        if start is None:
            continue
        stop = _bound(bounds, source, start + size, size)
        if stop is not None:
            read_to = stop
            yield Probe(Part(source, start, stop))


def _of_table(source: Source, starts: Sequence[int], offsets: Iterable[int]) -> Iterator[Probe]:
    """The groups of rows that hold the places."""
    hits = Counter(max(0, bisect_right(starts, offset) - 1) for offset in offsets)
    for group, times in sorted(hits.items()):
        yield Probe(Part(source, starts[group], starts[group] + 1), times)


def _bound(bounds: RecordBounds, source: Source, place: int, size: int) -> int | None:
    if place <= 0 or place >= source.size:
        return min(max(place, 0), source.size)
    return bounds.within(source, place, place + size)
