"""The first documents of a source as a model will see them: their ids decoded, trained ones told apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.preparation.documents import Task, encode_documents, tidy, walk
from batchloom.sources import Part, place_of
from batchloom.sources.files import Source
from batchloom.tokens import Tokenizer

# Longer documents are shown by so many of their first and last tokens.
_HEAD, _TAIL = 384, 128
# Records that are looked at for documents to show.
_RECORDS = 1000
_AT_ONCE = 16
_BROKEN = "\ufffd"
_MOST_BYTES_OF_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens that are all trained, or all not.

    Attributes:
        text: what they decode to; empty where they are left out of the preview.
        trained: whether they are trained; None where they are left out.
        tokens: how many they are.
    """

    text: str
    trained: bool | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Preview:
    """One document.

    Attributes:
        file: the source.
        line: 1-based line of its record, None where lines have no meaning.
        row: 1-based row of its record, None where rows have no meaning.
        tokens: its length.
        trained: how many of its tokens are trained.
        pieces: all of it, in order; a long one without its middle.
    """

    file: str
    line: int | None
    row: int | None
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


def preview_documents(sources: Sequence[Source], task: Task, count: int) -> tuple[Preview, ...]:
    """The first ``count`` documents that come of sources, as they will lie in the store."""
    found: list[Preview] = []
    if not count:
        return ()
    for source, record, ids, trained in _first(sources, task):
        bad = BadRecord(record, 0, None, "", "")
        line, row = place_of(source, task.rules, 0, bad)
        pieces = cut_pieces(task.tokenizer, ids, trained)
        found.append(Preview(source.name, line, row, ids.size, int(trained.sum()), tuple(pieces)))
        if len(found) == count:
            break
    return tuple(found)


def _first(
    sources: Sequence[Source], task: Task
) -> Iterator[tuple[Source, int, NDArray[np.int64], NDArray[np.bool_]]]:
    """Documents from the beginning of sources: source, record, ids and which of them are trained."""
    seen = 0

    def refused(_: Part, error: InputError) -> None:
        """It is told where the source is read as a whole."""

    parts = [(Part(source, 0, source.size), None) for source in sources]
    for stretch in walk(parts, task.readings, None, refused):
        found, reading = stretch.found, stretch.reading
        tidy(found, reading.way, normalized=task.normalize)
        for at in range(0, len(found.values), _AT_ONCE):
            made = encode_documents(task, reading, found.values[at : at + _AT_ONCE])
            records = found.records[at : at + _AT_ONCE]
            numbers = range(len(records)) if made.numbers is None else made.numbers.tolist()
            trained = np.ones(made.tokens.size, bool) if made.trained is None else made.trained
            stops = np.cumsum(made.lengths.astype(np.int64)).tolist()
            for number, start, stop in zip(numbers, [0, *stops], stops, strict=False):
                ids = made.tokens[start:stop].astype(np.int64)
                yield stretch.part.source, records[number], ids, trained[start:stop]
        seen += found.seen
        if seen >= _RECORDS:
            return


def cut_pieces(
    tokenizer: Tokenizer, ids: NDArray[np.int64], trained: NDArray[np.bool_]
) -> list[Piece]:
    """A document as pieces; of a long one the middle is left out."""
    if ids.size <= _HEAD + _TAIL:
        return _pieces(tokenizer, ids, trained)
    head, tail = _HEAD, ids.size - _TAIL
    # No cut inside a character of several tokens.
    while head > _HEAD - _MOST_BYTES_OF_CHARACTER and _ends_broken(tokenizer, ids[:head]):
        head -= 1
    while tail < ids.size - _TAIL + _MOST_BYTES_OF_CHARACTER and _begins_broken(
        tokenizer, ids[tail:]
    ):
        tail += 1
    return [
        *_pieces(tokenizer, ids[:head], trained[:head]),
        Piece("", None, tail - head),
        *_pieces(tokenizer, ids[tail:], trained[tail:]),
    ]


def _pieces(
    tokenizer: Tokenizer, ids: NDArray[np.int64], trained: NDArray[np.bool_]
) -> list[Piece]:
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), ids.size]
    pieces, before = [], ""
    for start, stop in pairwise(edges):
        # Some tokenizers write a space where a text begins: what a piece adds to those before it is its text.
        whole = tokenizer.decode(ids[:stop])
        apart = not whole.startswith(before)
        text = tokenizer.decode(ids[start:stop]) if apart else whole[len(before) :]
        pieces.append(Piece(text, bool(trained[start]), stop - start))
        before = whole
    return pieces


def _ends_broken(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[-_MOST_BYTES_OF_CHARACTER:]).endswith(_BROKEN)


def _begins_broken(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[:_MOST_BYTES_OF_CHARACTER]).startswith(_BROKEN)
