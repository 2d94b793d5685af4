"""What ends a record: a fixed string (a newline, a marker) or a blank line."""

import re
from typing import Protocol, final

from batchloom.sources.files import ReadMethod, ReadRules

_BLANKS = re.compile(rb"[ \t\r]*")
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t\r]*\n)++")


class Delimiter(Protocol):
    """Finds the ends of records in a buffer that begins where a record begins."""

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Where the first delimiter ends, -1 where none does for certain."""

    def last_end(self, buffer: bytes) -> int:
        """Where the last delimiter that is certain ends; 0 where there is none."""

    def overlap(self, buffer: bytes) -> int:
        """How many bytes at the end of ``buffer`` may belong to a delimiter that goes on."""

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """The records of a block of whole ones, without delimiters, and where each begins."""


@final
class FixedDelimiter:
    """A string of bytes that never changes, matched from left to right without overlaps."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def first_end(self, buffer: bytes, *, final: bool) -> int:  # noqa: ARG002 - never in doubt
        """Where the first mark ends, or -1."""
        start = buffer.find(self._mark)
        return start + len(self._mark) if start >= 0 else -1

    def last_end(self, buffer: bytes) -> int:
        """Where the last mark ends, counted from the left; 0 where there is none."""
        if len(self._mark) == 1:
            return buffer.rfind(self._mark) + 1
        return len(buffer) - len(buffer.split(self._mark)[-1])

    def overlap(self, buffer: bytes) -> int:
        """All of a mark but its last byte."""
        return min(len(self._mark) - 1, len(buffer))

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """The stretches between marks."""
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
    """One or more blank lines; the indentation of the line after them is kept."""

    def first_end(self, buffer: bytes, *, final: bool) -> int:
        """Where the first run of blank lines ends, -1 where it may go on beyond the buffer."""
        match = _BLANK_LINES.search(buffer)
        if match is None or not (final or _is_run_complete(buffer, match.end())):
            return -1
        return match.end()

    def last_end(self, buffer: bytes) -> int:
        """Where the last run of blank lines that is over ends."""
        last = 0
        for match in _BLANK_LINES.finditer(buffer):
            if _is_run_complete(buffer, match.end()):
                last = match.end()
        return last

    def overlap(self, buffer: bytes) -> int:
        """The white space at the end of the buffer, at most half of it."""
        return min(len(buffer) - len(buffer.rstrip(b" \t\r\n")), len(buffer) // 2)

    def split(self, block: bytes) -> tuple[list[bytes], list[int]]:
        """The paragraphs, without line ends around them."""
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
    """Whether something else than blanks follows ``end``: the run of blank lines is over."""
    match = _BLANKS.match(buffer, end)
    return match is not None and match.end() < len(buffer)


def make_delimiter(read_method: ReadMethod, rules: ReadRules) -> Delimiter:
    """What ends a record in sources read this way."""
    if read_method == "paragraph":
        return BlankLineDelimiter()
    return FixedDelimiter(rules.split_on.encode() if read_method == "marker" else b"\n")
