"""Plain text and code: complete files, or files cut into documents."""

from collections.abc import Iterator

from batchloom.core.document import Records
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import BOM, ReadMethod, ReadRules
from batchloom.sources.formats.delimiters import Delimiter, make_delimiter
from batchloom.sources.formats.record_blocks import RecordBlock, iter_record_blocks
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    make_non_text_record,
    make_too_large_record,
)
from batchloom.sources.formats.text_cuts import find_document_end


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


def read_delimited(stream: PartStream, rules: ReadRules, read_method: ReadMethod) -> Iterator[Records]:
    """Yield text documents that are lines, paragraphs or text between markers."""
    delimiter, record = make_delimiter(read_method, rules), 0
    for block in iter_record_blocks(stream, delimiter, rules.limits):
        batch = _split_block(block, record, delimiter, read_method, rules.limits.record_bytes)
        record += batch.records_read
        # A suspended generator keeps its locals alive, and a record may be very large.
        del block
        yield batch


def _split_block(
    block: RecordBlock, record: int, delimiter: Delimiter, read_method: ReadMethod, max_bytes: int
) -> Records:
    """Return the records of a block; ``record`` is the number of the first one."""
    if block.oversize:
        return Records(bad=[make_too_large_record(record, block.offset, block.data, max_bytes)], records_read=1)
    batch = Records()
    contents, starts = delimiter.split(block.data)
    for number, (content, start) in enumerate(zip(contents, starts, strict=True), record):
        line = content.removesuffix(b"\r") if read_method == "line" else content
        if len(line) > max_bytes:
            batch.bad.append(make_too_large_record(number, block.offset + start, line, max_bytes))
        elif line:
            _add_document(batch, number, block.offset + start, line)
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
    if fault_index >= 0:
        batch.bad.append(make_non_text_record(record, offset, data, fault_index))
        return
    batch.values.append(text)
    batch.records.append(record)
    batch.offsets.append(offset)
