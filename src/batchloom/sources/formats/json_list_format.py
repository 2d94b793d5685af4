"""JSON files with a list of objects, also inside ``{"data": [...]}``, streamed."""

import re
from collections.abc import Iterator
from typing import final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import INVALID_JSON_PREFIX, InputError
from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.sources.files.json_scan import scan_brackets
from batchloom.sources.files.json_shape import WRAPPERS
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import PartStart, ReadRules
from batchloom.sources.formats.json_rows import JsonRowReader, count_leading_bytes
from batchloom.sources.formats.json_text import OPENING, QUOTE, JsonTextWindow
from batchloom.sources.formats.record_faults import diagnose_json, make_too_large_record

MUST_BE_LIST = "JSON file must contain a list of objects"
_MAX_KEYS_LISTED = 8
_MAX_KEY_BYTES = 1 << 16
_LEAD_PATTERN = re.compile(rb"[ \t\r\n]*(,?)[ \t\r\n]*")
# Parsers reject such nesting, and searching for its end would take long.
_DEEP_PATTERN = re.compile(rb"[\[{]{1000000}")
_SCALAR_END_PATTERN = re.compile(rb"[,\]]")
# In text with unbalanced quotes, the text between strings reads as strings.
_STRING_PATTERN = re.compile(rb'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_BETWEEN_PATTERN = re.compile(rb"[\s\[\]{},:]*[,:][\s\[\]{},:]*")


def read_json(stream: PartStream, rules: ReadRules, begin: PartStart | None = None) -> Iterator[Records]:
    """Yield the records of a part of a JSON source in batches.

    Args:
        stream: bytes of the part.
        rules: read rules of the source.
        begin: start of the part; None: the start of the source.

    Raises:
        InputError: it holds no list of objects.
        InvalidJsonError: it is broken so that later records cannot be told apart.
        RecordError: its first records all lack the text field.
    """
    text = JsonTextWindow(stream, begin)
    wrapper = begin.wrapper if begin else open_list(text, rules)
    yield from _JsonListReader(text, rules, after=begin is not None).read()
    if text.at_part_end:
        return
    if wrapper:
        second = _find_next_list(text, rules, [wrapper])
        if second:
            raise InputError(
                f"{MUST_BE_LIST}: {text.name} holds two lists, under {wrapper!r} and {second!r}; "
                f"extract one, for example with: jq .{second}"
            )
    if text.peek():
        text.fail("there is text after the end of the JSON value")


def open_list(text: JsonTextWindow, rules: ReadRules) -> str:
    """Read past the opening bracket of the list and return its key, "" without one.

    Raises:
        InputError: there is no list of objects.
        InvalidJsonError: the text is broken before it.
    """
    first = text.peek()
    if first == b"[":
        text.at += 1
        return ""
    if first != b"{":
        begins = f"begins with {text.data[text.at : text.at + 20]!r}" if first else "is blank"
        raise InputError(f"{MUST_BE_LIST}: {text.name} {begins}.")
    text.at += 1
    keys: list[str] = []
    if key := _find_next_list(text, rules, keys):
        return key
    key_list = ", ".join(map(repr, keys[:_MAX_KEYS_LISTED])) + (", ..." if keys[_MAX_KEYS_LISTED:] else "")
    raise InputError(
        f"{MUST_BE_LIST}: {text.name} holds one object with {key_list or 'no keys'}, and a list is expected "
        f"under {', '.join(WRAPPERS)}; extract it, for example with: jq .NAME"
    )


def _find_next_list(text: JsonTextWindow, rules: ReadRules, keys: list[str]) -> str:
    """Read past the bracket of the object's next list under a known key.

    Returns the key, or "" if the object ends first. All keys read are appended to ``keys``.
    """
    while (next_byte := text.peek()) != b"}":
        if keys:
            text.take(b",", "expected a comma or }")
            next_byte = text.peek()
        if next_byte != QUOTE:
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


def _read_name(text: JsonTextWindow) -> str:
    raw = text.read_string(_MAX_KEY_BYTES)
    try:
        return msgspec.json.decode(raw, type=str)
    except JSON_DECODE_ERRORS:
        text.fail("this key is not a valid JSON string", text.at - len(raw))


def _skip_value(text: JsonTextWindow, max_bytes: int) -> None:
    begin = text.peek()
    if begin in (b"{", b"["):
        if not text.skip_brackets():
            text.fail("the file ends inside a value; it is cut short")
    elif begin == QUOTE:
        text.read_string(max_bytes)
    elif not text.read_scalar():
        text.fail("expected a value")


@final
class _JsonListReader:
    """Reader of list elements, from the opening bracket or ``after`` an element."""

    def __init__(self, text: JsonTextWindow, rules: ReadRules, *, after: bool) -> None:
        self._text = text
        self._max_record_bytes = rules.limits.record_bytes
        self._rows = JsonRowReader(text.name, rules, first=not after)
        self._record = 0
        self._after_element = after
        self._closed = False
        # Whether the comma before the next element is consumed.
        self._past_comma = False

    def read(self) -> Iterator[Records]:
        """Yield all elements up to the closing bracket or the end of the part."""
        text = self._text
        while not self._closed:
            data = text.data[text.at :] if text.at else text.data
            starts, ends = find_elements(data)
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
                    if text.at_part_end:
                        return
                    text.fail(*self._describe_truncated())
        self._rows.finish()

    @property
    def _needs_comma(self) -> bool:
        """True if a comma must precede the next element."""
        return self._after_element or self._record > 0

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
        text, batch = self._text, Records()
        stops = dict(zip((starts + text.at).tolist(), (ends + text.at).tolist(), strict=True))
        while (start := self._find_next_start()) is not None:
            stop = self._find_stop(start, stops)
            if stop is None:
                break
            self._add(batch, start, stop)
            text.at, self._past_comma = stop, False
        return batch

    def _find_next_start(self) -> int | None:
        """Return the start of the next element; None if not in the window, or at list end."""
        text, data = self._text, self._text.data
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
            text.at, self._past_comma = at, comma
            return None
        if data[at : at + 1] == b"]" and not comma:
            text.at, self._closed = at + 1, True
            return None
        if comma != self._needs_comma:
            text.fail("an extra comma" if comma else "expected a comma or ]", at)
        if data[at] in b",:]}":
            text.fail("expected a value", at)
        return at

    def _find_stop(self, start: int, stops: dict[int, int]) -> int | None:
        """Return the end of the element at ``start``; None if not in the window."""
        data = self._text.data
        if data[start] in OPENING:
            return stops.get(start)
        if data[start : start + 1] == QUOTE:
            string = _STRING_PATTERN.match(data, start)
            return string.end() if string else None
        end = _SCALAR_END_PATTERN.search(data, start)
        return end.start() if end else None

    def _add(self, batch: Records, start: int, stop: int) -> None:
        text, record = self._text, self._record
        element = text.data[start:stop]
        value = self._rows.decode_record(record, text.offset + start, element, text.locate(start))
        if not isinstance(value, BadRecord):
            batch.values.append(value)
            batch.records.append(record)
            batch.offsets.append(text.offset + start)
        elif value.reason.startswith(INVALID_JSON_PREFIX) and _has_unbalanced_quotes(element):
            at, reason = diagnose_json(element, None)
            text.fail(reason, start + count_leading_bytes(element, at or 0))
        else:
            batch.bad.append(value)
        batch.records_read += 1
        self._record += 1

    def _read_oversize(self, start: int) -> Records:
        """Skip an element above the limit and return its bad record."""
        text = self._text
        (line, _), offset = text.locate(start), text.offset + start
        if text.data[start] not in OPENING:
            text.fail("the value that begins here does not end", start)
        bad = make_too_large_record(self._record, offset, text.data[start:], self._max_record_bytes, line)
        text.at, self._past_comma = start, False
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


def find_elements(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and ends of the complete bracketed elements in ``data``.

    ``data`` begins between two elements.
    """
    scan = scan_brackets(data)
    unbalanced = np.flatnonzero(scan.depths < 0)
    limit = unbalanced[0] if len(unbalanced) else len(scan.depths)
    depths, steps, offsets = scan.depths[:limit], scan.steps[:limit], scan.offsets[:limit]
    ends = offsets[(depths == 0) & (steps < 0)] + 1
    return offsets[(depths == 1) & (steps > 0)][: len(ends)], ends


def _has_unbalanced_quotes(element: bytes) -> bool:
    """Return whether a bad element seems to have unbalanced quotes.

    It may then hold other records.
    """
    return any(_BETWEEN_PATTERN.fullmatch(match[1]) for match in _STRING_PATTERN.finditer(element))
