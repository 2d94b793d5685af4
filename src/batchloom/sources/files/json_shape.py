"""Detection of JSON layout: one list of records, or one record per line."""

import re
from typing import Any, Literal

import msgspec
import numpy as np

from batchloom.sources.files.json_scan import scan_brackets

# Keys of an object under which its list of records may be.
WRAPPERS = ("data", "rows", "records", "examples", "instances", "items")
_WRAPPED_LIST_PATTERN = re.compile(rb'"(?:%b)"\s*:\s*$' % "|".join(WRAPPERS).encode())
_KEY_REACH = 64
_BOM = b"\xef\xbb\xbf"
_NO_VALUE = object()

# A list of records, one record per line, a single record on one line, or anything else.
JsonShape = Literal["list", "lines", "line", "other"]


def starts_with_list(start: bytes) -> bool:
    """Return whether the text begins with a list."""
    return start.removeprefix(_BOM).lstrip().startswith(b"[")


def detect_json_shape(start: bytes, *, truncated: bool) -> JsonShape:
    """Return the layout of a JSON file that begins with ``start``.

    ``start`` holds a complete line unless the line is too long. ``truncated`` states whether the file
    continues after ``start`` without a line end.
    """
    text = start.removeprefix(_BOM).lstrip()
    line, newline, next_lines = text.partition(b"\n")
    value = _decode_line(line)
    if text.startswith(b"["):
        # Complete lists, one per line, count as records, though bad ones.
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
    """Return whether a list opens under one of the known keys."""
    scan = scan_brackets(text)
    opened_offsets = scan.offsets[np.flatnonzero((scan.depths == 2) & (scan.steps > 0))]
    return any(
        text[offset : offset + 1] == b"[" and _WRAPPED_LIST_PATTERN.search(text[max(0, offset - _KEY_REACH) : offset])
        for offset in opened_offsets.tolist()
    )
