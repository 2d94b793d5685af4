"""Preview of the first documents of a source: decoded tokens and loss mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError
from batchloom.preparation.documents import EncodeContext, encode_documents, iter_parsed_records, normalize_records
from batchloom.sources import SourcePart, locate_record
from batchloom.sources.files import Source
from batchloom.tokens import Tokenizer

# A longer document is previewed by its first and last tokens.
_HEAD_TOKENS, _TAIL_TOKENS = 384, 128
# Most records to read in search of documents to preview.
_MAX_RECORDS = 1000
_BATCH_RECORDS = 16
_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_UTF8_BYTES = 4


@dataclass(frozen=True, slots=True)
class PreviewSegment:
    """Adjacent tokens with the same loss mask.

    Attributes:
        text: decoded text; empty for tokens left out of the preview.
        trained: whether the tokens are trained; None for tokens left out.
        tokens: number of tokens.
    """

    text: str
    trained: bool | None
    tokens: int


@dataclass(frozen=True, slots=True)
class DocumentPreview:
    """Preview of one document.

    Attributes:
        file: name of the source.
        line: 1-based line of its record; None if lines have no meaning.
        row: 1-based row of its record; None if rows have no meaning.
        tokens: number of tokens.
        trained: number of trained tokens.
        pieces: segments of the document, in order; a long document lacks its middle.
    """

    file: str
    line: int | None
    row: int | None
    tokens: int
    trained: int
    pieces: tuple[PreviewSegment, ...]


def preview_documents(sources: Sequence[Source], task: EncodeContext, count: int) -> tuple[DocumentPreview, ...]:
    """Return the first ``count`` documents of sources, as the store would hold them."""
    previews: list[DocumentPreview] = []
    if not count:
        return ()
    for source, record, ids, trained in _iter_first_documents(sources, task):
        bad = BadRecord(record, 0, None, "", "")
        line, row = locate_record(source, task.rules, 0, bad)
        segments = split_preview_segments(task.tokenizer, ids, trained)
        previews.append(DocumentPreview(source.name, line, row, ids.size, int(trained.sum()), tuple(segments)))
        if len(previews) == count:
            break
    return tuple(previews)


def _iter_first_documents(
    sources: Sequence[Source], task: EncodeContext
) -> Iterator[tuple[Source, int, NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield source, record, token ids and loss mask of the first documents."""
    records_read = 0

    def on_refused_part(_: SourcePart, error: InputError) -> None:
        """Ignore the error: the examination reports it."""

    parts = [(SourcePart(source, 0, source.size), None) for source in sources]
    for parsed_records in iter_parsed_records(parts, task.record_parsers, None, on_refused_part):
        record_batch, record_parser = parsed_records.batch, parsed_records.record_parser
        normalize_records(record_batch, record_parser.record_kind, normalized=task.normalize)
        for batch_start in range(0, len(record_batch.values), _BATCH_RECORDS):
            encoded_batch = encode_documents(
                task, record_parser, record_batch.values[batch_start : batch_start + _BATCH_RECORDS]
            )
            records = record_batch.records[batch_start : batch_start + _BATCH_RECORDS]
            numbers = range(len(records)) if encoded_batch.numbers is None else encoded_batch.numbers.tolist()
            trained = np.ones(encoded_batch.ids.size, bool) if encoded_batch.mask is None else encoded_batch.mask
            stops = np.cumsum(encoded_batch.lengths.astype(np.int64)).tolist()
            for number, start, stop in zip(numbers, [0, *stops], stops, strict=False):
                ids = encoded_batch.ids[start:stop].astype(np.int64)
                yield parsed_records.part.source, records[number], ids, trained[start:stop]
        records_read += record_batch.records_read
        if records_read >= _MAX_RECORDS:
            return


def split_preview_segments(
    tokenizer: Tokenizer, ids: NDArray[np.int64], trained: NDArray[np.bool_]
) -> list[PreviewSegment]:
    """Split a document into segments; a long one loses its middle."""
    if ids.size <= _HEAD_TOKENS + _TAIL_TOKENS:
        return _decode_segments(tokenizer, ids, trained)
    head, tail = _HEAD_TOKENS, ids.size - _TAIL_TOKENS
    # A cut inside a character of several tokens would decode to a replacement character.
    while head > _HEAD_TOKENS - _MAX_UTF8_BYTES and _ends_broken(tokenizer, ids[:head]):
        head -= 1
    while tail < ids.size - _TAIL_TOKENS + _MAX_UTF8_BYTES and _begins_broken(tokenizer, ids[tail:]):
        tail += 1
    return [
        *_decode_segments(tokenizer, ids[:head], trained[:head]),
        PreviewSegment("", None, tail - head),
        *_decode_segments(tokenizer, ids[tail:], trained[tail:]),
    ]


def _decode_segments(tokenizer: Tokenizer, ids: NDArray[np.int64], trained: NDArray[np.bool_]) -> list[PreviewSegment]:
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), ids.size]
    segments, previous_text = [], ""
    for start, stop in pairwise(edges):
        # Some tokenizers add a space where a text begins, so a segment's text is what it adds to the decoded prefix.
        decoded_text = tokenizer.decode(ids[:stop])
        apart = not decoded_text.startswith(previous_text)
        text = tokenizer.decode(ids[start:stop]) if apart else decoded_text[len(previous_text) :]
        segments.append(PreviewSegment(text, bool(trained[start]), stop - start))
        previous_text = decoded_text
    return segments


def _ends_broken(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[-_MAX_UTF8_BYTES:]).endswith(_REPLACEMENT_CHARACTER)


def _begins_broken(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> bool:
    return tokenizer.decode(ids[:_MAX_UTF8_BYTES]).startswith(_REPLACEMENT_CHARACTER)
