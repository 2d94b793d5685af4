"""Whether JSON text is one value that holds a list of records, or records line by line."""

import re
from typing import Any, Literal

import msgspec
import numpy as np

from batchloom.sources.files.json_scan import scan_brackets

# The key of an object under which its list of records is looked for.
WRAPPERS = ("data", "rows", "records", "examples", "instances", "items")
_WRAPPED_LIST_PATTERN = re.compile(rb'"(?:%b)"\s*:\s*$' % "|".join(WRAPPERS).encode())
_KEY_REACH = 64
_BOM = b"\xef\xbb\xbf"
_NO_VALUE = object()

# A list of records, records line by line, one record on one line, or neither for all one can see.
JsonShape = Literal["list", "lines", "line", "other"]


def starts_with_list(start: bytes) -> bool:
    """Whether a list opens first."""
    return start.removeprefix(_BOM).lstrip().startswith(b"[")


def detect_json_shape(start: bytes, *, truncated: bool) -> JsonShape:
    """What a JSON file that begins with ``start`` holds.

    Args:
        start: its first bytes, with a whole line where that is not too long.
        truncated: whether the file goes on where ``start`` ends without a line end.
    """
    text = start.removeprefix(_BOM).lstrip()
    line, newline, next_lines = text.partition(b"\n")
    value = _decode_line(line)
    if text.startswith(b"["):
        # Whole lists line by line are records, if bad ones.
        if value is not _NO_VALUE and next_lines.strip():
            return "lines"
        return "list" if text[1:].lstrip()[:1] in (b"{", b"]", b"") else "other"
    if not text.startswith(b"{"):
        return "other"
    if isinstance(value, dict):
        if next_lines.strip():
            return "lines"
        wrapped = any(isinstance(value.get(key), list) for key in WRAPPERS)
        return "list" if wrapped else "line"
    if _opens_wrapped(text):
        return "list"
    if newline or not truncated:
        return "lines" if isinstance(_decode_line(next_lines.partition(b"\n")[0]), dict) else "other"
    return "lines"


def _decode_line(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NO_VALUE


def _opens_wrapped(text: bytes) -> bool:
    """Whether a list under one of the known keys opens in sight."""
    scan = scan_brackets(text)
    opened_offsets = scan.offsets[np.flatnonzero((scan.depths == 2) & (scan.steps > 0))]
    return any(
        text[offset : offset + 1] == b"[" and _WRAPPED_LIST_PATTERN.search(text[max(0, offset - _KEY_REACH) : offset])
        for offset in opened_offsets.tolist()
    )
