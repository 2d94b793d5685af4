"""Record delimiters: a fixed string (a newline, a marker) or a blank line."""

import re
from typing import Protocol, final

from batchloom.sources.files.source_rules import ReadMethod, ReadRules

_BLANKS = re.compile(rb"[ \t\r]*")
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t\r]*\n)++")


class Delimiter(Protocol):
    """Protocol that finds record ends in a buffer that begins at a record start."""

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Return the end of the first delimiter, -1 if none is certain."""

    def last_end(self, buffer: bytes) -> int:
        """Return the end of the last certain delimiter, 0 if there is none."""

    def overlap(self, buffer: bytes) -> int:
        """Return how many trailing bytes may belong to an incomplete delimiter."""

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """Return records of a complete block, without delimiters, and their offsets."""


@final
class FixedDelimiter:
    """A fixed byte string, matched from left to right without overlaps."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def first_end(self, buffer: bytes, *, final: bool) -> int:  # noqa: ARG002 - a match is always certain
        start = buffer.find(self._mark)
        return start + len(self._mark) if start >= 0 else -1

    def last_end(self, buffer: bytes) -> int:
        if len(self._mark) == 1:
            return buffer.rfind(self._mark) + 1
        return len(buffer) - len(buffer.split(self._mark)[-1])

    def overlap(self, buffer: bytes) -> int:
        return min(len(self._mark) - 1, len(buffer))

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
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


def make_delimiter(read_method: ReadMethod, rules: ReadRules) -> Delimiter:
    """Return the delimiter of records for a read method."""
    if read_method == "paragraph":
        return BlankLineDelimiter()
    return FixedDelimiter(rules.split_on.encode() if read_method == "marker" else b"\n")
