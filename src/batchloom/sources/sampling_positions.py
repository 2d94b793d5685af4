"""Sample positions in a large input: chosen by hash, spread evenly over its bytes."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchloom.core.fingerprint import derive_key
from batchloom.sources.files.source_rules import ReadRules, Source, SourcePart
from batchloom.sources.formats.format_registry import get_read_method, is_splittable
from batchloom.sources.part_reader import RecordBounds


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A byte range of a source to sample.

    Attributes:
        part: range that begins and ends at record boundaries.
        position_count: number of positions that the part covers, if only that many probes of its
            beginning are read; None if the part is one probe long and is read completely.
    """

    part: SourcePart
    position_count: int | None = None


def iter_sample_ranges(
    sources: Sequence[Source], rules: ReadRules, count: int, size: int
) -> Iterator[tuple[int, SampleRange]]:
    """Yield probes at ``count`` positions of the input, each with its source number.

    Uncompressed files are sampled at the positions themselves. Compressed files and files of one
    document are sampled at their beginning, and tables at the beginnings of row groups.

    Args:
        sources: the inputs.
        rules: rules that split the inputs into records.
        count: number of positions.
        size: bytes per probe.
    """
    sizes = [source.size for source in sources]
    for number, offsets in _choose_positions(sizes, count, size).items():
        for probe in _sample_source(sources[number], rules, offsets, size):
            yield number, probe


def _choose_positions(sizes: Sequence[int], count: int, size: int) -> dict[int, list[int]]:
    """Choose one position in each of ``count`` equal ranges; return offsets by source."""
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
    cut_rule = get_read_method(source, rules).cut
    if not is_splittable(source, rules) or cut_rule == "ordered":
        yield SampleRange(SourcePart(source, 0, source.size), len(offsets))
        return
    bounds, read_to = RecordBounds(rules), 0
    if cut_rule == "row groups":
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
    """Yield the row groups that contain the positions."""
    hits = Counter(max(0, bisect_right(starts, offset) - 1) for offset in offsets)
    for group, times in sorted(hits.items()):
        yield SampleRange(SourcePart(source, starts[group], starts[group] + 1), times)


def _find_bound(bounds: RecordBounds, source: Source, nominal: int, size: int) -> int | None:
    if nominal <= 0 or nominal >= source.size:
        return min(max(nominal, 0), source.size)
    return bounds.find_bound_within(source, nominal, nominal + size)
