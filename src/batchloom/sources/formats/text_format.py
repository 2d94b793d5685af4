"""Plain text and code: complete files, long texts, records between delimiters."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from batchloom.core.document import Records
from batchloom.sources.files.part_stream import BOM, PartStream, ReadLimits, ReadRules
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    find_records,
    make_non_text_record,
    make_too_large_record,
)

_BLANKS = re.compile(rb"[ \t\r]*")
# Blank lines between paragraphs, with the CR of the line before them.
_PARAGRAPH_DELIMITER = re.compile(rb"\r?\n(?:[ \t\r]*\n)++")
_MAX_BLOCK_BYTES = 8 << 20
# Blank lines at which a long text may be cut.
_CUT_PATTERN = re.compile(rb"\n(?:[ \t\r]*\n)++")


@final
class FixedDelimiter:
    """A fixed byte string, matched from left to right without overlaps.

    The buffers of a delimiter begin at the start of a record.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Return the end of the first delimiter, -1 if none is certain."""
        start = buffer.find(self._mark)
        return start + len(self._mark) if start >= 0 else -1

    def last_end(self, buffer: bytes) -> int:
        """Return the end of the last certain delimiter, 0 if there is none."""
        if len(self._mark) == 1:
            return buffer.rfind(self._mark) + 1
        return len(buffer) - len(buffer.split(self._mark)[-1])

    def overlap(self, buffer: bytes) -> int:
        """Return how many trailing bytes may belong to an incomplete delimiter."""
        return min(len(self._mark) - 1, len(buffer))

    def count_reread(self, before: bytes) -> int:
        """Return how many bytes before an offset belong to a delimiter that may end there."""
        # Marks match from left to right without overlaps, so earlier marks matter too.
        position = 0
        while (mark_start := before.find(self._mark, position)) >= 0:
            position = mark_start + len(self._mark)
        if position == len(before):
            return len(self._mark)
        return len(before) - max(position, len(before) - len(self._mark) + 1)

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """Return records of a complete block, without delimiters, and their offsets."""
        records = block.split(self._mark)
        if not records[-1]:
            records.pop()
        starts = []
        offset = 0
        for record in records:
            starts.append(offset)
            offset += len(record) + len(self._mark)
        return records, starts


@final
class BlankLineDelimiter:
    """One or more blank lines; the indentation of the next line belongs to its record."""

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Return the end of the first run of blank lines, -1 if it may be incomplete."""
        match = _PARAGRAPH_DELIMITER.search(buffer)
        if match is None or not (final or _is_run_complete(buffer, match.end())):
            return -1
        return match.end()

    def last_end(self, buffer: bytes) -> int:
        """Return the end of the last complete run of blank lines."""
        last = 0
        for match in _PARAGRAPH_DELIMITER.finditer(buffer):
            if _is_run_complete(buffer, match.end()):
                last = match.end()
        return last

    def overlap(self, buffer: bytes) -> int:
        """Return the length of the trailing white space, at most half the buffer."""
        return min(len(buffer) - len(buffer.rstrip(b" \t\r\n")), len(buffer) // 2)

    def count_reread(self, before: bytes) -> int:
        """Return the length of the trailing white space."""
        return len(before) - len(before.rstrip(b" \t\r\n"))

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """Return the paragraphs, without surrounding line ends, and their offsets."""
        records = []
        starts = []
        offset = 0
        for match in _PARAGRAPH_DELIMITER.finditer(block):
            records.append(block[offset : match.start()].strip(b"\r\n"))
            starts.append(offset)
            offset = match.end()
        if offset < len(block):
            records.append(block[offset:].strip(b"\r\n"))
            starts.append(offset)
        return records, starts


def _is_run_complete(buffer: bytes, end: int) -> bool:
    """Return whether the run of blank lines ends at ``end``, as other bytes follow."""
    match = _BLANKS.match(buffer, end)
    return match is not None and match.end() < len(buffer)


Delimiter = FixedDelimiter | BlankLineDelimiter
NEWLINE = FixedDelimiter(b"\n")


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive complete records; the last one of a source may lack its delimiter."""

    offset: int
    data: bytes
    # One record above ``ReadLimits.record_bytes``; ``data`` is only its beginning.
    oversize: bool = False


def iter_record_blocks(stream: PartStream, delimiter: Delimiter, limits: ReadLimits) -> Iterator[RecordBlock]:
    """Yield blocks of complete records from a stream that begins at a record start.

    Memory holds at most a record of ``record_bytes`` and a chunk. Larger records are skipped and
    reported by their beginning.
    """
    offset = stream.position
    carry = b""
    while True:
        data = stream.read(max(limits.chunk_bytes, min(len(carry), _MAX_BLOCK_BYTES)))
        if not data:
            if carry:
                yield RecordBlock(offset, carry)
            return
        carry += data
        end = delimiter.last_end(carry)
        if end:
            # A suspended generator keeps its locals alive, and a block may be very large.
            ready = [RecordBlock(offset, carry[:end])]
            carry = carry[end:]
            offset = offset + end
            yield ready.pop()
        if len(carry) > limits.record_bytes + _MAX_BLOCK_BYTES:
            start = carry[:SNIPPET_BYTES]
            carry = _skip_record(stream, delimiter, limits, carry)
            yield RecordBlock(offset, start, oversize=True)
            offset = stream.position - len(carry)


def _skip_record(stream: PartStream, delimiter: Delimiter, limits: ReadLimits, carry: bytes) -> bytes:
    """Skip the rest of a record and return the bytes read after its end."""
    while (end := delimiter.first_end(carry, final=False)) < 0:
        data = stream.read(limits.chunk_bytes)
        if not data:
            return b""
        carry = carry[len(carry) - delimiter.overlap(carry) :] + data
    return carry[end:]


def read_text_file(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the single document of a file, or a bad record above ``record_bytes``."""
    yield _make_whole_record(stream, b"", rules.limits.record_bytes)


def _make_whole_record(stream: PartStream, data: bytes, max_bytes: int) -> Records:
    """Read the rest of a file after ``data``, and return it as one document."""
    data += stream.read_up_to(max_bytes + 1 - len(data))
    batch = Records()
    if len(data) > max_bytes:
        batch.bad.append(make_too_large_record(0, 0, data[:SNIPPET_BYTES], max_bytes))
        batch.records_read = 1
    elif stream.source.kind == "text" and (bad := find_records(data)):
        batch.bad.append(bad)
        batch.records_read = 1
    elif data:
        _add_document(batch, 0, 0, data)
    return batch


def read_cut(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield a long text cut into documents of about ``document_bytes``, without gaps."""
    limits = rules.limits
    # The decoded length is unknown, so read up to the limit.
    is_unmeasured = not stream.source.is_plain
    buffer = stream.read_up_to(limits.whole_text_bytes + 1) if is_unmeasured else b""
    if is_unmeasured and len(buffer) <= limits.whole_text_bytes:
        yield _make_whole_record(stream, buffer, limits.record_bytes)
        return
    offset = stream.position - len(buffer)
    record = 0
    at_end = False
    while not at_end:
        data = stream.read_up_to(max(limits.chunk_bytes, 2 * limits.document_bytes + 1))
        buffer += data
        at_end = not data
        batch = Records()
        start = 0
        if offset == 0 and (bad := find_records(buffer)):
            # The rest is not read: it is no text.
            yield Records(bad=[bad], records_read=1)
            return
        while start < len(buffer) and (at_end or len(buffer) - start > 2 * limits.document_bytes):
            end = find_document_end(buffer, start, limits)
            _add_document(batch, record, offset + start, buffer[start:end])
            record += 1
            start = end
        buffer = buffer[start:]
        offset = offset + start
        yield batch


def read_delimited(
    stream: PartStream, rules: ReadRules, *, make_delimiter: Callable[[ReadRules], Delimiter]
) -> Iterator[Records]:
    """Yield text documents between delimiters; lines come without their line ends."""
    record = 0
    delimiter = make_delimiter(rules)
    limits = rules.limits
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
        data = data[len(BOM) :]
        offset = len(BOM)
    try:
        text = data.decode()
        fault_index = data.find(b"\0")
    except UnicodeDecodeError as error:
        text = ""
        fault_index = error.start
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
    min_end = start + limits.document_bytes
    max_end = start + 2 * limits.document_bytes
    if len(buffer) <= min_end:
        return len(buffer)
    best_cut = find_best_cut(buffer, min_end, min(max_end, len(buffer)))
    if best_cut is not None:
        return best_cut
    # The rest has no better cut and is short enough to be one document.
    return len(buffer) if len(buffer) <= max_end else find_character_start(buffer, min_end)


def find_best_cut(buffer: bytes, start: int, stop: int) -> int | None:
    """Return the best cut in [start, stop): after blank lines, a line, before a space."""
    match = _CUT_PATTERN.search(buffer, start, stop)
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
