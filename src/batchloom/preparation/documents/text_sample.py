"""A bounded sample of the whole input, chosen by hash: for learning and checking a tokenizer."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchloom.core.fingerprint import derive_key
from batchloom.preparation.documents.record_parsers import RecordParser, RecordParsers, iter_texts
from batchloom.sources import PartReader, ReadRules, SampleRange, SourcePart, iter_sample_ranges
from batchloom.sources.files import Source
from batchloom.text import normalize

TRAIN_BYTES, TRAIN_PROBE_BYTES = 32 << 20, 1 << 20
VERIFY_BYTES, VERIFY_PROBE_BYTES = 256 << 10, 32 << 10

_DISTINCT_BYTES = 3 << 20
_PIECE_CHARACTERS = 1 << 16
_WORDS = re.compile(r"\w+|[^\w\s]+")


def sample_texts(
    sources: Sequence[Source],
    rules: ReadRules,
    *,
    normalized: bool,
    most: int,
    probe: int,
    readings: RecordParsers | None = None,
) -> list[str]:
    """Texts from hash-chosen places of the whole input, or all of a small one.

    Plain files are read at the places themselves; compressed files and files that are one
    document offer their beginning only.

    Args:
        sources: the inputs.
        rules: how they are cut, and how texts are read.
        normalized: whether the texts are normalised.
        most: characters of the sample at most.
        probe: bytes read at each place.
        readings: how the records of each source become documents; None where they are texts.
    """
    texts: list[str] = []
    left = most
    for text in _iter_candidates(sources, _SampleReader(rules, readings), most, probe):
        if not left:
            break
        taken = (normalize(text) if normalized else text)[:left]
        left -= len(taken)
        if taken:
            texts.append(taken)
    return texts


def limit_distinct_texts(texts: Iterable[str]) -> Iterator[str]:
    """As much of a sample as a tokenizer can learn from in bounded memory.

    Learning takes some 60 bytes of memory for each byte of distinct words, which prose has few
    of and random strings nothing but. Pieces are taken in an order of hashes, so that where they
    do not all fit they still come from everywhere.
    """
    pieces = [
        text[at : at + _PIECE_CHARACTERS]
        for text in texts
        for at in range(0, len(text), _PIECE_CHARACTERS)
    ]
    order = sorted(range(len(pieces)), key=lambda number: derive_key("piece", number))
    words: set[str] = set()
    size = 0
    for number in order:
        fresh = set(_WORDS.findall(pieces[number])).difference(words)
        size += sum(len(word.encode()) for word in fresh)
        if size > _DISTINCT_BYTES and words:
            return
        words |= fresh
        yield pieces[number]


@dataclass(frozen=True, slots=True)
class _SampleReader:
    """How sources are cut, and how their records are read; without readings they are texts."""

    rules: ReadRules
    readings: RecordParsers | None

    def texts(self, part: SourcePart) -> Iterator[str]:
        """The texts of a part."""
        reading = self.readings.of(part.source) if self.readings else RecordParser(self.rules)
        with PartReader(part, reading.rules) as reader:
            for found in reader:
                # What is wrong with a record is told when it is read for good.
                reading.parse_records(found)
                for document in found.values:
                    yield from iter_texts(document)


def _iter_candidates(
    sources: Sequence[Source], look: _SampleReader, most: int, size: int
) -> Iterator[str]:
    found = False
    if sum(source.size for source in sources) > most:
        for _, probe in iter_sample_ranges(sources, look.rules, most // size, size):
            for text in _truncate_probe(look.texts(probe.part), probe, size):
                found = True
                yield text
    # Records larger than a probe may slip through all of them.
    if not found:
        for source in sources:
            yield from look.texts(SourcePart(source, 0, source.size))


def _truncate_probe(texts: Iterator[str], probe: SampleRange, size: int) -> Iterator[str]:
    """As many characters of a part as its places stand for."""
    if probe.places is None:
        yield from texts
        return
    left = size * probe.places
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
