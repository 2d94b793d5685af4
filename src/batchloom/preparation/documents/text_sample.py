"""A bounded sample of the whole input, chosen by hash: for learning and checking a tokenizer."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchloom.core.fingerprint import key128
from batchloom.preparation.documents.record_parsers import Reading, Readings, texts_in
from batchloom.sources import Part, PartReader, Probe, ReadRules, probes
from batchloom.sources.files import Source
from batchloom.text import normalize

TRAIN_BYTES, TRAIN_PROBE = 32 << 20, 1 << 20
VERIFY_BYTES, VERIFY_PROBE = 256 << 10, 32 << 10

_DISTINCT_BYTES = 3 << 20
_PIECE = 1 << 16
_WORDS = re.compile(r"\w+|[^\w\s]+")


def sample_texts(
    sources: Sequence[Source],
    rules: ReadRules,
    *,
    normalized: bool,
    most: int,
    probe: int,
    readings: Readings | None = None,
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
    for text in _candidates(sources, _Look(rules, readings), most, probe):
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


@dataclass(frozen=True, slots=True)
class _Look:
    """How sources are cut, and how their records are read; without readings they are texts."""

    rules: ReadRules
    readings: Readings | None

    def texts(self, part: Part) -> Iterator[str]:
        """The texts of a part."""
        reading = self.readings.of(part.source) if self.readings else Reading(self.rules)
        with PartReader(part, reading.rules) as reader:
            for found in reader:
                # What is wrong with a record is told when it is read for good.
                reading.take_in(found)
                for document in found.values:
                    yield from texts_in(document)


def _candidates(sources: Sequence[Source], look: _Look, most: int, size: int) -> Iterator[str]:
    found = False
    if sum(source.size for source in sources) > most:
        for _, probe in probes(sources, look.rules, most // size, size):
            for text in _beginning(look.texts(probe.part), probe, size):
                found = True
                yield text
    # Records larger than a probe may slip through all of them.
    if not found:
        for source in sources:
            yield from look.texts(Part(source, 0, source.size))


def _beginning(texts: Iterator[str], probe: Probe, size: int) -> Iterator[str]:
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
