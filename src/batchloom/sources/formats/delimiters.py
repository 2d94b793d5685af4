"""Record delimiters (newline, marker, blank line), and blocks of records."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from batchloom.sources.files.part_stream import PartStream, ReadLimits
from batchloom.sources.formats.record_faults import SNIPPET_BYTES

_BLANKS = re.compile(rb"[ \t\r]*")
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t\r]*\n)++")
_MAX_BLOCK_BYTES = 8 << 20


@final
class FixedDelimiter:
    """A fixed byte string, matched from left to right without overlaps.

    The buffers of a delimiter begin at the start of a record.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def first_end(self, buffer: bytes, *, final: bool) -> int:  # noqa: ARG002 - a match is always certain
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
        starts, offset = [], 0
        for record in records:
            starts.append(offset)
            offset += len(record) + len(self._mark)
        return records, starts


@final
class BlankLineDelimiter:
    """One or more blank lines; the indentation of the next line belongs to its record."""

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Return the end of the first run of blank lines, -1 if it may be incomplete."""
        match = _BLANK_LINES.search(buffer)
        if match is None or not (final or _is_run_complete(buffer, match.end())):
            return -1
        return match.end()

    def last_end(self, buffer: bytes) -> int:
        """Return the end of the last complete run of blank lines."""
        last = 0
        for match in _BLANK_LINES.finditer(buffer):
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
        records, starts, offset = [], [], 0
        for match in _BLANK_LINES.finditer(block):
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
    offset, carry = stream.position, b""
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
            carry, offset = carry[end:], offset + end
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
