"""JSON files with a list of objects, also inside ``{"data": [...]}``, streamed.

Brackets are found without decoding the text: a quote is unescaped if an even number of backslashes precedes it, and a
bracket is structural if an even number of quotes precedes it (Langdale and Lemire, "Parsing Gigabytes of JSON per
Second", 2019, section 3.1).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import INVALID_JSON_PREFIX, InputError, InvalidJsonError
from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.sources.files.part_stream import BOM, PartStream, ReadRules
from batchloom.sources.formats.jsonl_format import JsonRowReader, count_leading_bytes
from batchloom.sources.formats.record_faults import diagnose_json, make_too_large_record, refuse_wide_encoding

_QUOTE, _SLASH = b'"\\'
# Longer runs of backslashes take another method, because each byte walked takes a pass.
_MAX_WALKED = 8
# Table for bytes.translate: 1 for a quote or a bracket, else 0.
_IS_MARK = bytes(byte in b'"{}[]' for byte in range(256))
_DEPTH_STEPS = np.zeros(256, np.int8)
_DEPTH_STEPS[list(b"{[")] = 1
_DEPTH_STEPS[list(b"}]")] = -1
_CHUNK_BYTES = 1 << 20
_MAX_WINDOW_BYTES = 8 << 20
_MAX_SCALAR_BYTES = 1 << 16
_SPACE = b" \t\r\n"
_SPACE_PATTERN = re.compile(rb"[ \t\r\n]*")
_STRING_PATTERN = re.compile(rb'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_SCALAR_PATTERN = re.compile(rb"[^,\[\]{}\s]*")
_OPENING = b"{["
_MUST_BE_LIST = "JSON file must contain a list of objects"
_MAX_KEYS_LISTED = 8
_MAX_KEY_BYTES = 1 << 16
_LEAD_PATTERN = re.compile(rb"[ \t\r\n]*(,?)[ \t\r\n]*")
# Parsers reject such nesting, and searching for its end would take long.
_DEEP_PATTERN = re.compile(rb"[\[{]{1000000}")
_SCALAR_END_PATTERN = re.compile(rb"[,\]]")
# In text with unbalanced quotes, the text between strings reads as strings.
_BETWEEN_PATTERN = re.compile(rb"[\s\[\]{},:]*[,:][\s\[\]{},:]*")
# Keys of an object under which its list of records may be.
WRAPPERS = ("data", "rows", "records", "examples", "instances", "items")


@dataclass(frozen=True, slots=True)
class BracketScan:
    """Brackets outside of strings in a block of bytes, and the state at its end.

    ``steps`` are 1 for an opening bracket and -1 for a closing one; ``depths`` count the open brackets after each.
    """

    offsets: NDArray[np.int64]
    steps: NDArray[np.int8]
    depths: NDArray[np.int64]
    in_string: bool = False
    escaped: bool = False

    @property
    def depth(self) -> int:
        """Number of open brackets at the end of the block."""
        return int(self.depths[-1])


def scan_brackets(data: bytes, *, depth: int = 0, in_string: bool = False, escaped: bool = False) -> BracketScan:
    """Find the brackets of a block of bytes that begins in the given state.

    The first entry represents the beginning of the block: offset -1, step 0, initial depth.
    """
    array = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(np.frombuffer(data.translate(_IS_MARK), bool))
    if escaped or _SLASH in data:
        marks = marks[~_mask_escaped(array, marks, escaped=escaped)]
        tail = len(data) - len(data.rstrip(b"\\"))
        escaped = (tail + (escaped and tail == len(data))) % 2 == 1
    kinds = array[marks]
    quotes = kinds == _QUOTE
    inside = (np.cumsum(quotes) + in_string) & 1
    outside = (inside == 0) & ~quotes
    steps = np.concatenate([[0], _DEPTH_STEPS[kinds[outside]]]).astype(np.int8)
    return BracketScan(
        np.concatenate([[-1], marks[outside]]),
        steps,
        np.cumsum(steps, dtype=np.int64) + depth,
        bool(inside[-1]) if len(inside) else in_string,
        escaped,
    )


def _mask_escaped(array: NDArray[np.uint8], marks: NDArray[np.int64], *, escaped: bool) -> NDArray[np.bool_]:
    """Return which marks follow an odd run of backslashes.

    ``escaped`` states that the first byte is escaped.
    """
    is_escaped = np.zeros(len(marks), bool)
    if escaped and len(marks):
        is_escaped[0] = marks[0] == 0
    # Few marks follow one backslash, and fewer follow two: runs are walked back from those.
    candidates = np.flatnonzero(marks > 0)
    candidates = candidates[array[marks[candidates] - 1] == _SLASH]
    for back in range(2, _MAX_WALKED + 2):
        is_escaped[candidates] ^= True
        previous = marks[candidates] - back
        # An escaped backslash escapes nothing.
        if escaped:
            is_escaped[candidates[previous == -1]] ^= True
        inside = previous >= 0
        candidates = candidates[inside][array[previous[inside]] == _SLASH]
        if not len(candidates):
            return is_escaped
    slashes = np.flatnonzero(array == _SLASH)
    run_starts = slashes[np.concatenate([[True], np.diff(slashes) != 1])]
    starts = run_starts[np.searchsorted(run_starts, marks[candidates], "right") - 1]
    run_lengths = marks[candidates] - starts - (escaped & (starts == 0))
    is_escaped[candidates] = run_lengths % 2 == 1
    return is_escaped


@final
class _JsonTextWindow:
    """A window over a stream of JSON text.

    Attributes:
        name: source name for messages.
        data: bytes of the window.
        at: current offset in the window; everything before it is consumed.
    """

    def __init__(self, stream: PartStream) -> None:
        self.name = stream.source.name
        self.at = 0
        self._stream = stream
        self._offset = stream.position
        self._start_position = 1, 1
        self.data = stream.read_up_to(_CHUNK_BYTES)
        refuse_wide_encoding(self.name, self.data)
        if self.data.startswith(BOM):
            self.at = len(BOM)
            self._start_position = 1, 0
        self._known_position = 0, *self._start_position

    @property
    def offset(self) -> int:
        """Byte offset of the window in the source."""
        return self._offset

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
            space = _SPACE_PATTERN.match(self.data, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.data) or not self.read_more():
                return self.data[self.at : self.at + 1]

    def take(self, expected: bytes, message: str) -> None:
        """Read one expected byte, after white space."""
        if self.peek() != expected:
            self.fail(message)
        self.at += 1

    def read_string(self, max_bytes: int) -> bytes:
        """Read the string that begins here and return it with its quotes."""
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
        depth = 0
        in_string = False
        escaped = False
        while True:
            scan = scan_brackets(self.data[self.at :], depth=depth, in_string=in_string, escaped=escaped)
            closed = np.flatnonzero((scan.depths == 0) & (scan.steps < 0))
            if len(closed):
                self.at += int(scan.offsets[closed[0]]) + 1
                return True
            depth = scan.depth
            in_string = scan.in_string
            escaped = scan.escaped
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

    def _drop_consumed(self) -> None:
        self._start_position = self.locate()
        self._known_position = 0, *self._start_position
        self._offset += self.at
        self.data = self.data[self.at :]
        self.at = 0


def _count_characters(data: bytes) -> int:
    """Count the characters in a byte range of UTF-8; continuation bytes do not count."""
    return len(data) - int(np.count_nonzero((np.frombuffer(data, np.uint8) & 0xC0) == 0x80))


def read_json(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the records of a JSON source in batches."""
    text = _JsonTextWindow(stream)
    wrapper = _open_list(text, rules)
    yield from _JsonListReader(text, rules).read()
    if wrapper:
        second = _find_next_list(text, rules, [wrapper])
        if second:
            raise InputError(
                f"{_MUST_BE_LIST}: {text.name} holds two lists, under {wrapper!r} and {second!r}; "
                f"extract one, for example with: jq .{second}"
            )
    if text.peek():
        text.fail("there is text after the end of the JSON value")


def read_object(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the single object of a source."""
    data = stream.read_up_to(rules.limits.record_bytes + 1)
    refuse_wide_encoding(stream.source.name, data)
    offset = len(BOM) if data.startswith(BOM) else 0
    batch = Records(records_read=1)
    rows = JsonRowReader(stream.source.name, rules, first=False)
    batch.add(0, offset, rows.decode_record(0, offset, data[offset:], (1, 1)))
    yield batch


def _open_list(text: _JsonTextWindow, rules: ReadRules) -> str:
    """Read past the opening bracket of the list and return its key, "" without one."""
    first = text.peek()
    if first == b"[":
        text.at += 1
        return ""
    if first != b"{":
        begins = f"begins with {text.data[text.at : text.at + 20]!r}" if first else "is blank"
        raise InputError(f"{_MUST_BE_LIST}: {text.name} {begins}.")
    text.at += 1
    keys: list[str] = []
    if key := _find_next_list(text, rules, keys):
        return key
    if text.peek() == b"{":
        raise InputError(
            f"{_MUST_BE_LIST}: {text.name} holds several objects; write one object per line with: jq -c . FILE"
        )
    key_list = ", ".join(map(repr, keys[:_MAX_KEYS_LISTED])) + (", ..." if keys[_MAX_KEYS_LISTED:] else "")
    raise InputError(
        f"{_MUST_BE_LIST}: {text.name} holds one object with {key_list or 'no keys'}, and a list is expected "
        f"under {', '.join(WRAPPERS)}; extract it, for example with: jq .NAME"
    )


def _find_next_list(text: _JsonTextWindow, rules: ReadRules, keys: list[str]) -> str:
    """Read past the bracket of the object's next list under a known key.

    Returns the key, or "" if the object ends first. All keys read are appended to ``keys``.
    """
    while (next_byte := text.peek()) != b"}":
        if keys:
            text.take(b",", "expected a comma or }")
            next_byte = text.peek()
        if next_byte != b'"':
            text.fail("expected a key in quotes")
        key = _read_name(text)
        keys.append(key)
        text.take(b":", "expected a colon after a key")
        if key in WRAPPERS and text.peek() == b"[":
            text.at += 1
            return key
        _skip_value(text, rules.limits.record_bytes)
    text.at += 1
    return ""


def _read_name(text: _JsonTextWindow) -> str:
    raw = text.read_string(_MAX_KEY_BYTES)
    try:
        return msgspec.json.decode(raw, type=str)
    except JSON_DECODE_ERRORS:
        text.fail("this key is not a valid JSON string", text.at - len(raw))


def _skip_value(text: _JsonTextWindow, max_bytes: int) -> None:
    begin = text.peek()
    if begin in (b"{", b"["):
        if not text.skip_brackets():
            text.fail("the file ends inside a value; it is cut short")
    elif begin == b'"':
        text.read_string(max_bytes)
    elif not text.read_scalar():
        text.fail("expected a value")


@final
class _JsonListReader:
    """Reader of list elements behind the opening bracket."""

    def __init__(self, text: _JsonTextWindow, rules: ReadRules) -> None:
        self._text = text
        self._max_record_bytes = rules.limits.record_bytes
        self._rows = JsonRowReader(text.name, rules, first=True)
        self._record = 0
        self._closed = False
        # Whether the comma before the next element is consumed.
        self._past_comma = False

    def read(self) -> Iterator[Records]:
        """Yield all elements up to the closing bracket."""
        text = self._text
        while not self._closed:
            data = text.data[text.at :] if text.at else text.data
            starts, ends = _find_elements(data)
            batch = self._read_all_at_once(data, starts, ends) or self._read_one_by_one(starts, ends)
            del data
            if batch.records_read:
                yield batch
            elif not self._closed:
                start = self._find_next_start()
                if start is not None and _DEEP_PATTERN.match(text.data, start):
                    text.fail("values are nested more than 1,000,000 deep", start)
                if start is not None and len(text.data) - start > self._max_record_bytes:
                    yield self._read_oversize(start)
                elif not text.read_more():
                    text.fail(*self._describe_truncated())
        self._rows.finish()

    @property
    def _needs_comma(self) -> bool:
        """True if a comma must precede the next element."""
        return self._record > 0

    def _read_all_at_once(self, data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Records | None:
        """Return the complete elements in the window; None if there may be a fault."""
        if not len(ends) or (ends - starts).max() > self._max_record_bytes:
            return None
        lead = _LEAD_PATTERN.fullmatch(data, 0, int(starts[0]))
        if lead is None or bool(lead[1]) + self._past_comma != self._needs_comma:
            return None
        values = self._rows.decode_array(b"[%b]" % data[starts[0] : ends[-1]])
        if values is None or len(values) != len(starts):
            return None
        offsets = (starts + (self._text.offset + self._text.at)).tolist()
        self._text.at += int(ends[-1])
        self._past_comma = False
        records = list(range(self._record, self._record + len(values)))
        self._record += len(values)
        return Records(values=values, records=records, offsets=offsets, records_read=len(values))

    def _read_one_by_one(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Records:
        """Return the good and bad records in the window."""
        text = self._text
        batch = Records()
        stops = dict(zip((starts + text.at).tolist(), (ends + text.at).tolist(), strict=True))
        while (start := self._find_next_start()) is not None:
            stop = self._find_stop(start, stops)
            if stop is None:
                break
            self._add(batch, start, stop)
            text.at = stop
            self._past_comma = False
        return batch

    def _find_next_start(self) -> int | None:
        """Return the start of the next element; None if not in the window, or at list end."""
        text = self._text
        data = self._text.data
        lead = _LEAD_PATTERN.match(data, text.at)
        at = lead.end() if lead else text.at
        commas = (lead is not None and bool(lead[1])) + self._past_comma
        comma = commas == 1
        if commas > 1:
            text.fail("an extra comma", at)
        if at == len(data):
            if comma and not self._needs_comma:
                text.fail("an extra comma", at)
            # There may be any amount of white space, which the window drops.
            text.at = at
            self._past_comma = comma
            return None
        if data[at : at + 1] == b"]" and not comma:
            text.at = at + 1
            self._closed = True
            return None
        if comma != self._needs_comma:
            text.fail("an extra comma" if comma else "expected a comma or ]", at)
        if data[at] in b",:]}":
            text.fail("expected a value", at)
        return at

    def _find_stop(self, start: int, stops: dict[int, int]) -> int | None:
        """Return the end of the element at ``start``; None if not in the window."""
        data = self._text.data
        if data[start] in _OPENING:
            return stops.get(start)
        if data[start : start + 1] == b'"':
            string = _STRING_PATTERN.match(data, start)
            return string.end() if string else None
        end = _SCALAR_END_PATTERN.search(data, start)
        return end.start() if end else None

    def _add(self, batch: Records, start: int, stop: int) -> None:
        text = self._text
        record = self._record
        element = text.data[start:stop]
        value = self._rows.decode_record(record, text.offset + start, element, text.locate(start))
        is_json_fault = isinstance(value, BadRecord) and value.reason.startswith(INVALID_JSON_PREFIX)
        if is_json_fault and _has_unbalanced_quotes(element):
            at, reason = diagnose_json(element, None)
            text.fail(reason, start + count_leading_bytes(element, at or 0))
        batch.add(record, text.offset + start, value)
        batch.records_read += 1
        self._record += 1

    def _read_oversize(self, start: int) -> Records:
        """Skip an element above the limit and return its bad record."""
        text = self._text
        (line, _), offset = text.locate(start), text.offset + start
        if text.data[start] not in _OPENING:
            text.fail("the value that begins here does not end", start)
        bad = make_too_large_record(self._record, offset, text.data[start:], self._max_record_bytes, line)
        text.at = start
        self._past_comma = False
        if not text.skip_brackets():
            text.fail(f"the file ends inside the record that begins on line {line}; it is cut short")
        self._record += 1
        return Records(bad=[bad], records_read=1)

    def _describe_truncated(self) -> tuple[str, int]:
        """Describe a source that ends inside the list, with the position."""
        start = self._find_next_start()
        if start is None:
            return "the list is not closed; the file is cut short", len(self._text.data)
        element = self._text.data[start:]
        at, reason = diagnose_json(element, None)
        if at is None or start + count_leading_bytes(element, at) >= len(self._text.data):
            return "the file ends inside the record that begins here; it is cut short", start
        return reason, start + count_leading_bytes(element, at)


def _find_elements(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and ends of the complete bracketed elements in ``data``.

    ``data`` begins between two elements.
    """
    scan = scan_brackets(data)
    unbalanced = np.flatnonzero(scan.depths < 0)
    limit = unbalanced[0] if len(unbalanced) else len(scan.depths)
    depths = scan.depths[:limit]
    steps = scan.steps[:limit]
    offsets = scan.offsets[:limit]
    ends = offsets[(depths == 0) & (steps < 0)] + 1
    return offsets[(depths == 1) & (steps > 0)][: len(ends)], ends


def _has_unbalanced_quotes(element: bytes) -> bool:
    """Return whether a bad element seems to have unbalanced quotes.

    It may then hold other records.
    """
    return any(_BETWEEN_PATTERN.fullmatch(match[1]) for match in _STRING_PATTERN.finditer(element))
