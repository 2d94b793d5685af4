"""Where a large input is looked at: places chosen by hash, spread evenly over all of its bytes."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchloom.core.fingerprint import derive_key
from batchloom.sources.files import (
    ReadRules,
    Source,
    SourcePart,
    choose_read_method,
    is_sequential,
    is_splittable,
)
from batchloom.sources.record_bounds import RecordBounds


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A stretch of a source that is looked at.

    Attributes:
        part: it begins and ends where records do.
        position_count: for how many places it stands, where only as much of its beginning is meant; None
            where the part is one probe long and all of it is meant.
    """

    part: SourcePart
    position_count: int | None = None


def iter_sample_ranges(
    sources: Sequence[Source], rules: ReadRules, count: int, size: int
) -> Iterator[tuple[int, SampleRange]]:
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
    for number, offsets in _choose_positions(sizes, count, size).items():
        for probe in _sample_source(sources[number], rules, offsets, size):
            yield number, probe


def _choose_positions(sizes: Sequence[int], count: int, size: int) -> dict[int, list[int]]:
    """One place in each of ``count`` equal stretches of the input: source number to offsets."""
    ends = list(accumulate(sizes))
    total = ends[-1]
    offsets_by_source: dict[int, list[int]] = {}
    for i in range(count):
        low, high = total * i // count, total * (i + 1) // count
        position = low + derive_key("sample", total, size, i)[0] % max(high - low, 1)
        number = bisect_right(ends, position)
        offsets_by_source.setdefault(number, []).append(position - ends[number] + sizes[number])
    return offsets_by_source


def _sample_source(source: Source, rules: ReadRules, offsets: Sequence[int], size: int) -> Iterator[SampleRange]:
    if not is_splittable(source, rules) or is_sequential(source, rules):
        yield SampleRange(SourcePart(source, 0, source.size), len(offsets))
        return
    bounds, read_to = RecordBounds(rules), 0
    if choose_read_method(source, rules) == "table":
        yield from _sample_table(source, bounds.starts(source), offsets)
        return
    for offset in offsets:
        start = _find_bound(bounds, source, max(offset, read_to), size)
        if start is None:
            continue
        stop = _find_bound(bounds, source, start + size, size)
        if stop is not None:
            read_to = stop
            yield SampleRange(SourcePart(source, start, stop))


def _sample_table(source: Source, starts: Sequence[int], offsets: Iterable[int]) -> Iterator[SampleRange]:
    """The groups of rows that hold the places."""
    hits = Counter(max(0, bisect_right(starts, offset) - 1) for offset in offsets)
    for group, times in sorted(hits.items()):
        yield SampleRange(SourcePart(source, starts[group], starts[group] + 1), times)


def _find_bound(bounds: RecordBounds, source: Source, nominal: int, size: int) -> int | None:
    if nominal <= 0 or nominal >= source.size:
        return min(max(nominal, 0), source.size)
    return bounds.find_bound_within(source, nominal, nominal + size)
