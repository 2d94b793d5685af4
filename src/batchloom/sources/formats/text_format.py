"""Plain text and code: whole files, or files cut into documents."""

from collections.abc import Iterator

from batchloom.core.document import Records
from batchloom.sources.files import BOM, PartStream, ReadMethod, ReadRules
from batchloom.sources.formats.delimiters import Delimiter, make_delimiter
from batchloom.sources.formats.record_blocks import RecordBlock, iter_record_blocks
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    make_non_text_record,
    make_too_large_record,
)
from batchloom.sources.formats.text_cuts import find_document_end


def read_text_file(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """The one document of a file; a file above ``record_bytes`` is a bad record."""
    yield _make_whole_record(
        stream.read_up_to(rules.limits.record_bytes + 1), rules.limits.record_bytes
    )


def _make_whole_record(data: bytes, most: int) -> Records:
    found = Records()
    if len(data) > most:
        found.bad.append(make_too_large_record(0, 0, data[:SNIPPET_BYTES], most))
        found.seen = 1
    elif data:
        _add_document(found, 0, 0, data)
    return found


def read_cut(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """A long text cut into documents of about ``document_bytes``; nothing is lost between them."""
    limits = rules.limits
    compressed = stream.source.compression is not None
    buffer = stream.read_up_to(limits.whole_text_bytes + 1) if compressed else b""
    if compressed and len(buffer) <= limits.whole_text_bytes:
        yield _make_whole_record(buffer, limits.record_bytes)
        return
    offset, record, over = stream.position - len(buffer), 0, False
    while not over:
        data = stream.read_up_to(max(limits.chunk_bytes, 2 * limits.document_bytes + 1))
        buffer += data
        over = not data
        found, start = Records(), 0
        while start < len(buffer) and (over or len(buffer) - start > 2 * limits.document_bytes):
            end = find_document_end(buffer, start, limits)
            _add_document(found, record, offset + start, buffer[start:end])
            record, start = record + 1, end
        buffer, offset = buffer[start:], offset + start
        yield found


def read_delimited(stream: PartStream, rules: ReadRules, way: ReadMethod) -> Iterator[Records]:
    """Text whose documents are lines, paragraphs or the stretches between markers."""
    delimiter, record = make_delimiter(way, rules), 0
    for block in iter_record_blocks(stream, delimiter, rules.limits):
        found = _split_block(block, record, delimiter, way, rules.limits.record_bytes)
        record += found.seen
        # A generator holds its names while it waits, and a record may be very large.
        del block
        yield found


def _split_block(
    block: RecordBlock, record: int, delimiter: Delimiter, way: ReadMethod, most: int
) -> Records:
    """The records of a block whose first record has this number."""
    if block.oversize:
        return Records(bad=[make_too_large_record(record, block.offset, block.data, most)], seen=1)
    found = Records()
    pieces, starts = delimiter.split(block.data)
    for number, (piece, start) in enumerate(zip(pieces, starts, strict=True), record):
        line = piece.removesuffix(b"\r") if way == "line" else piece
        if len(line) > most:
            found.bad.append(make_too_large_record(number, block.offset + start, line, most))
        elif line:
            _add_document(found, number, block.offset + start, line)
    found.seen = len(pieces)
    return found


def _add_document(found: Records, record: int, offset: int, data: bytes) -> None:
    """Decode one document, or note why it cannot be."""
    found.seen += 1
    if offset == 0 and data.startswith(BOM):
        data, offset = data[len(BOM) :], len(BOM)
    try:
        text, at = data.decode(), data.find(b"\0")
    except UnicodeDecodeError as error:
        text, at = "", error.start
    if at >= 0:
        found.bad.append(make_non_text_record(record, offset, data, at))
        return
    found.values.append(text)
    found.records.append(record)
    found.offsets.append(offset)
