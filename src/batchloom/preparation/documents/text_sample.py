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
    record_parsers: RecordParsers | None = None,
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
        record_parsers: how the records of each source become documents; None where they are texts.
    """
    texts: list[str] = []
    remaining = most
    for text in _iter_candidates(sources, _SampleReader(rules, record_parsers), most, probe):
        if not remaining:
            break
        excerpt = (normalize(text) if normalized else text)[:remaining]
        remaining -= len(excerpt)
        if excerpt:
            texts.append(excerpt)
    return texts


def limit_distinct_texts(texts: Iterable[str]) -> Iterator[str]:
    """As much of a sample as a tokenizer can learn from in bounded memory.

    Learning takes some 60 bytes of memory for each byte of distinct words, which prose has few
    of and random strings nothing but. Pieces are taken in an order of hashes, so that where they
    do not all fit they still come from everywhere.
    """
    chunks = [text[at : at + _PIECE_CHARACTERS] for text in texts for at in range(0, len(text), _PIECE_CHARACTERS)]
    order = sorted(range(len(chunks)), key=lambda number: derive_key("piece", number))
    words: set[str] = set()
    size = 0
    for number in order:
        fresh = set(_WORDS.findall(chunks[number])).difference(words)
        size += sum(len(word.encode()) for word in fresh)
        if size > _DISTINCT_BYTES and words:
            return
        words |= fresh
        yield chunks[number]


@dataclass(frozen=True, slots=True)
class _SampleReader:
    """How sources are cut, and how their records are read; without readings they are texts."""

    rules: ReadRules
    record_parsers: RecordParsers | None

    def texts(self, part: SourcePart) -> Iterator[str]:
        """The texts of a part."""
        record_parser = self.record_parsers.get_parser(part.source) if self.record_parsers else RecordParser(self.rules)
        with PartReader(part, record_parser.rules) as reader:
            for batch in reader:
                # What is wrong with a record is told when it is read for good.
                record_parser.parse_records(batch)
                for document in batch.values:
                    yield from iter_texts(document)


def _iter_candidates(sources: Sequence[Source], reader: _SampleReader, most: int, size: int) -> Iterator[str]:
    has_texts = False
    if sum(source.size for source in sources) > most:
        for _, probe in iter_sample_ranges(sources, reader.rules, most // size, size):
            for text in _truncate_probe(reader.texts(probe.part), probe, size):
                has_texts = True
                yield text
    # Records larger than a probe may slip through all of them.
    if not has_texts:
        for source in sources:
            yield from reader.texts(SourcePart(source, 0, source.size))


def _truncate_probe(texts: Iterator[str], probe: SampleRange, size: int) -> Iterator[str]:
    """As many characters of a part as its places stand for."""
    if probe.position_count is None:
        yield from texts
        return
    remaining = size * probe.position_count
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return
