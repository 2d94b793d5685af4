"""Bounded sample of the input, chosen by hash, to train and verify a tokenizer."""

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
    """Return texts from hash-chosen positions of the input, or all of a small one.

    Plain files are read at the positions; compressed files and one-document files are read from their
    beginning only. ``most`` limits the characters of the sample, ``probe`` is the bytes read per position.
    Without ``record_parsers`` the sources are texts.
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
    """Yield as much of a sample as a tokenizer can train on in bounded memory.

    Training takes about 60 bytes of memory per byte of distinct words; prose has few, random strings nothing
    else. Chunks are taken in hash order, so that a truncated sample still covers all inputs.
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
    """Reader of sample parts; without record parsers the sources are texts."""

    rules: ReadRules
    record_parsers: RecordParsers | None

    def texts(self, part: SourcePart) -> Iterator[str]:
        record_parser = self.record_parsers.get_parser(part.source) if self.record_parsers else RecordParser(self.rules)
        with PartReader(part, record_parser.rules) as reader:
            for batch in reader:
                # Bad records are reported when the input is prepared, not here.
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
    """Yield the text of a probe, limited by the number of positions it covers."""
    if probe.position_count is None:
        yield from texts
        return
    remaining = size * probe.position_count
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return
