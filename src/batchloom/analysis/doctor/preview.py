"""Preview of the first documents of a source: decoded tokens and loss mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
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
    return tuple(islice(_iter_previews(sources, task), count))


def _iter_previews(sources: Sequence[Source], task: EncodeContext) -> Iterator[DocumentPreview]:
    records_read = 0
    parts = [(SourcePart(source, 0, source.size), None) for source in sources]
    # The examination reports parts that cannot be read.
    for parsed_records in iter_parsed_records(parts, task.record_parsers, None, lambda _part, _error: None):
        source, batch, record_parser = parsed_records.part.source, parsed_records.batch, parsed_records.record_parser
        normalize_records(batch, record_parser.record_kind, normalized=task.normalize)
        for first in range(0, len(batch.values), _BATCH_RECORDS):
            records = batch.records[first : first + _BATCH_RECORDS]
            encoded_batch = encode_documents(task, record_parser, batch.values[first : first + _BATCH_RECORDS])
            numbers = range(len(records)) if encoded_batch.numbers is None else encoded_batch.numbers.tolist()
            trained, start = encoded_batch.mask, 0
            for number, length in zip(numbers, encoded_batch.lengths.tolist(), strict=True):
                ids = encoded_batch.ids[start : start + length].astype(np.int64)
                mask = np.ones(length, bool) if trained is None else trained[start : start + length]
                position = locate_record(source, task.rules, 0, BadRecord(records[number], 0, None, "", ""))
                yield make_preview(task.tokenizer, source.name, position, ids, mask)
                start += length
        records_read += batch.records_read
        if records_read >= _MAX_RECORDS:
            return


def make_preview(
    tokenizer: Tokenizer,
    file: str,
    position: tuple[int | None, int | None],
    ids: NDArray[np.int64],
    trained: NDArray[np.bool_],
) -> DocumentPreview:
    """Return the preview of a document; ``position`` is its line and row."""
    segments = tuple(_split_segments(tokenizer, ids, trained))
    return DocumentPreview(file, *position, ids.size, int(trained.sum()), segments)


def _split_segments(tokenizer: Tokenizer, ids: NDArray[np.int64], trained: NDArray[np.bool_]) -> list[PreviewSegment]:
    """Split a document into segments; a long one loses its middle."""
    if ids.size <= _HEAD_TOKENS + _TAIL_TOKENS:
        return _decode_segments(tokenizer, ids, trained)
    head, tail = _HEAD_TOKENS, ids.size - _TAIL_TOKENS
    # A cut inside a character of several tokens would decode to a replacement character.
    while head > _HEAD_TOKENS - _MAX_UTF8_BYTES and tokenizer.decode(ids[head - _MAX_UTF8_BYTES : head]).endswith(
        _REPLACEMENT_CHARACTER
    ):
        head -= 1
    while tail < ids.size - _TAIL_TOKENS + _MAX_UTF8_BYTES and tokenizer.decode(
        ids[tail : tail + _MAX_UTF8_BYTES]
    ).startswith(_REPLACEMENT_CHARACTER):
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
