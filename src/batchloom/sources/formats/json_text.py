"""Window over JSON text that is read front to back, with line and column numbers."""

import re
from typing import NoReturn, final

import numpy as np

from batchloom.core.errors import INVALID_JSON_PREFIX, InputError, InvalidJsonError
from batchloom.sources.files.json_scan import scan_brackets
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import BOM, PartStart
from batchloom.sources.formats.record_faults import describe_wide_encoding

_CHUNK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 8 << 20
_MAX_SCALAR_BYTES = 1 << 16
_SPACE_PATTERN = re.compile(rb"[ \t\r\n]*")
_STRING_PATTERN = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR_PATTERN = re.compile(rb"[^,\[\]{}\s]*")
OPENING, QUOTE = b"{[", b'"'


def refuse_wide_encoding(name: str, start: bytes) -> None:
    """Raise InputError for text in UTF-16 or UTF-32, and for other formats."""
    if reason := describe_wide_encoding(start):
        raise InputError(f"{name} cannot be read: {reason}")


@final
class JsonTextWindow:
    """A window over a stream of JSON text.

    Args:
        stream: the text.
        begin: start of the text; None: the beginning of its source.

    Attributes:
        name: source name for messages.
        data: bytes of the window.
        at: current offset in the window; everything before it is consumed.
    """

    def __init__(self, stream: PartStream, begin: PartStart | None = None) -> None:
        self.name, self.at = stream.source.name, 0
        self._stream = stream
        self._offset = stream.position
        self._start_position = (begin.line, begin.column) if begin else (1, 1)
        self.data = stream.read_up_to(_CHUNK_BYTES)
        if begin is None:
            refuse_wide_encoding(self.name, self.data)
            if self.data.startswith(BOM):
                self.at = len(BOM)
                self._start_position = 1, 0
        self._known_position = 0, *self._start_position

    @property
    def offset(self) -> int:
        """Byte offset of the window in the source."""
        return self._offset

    @property
    def at_part_end(self) -> bool:
        """True if the stream ends before its source, and all of it is consumed."""
        return self.at == len(self.data) and self._stream.ends_before_source

    def read_more(self) -> bool:
        """Drop consumed bytes and read on; return False at the end of the source."""
        self._drop_consumed()
        data = self._stream.read_up_to(max(_CHUNK_BYTES, min(len(self.data), _MAX_WINDOW_BYTES)))
        self.data += data
        return bool(data)

    def locate(self, at: int | None = None) -> tuple[int, int]:
        """Return 1-based line and column of an offset in the window (default: ``at``)."""
        at = self.at if at is None else at
        # Counting continues at the last request: there may be a bad record at every other byte.
        known_at, line, column = self._known_position if self._known_position[0] <= at else (0, *self._start_position)
        lines = self.data.count(b"\n", known_at, at)
        begin = self.data.rfind(b"\n", known_at, at) + 1 if lines else known_at
        position = line + lines, (1 if lines else column) + _count_characters(self.data[begin:at])
        self._known_position = at, *position
        return position

    def peek(self) -> bytes:
        """Skip white space and return the next byte, empty at the end."""
        while True:
            self.at = self._skip_whitespace()
            if self.at < len(self.data) or not self.read_more():
                return self.data[self.at : self.at + 1]

    def take(self, expected: bytes, message: str) -> None:
        """Read one expected byte, after white space.

        Raises:
            InvalidJsonError: another byte is there.
        """
        if self.peek() != expected:
            self.fail(message)
        self.at += 1

    def read_string(self, max_bytes: int) -> bytes:
        """Read the string that begins here and return it with its quotes.

        Raises:
            InvalidJsonError: it does not end within ``max_bytes`` bytes.
        """
        while (match := _STRING_PATTERN.match(self.data, self.at)) is None:
            if len(self.data) - self.at > max_bytes or not self.read_more():
                self.fail("the string that begins here does not end")
        self.at = match.end()
        return match.group()

    def read_scalar(self) -> bytes:
        """Read the number or word that begins here."""
        while (match := _SCALAR_PATTERN.match(self.data, self.at)) and match.end() == len(self.data):
            if match.end() - self.at > _MAX_SCALAR_BYTES:
                self.fail("expected a value")
            if not self.read_more():
                break
        word = _SCALAR_PATTERN.match(self.data, self.at)
        self.at = word.end() if word else self.at
        return word.group() if word else b""

    def skip_brackets(self) -> bool:
        """Skip the bracketed value that begins here; return False if it is incomplete."""
        depth, in_string, escaped = 0, False, False
        while True:
            scan = scan_brackets(self.data[self.at :], depth=depth, in_string=in_string, escaped=escaped)
            closed = np.flatnonzero((scan.depths == 0) & (scan.steps < 0))
            if len(closed):
                self.at += int(scan.offsets[closed[0]]) + 1
                return True
            depth, in_string, escaped = scan.depth, scan.in_string, scan.escaped
            self.at = len(self.data)
            if not self.read_more():
                return False

    def fail(self, fact: str, at: int | None = None) -> NoReturn:
        """Raise InvalidJsonError at ``at``, as later records cannot be told apart."""
        line, column = self.locate(at)
        fact = fact.removeprefix(INVALID_JSON_PREFIX)
        raise InvalidJsonError(
            self.name,
            line,
            column,
            f"{fact}; the records after this cannot be told apart: fix it, or fetch the file again",
        )

    def _skip_whitespace(self) -> int:
        match = _SPACE_PATTERN.match(self.data, self.at)
        return match.end() if match else self.at

    def _drop_consumed(self) -> None:
        self._start_position = self.locate()
        self._known_position = 0, *self._start_position
        self._offset += self.at
        self.data, self.at = self.data[self.at :], 0


def _count_characters(data: bytes) -> int:
    """Count the characters in a byte range of UTF-8; continuation bytes do not count."""
    return len(data) - int(np.count_nonzero((np.frombuffer(data, np.uint8) & 0xC0) == 0x80))
