"""A bounded sample of the whole input, chosen by hash: for learning and checking a tokenizer."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from batchloom.core.fingerprint import key128
from batchloom.sources.cuts import RecordBounds
from batchloom.sources.parts import PartReader
from batchloom.sources.rules import Part, ReadRules, Source, splittable, way_of
from batchloom.text.normalize import normalize

TRAIN_BYTES, TRAIN_PROBE = 32 << 20, 1 << 20
VERIFY_BYTES, VERIFY_PROBE = 256 << 10, 32 << 10

_DISTINCT_BYTES = 3 << 20
_PIECE = 1 << 16
_WORDS = re.compile(r"\w+|[^\w\s]+")

# Sources beyond this are checked when they are read.
_FIRST_LOOKS = 1024
_LOOK_RECORDS = 100


def sample_texts(
    sources: Sequence[Source], rules: ReadRules, *, normalized: bool, most: int, probe: int
) -> list[str]:
    """Texts from hash-chosen places of the whole input, or all of a small one.

    Plain files are read at the places themselves; compressed files and files that are one
    document offer their beginning only.

    Args:
        sources: the inputs.
        rules: how they are read.
        normalized: whether the texts are normalised.
        most: characters of the sample at most.
        probe: bytes read at each place.
    """
    texts: list[str] = []
    left = most
    for text in _candidates(sources, rules, most, probe):
        if not left:
            break
        taken = (normalize(text) if normalized else text)[:left]
        left -= len(taken)
        if taken:
            texts.append(taken)
    return texts


def learning_texts(texts: Iterable[str]) -> Iterator[str]:
    """As much of a sample as a tokenizer can learn from in bounded memory.

    Learning takes some 60 bytes of memory for each byte of distinct words, which prose has few
    of and random strings nothing but. Pieces are taken in an order of hashes, so that where they
    do not all fit they still come from everywhere.
    """
    pieces = [text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)]
    order = sorted(range(len(pieces)), key=lambda number: key128("piece", number))
    words: set[str] = set()
    size = 0
    for number in order:
        fresh = set(_WORDS.findall(pieces[number])).difference(words)
        size += sum(len(word.encode()) for word in fresh)
        if size > _DISTINCT_BYTES and words:
            return
        words |= fresh
        yield pieces[number]


def check_beginnings(sources: Sequence[Source], rules: ReadRules) -> None:
    """Look at the first records of sources that have records, before hours of work go into them.

    Raises:
        RecordError: the first records of a source all lack the text field.
        InputError: a source cannot be read.
    """
    records = [source for source in sources if source.kind not in ("text", "code")]
    for source in records[:_FIRST_LOOKS]:
        seen = 0
        with PartReader(Part(source, 0, source.size), rules) as reader:
            for found in reader:
                seen += found.seen
                if found.values or seen >= _LOOK_RECORDS:
                    break


def _candidates(
    sources: Sequence[Source], rules: ReadRules, most: int, probe: int
) -> Iterator[str]:
    sizes = [source.size for source in sources]
    found = False
    if sum(sizes) > most:
        for number, offsets in _probes(sizes, most // probe, probe).items():
            for text in _probe_source(sources[number], rules, offsets, probe):
                found = True
                yield text
    # Records larger than a probe may slip through all of them.
    if not found:
        for source in sources:
            yield from _read(Part(source, 0, source.size), rules)


def _probes(sizes: Sequence[int], count: int, probe: int) -> dict[int, list[int]]:
    """One place in each of ``count`` equal stretches of the input: source number to offsets."""
    ends = list(accumulate(sizes))
    total = ends[-1]
    places: dict[int, list[int]] = {}
    for i in range(count):
        low, high = total * i // count, total * (i + 1) // count
        place = low + key128("sample", total, probe, i)[0] % max(high - low, 1)
        number = bisect_right(ends, place)
        places.setdefault(number, []).append(place - ends[number] + sizes[number])
    return places


def _probe_source(
    source: Source, rules: ReadRules, offsets: Iterable[int], probe: int
) -> Iterator[str]:
    if not splittable(source, rules):
        left = probe * len(list(offsets))
        for text in _read(Part(source, 0, source.size), rules):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return
        return
    bounds, read_to = RecordBounds(rules), 0
    if way_of(source, rules) == "table":
        yield from _probe_table(source, rules, bounds.starts(source), list(offsets), probe)
        return
    for offset in offsets:
        start = _bound(bounds, source, max(offset, read_to), probe)
        if start is None:
            continue
        stop = _bound(bounds, source, start + probe, probe)
        if stop is not None:
            read_to = stop
            yield from _read(Part(source, start, stop), rules)


def _probe_table(
    source: Source, rules: ReadRules, starts: Sequence[int], offsets: Sequence[int], probe: int
) -> Iterator[str]:
    """The beginnings of the groups of rows that hold the places, a probe for each place."""
    hits = Counter(max(0, bisect_right(starts, offset) - 1) for offset in offsets)
    for group, times in sorted(hits.items()):
        left = probe * times
        for text in _read(Part(source, starts[group], starts[group] + 1), rules):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _bound(bounds: RecordBounds, source: Source, place: int, probe: int) -> int | None:
    if place <= 0 or place >= source.size:
        return min(max(place, 0), source.size)
    return bounds.within(source, place, place + probe)


def _read(part: Part, rules: ReadRules) -> Iterator[str]:
    with PartReader(part, rules) as reader:
        for found in reader:
            yield from found.values
