"""Plain text and code: complete files, or files cut into documents."""

import re
from collections.abc import Callable, Iterator

from batchloom.core.document import Records
from batchloom.sources.files.part_stream import BOM, PartStream, ReadLimits, ReadRules
from batchloom.sources.formats.delimiters import (
    NEWLINE,
    Delimiter,
    RecordBlock,
    iter_record_blocks,
)
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    make_non_text_record,
    make_too_large_record,
)

_BLANK_LINE_PATTERN = re.compile(rb"\n(?:[ \t\r]*\n)++")


def read_text_file(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the single document of a file, or a bad record above ``record_bytes``."""
    yield _make_whole_record(stream.read_up_to(rules.limits.record_bytes + 1), rules.limits.record_bytes)


def _make_whole_record(data: bytes, max_bytes: int) -> Records:
    batch = Records()
    if len(data) > max_bytes:
        batch.bad.append(make_too_large_record(0, 0, data[:SNIPPET_BYTES], max_bytes))
        batch.records_read = 1
    elif data:
        _add_document(batch, 0, 0, data)
    return batch


def read_cut(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield a long text cut into documents of about ``document_bytes``, without gaps."""
    limits = rules.limits
    compressed = stream.source.compression is not None
    buffer = stream.read_up_to(limits.whole_text_bytes + 1) if compressed else b""
    if compressed and len(buffer) <= limits.whole_text_bytes:
        yield _make_whole_record(buffer, limits.record_bytes)
        return
    offset, record, at_end = stream.position - len(buffer), 0, False
    while not at_end:
        data = stream.read_up_to(max(limits.chunk_bytes, 2 * limits.document_bytes + 1))
        buffer += data
        at_end = not data
        batch, start = Records(), 0
        while start < len(buffer) and (at_end or len(buffer) - start > 2 * limits.document_bytes):
            end = find_document_end(buffer, start, limits)
            _add_document(batch, record, offset + start, buffer[start:end])
            record, start = record + 1, end
        buffer, offset = buffer[start:], offset + start
        yield batch


def read_delimited(
    stream: PartStream, rules: ReadRules, *, make_delimiter: Callable[[ReadRules], Delimiter]
) -> Iterator[Records]:
    """Yield text documents between delimiters; lines come without their line ends."""
    record, delimiter, limits = 0, make_delimiter(rules), rules.limits
    for block in iter_record_blocks(stream, delimiter, limits):
        batch = _split_block(block, record, delimiter, limits.record_bytes)
        record += batch.records_read
        # A suspended generator keeps its locals alive, and a record may be very large.
        del block
        yield batch


def _split_block(block: RecordBlock, record: int, delimiter: Delimiter, max_bytes: int) -> Records:
    """Return the records of a block; ``record`` numbers the first."""
    if block.oversize:
        return Records(bad=[make_too_large_record(record, block.offset, block.data, max_bytes)], records_read=1)
    batch = Records()
    contents, starts = delimiter.split(block.data)
    for number, (content, start) in enumerate(zip(contents, starts, strict=True), record):
        document = content.removesuffix(b"\r") if delimiter is NEWLINE else content
        if len(document) > max_bytes:
            batch.bad.append(make_too_large_record(number, block.offset + start, document, max_bytes))
        elif document:
            _add_document(batch, number, block.offset + start, document)
    batch.records_read = len(contents)
    return batch


def _add_document(batch: Records, record: int, offset: int, data: bytes) -> None:
    """Decode one document and add it, or add its fault."""
    batch.records_read += 1
    if offset == 0 and data.startswith(BOM):
        data, offset = data[len(BOM) :], len(BOM)
    try:
        text, fault_index = data.decode(), data.find(b"\0")
    except UnicodeDecodeError as error:
        text, fault_index = "", error.start
    is_bad = fault_index >= 0
    batch.add(record, offset, make_non_text_record(record, offset, data, fault_index) if is_bad else text)


def find_document_end(buffer: bytes, start: int, limits: ReadLimits) -> int:
    """Return the end of the document that begins at ``start`` of a long text.

    It is the first blank line at or after ``document_bytes``. Without one up to twice that, it is
    the first line end, else the first space, else the first character start.

    Args:
        buffer: at least ``2 * document_bytes`` from ``start``, or all remaining bytes.
        start: start of the document in the buffer.
        limits: sizes that decide documents.
    """
    min_end, max_end = start + limits.document_bytes, start + 2 * limits.document_bytes
    if len(buffer) <= min_end:
        return len(buffer)
    best_cut = find_best_cut(buffer, min_end, min(max_end, len(buffer)))
    if best_cut is not None:
        return best_cut
    # The rest has no better cut and is short enough to be one document.
    return len(buffer) if len(buffer) <= max_end else find_character_start(buffer, min_end)


def find_best_cut(buffer: bytes, start: int, stop: int) -> int | None:
    """Return the best cut in [start, stop): after blank lines, a line, before a space."""
    match = _BLANK_LINE_PATTERN.search(buffer, start, stop)
    if match:
        return match.end()
    index = buffer.find(b"\n", start, stop)
    if index >= 0:
        return index + 1
    index = buffer.find(b" ", start, stop)
    return index if index >= 0 else None


def find_character_start(buffer: bytes, position: int) -> int:
    """Return the first UTF-8 character start at or after ``position``."""
    for index in range(position, min(position + 4, len(buffer))):
        if buffer[index] & 0xC0 != 0x80:
            return index
    # Four continuation bytes in a row are not UTF-8. The end of the text also ends a character.
    return position if position + 4 <= len(buffer) else len(buffer)
