"""Bad records: where the fault lies, what was there, what to do about it."""

import json
from typing import Any

import msgspec
import orjson

from batchloom.core.document import BadRecord
from batchloom.core.errors import NOT_JSON
from batchloom.core.spec import nearest

SNIPPET_BYTES = 160
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COLUMNS_SHOWN = 12


class MissingField(Exception):  # noqa: N818 - a finding of this module, never seen outside sources
    """The record is an object without the text field; holds the sentence."""


def snippet(record: bytes) -> str:
    """The first characters of a record, for a person to recognise it."""
    return record[:SNIPPET_BYTES].decode("utf-8", "replace").strip()


def too_large(
    record: int, offset: int, start: bytes, most: int, line: int | None = None
) -> BadRecord:
    """A record above the limit of ``most`` bytes, of which only the start was kept."""
    size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    reason = f"record larger than {size}; cut it into documents (text files: --split-on line|paragraph|MARKER)"
    return BadRecord(record, offset, None, reason, snippet(start), line)


def undecodable(record: int, offset: int, data: bytes, error: UnicodeDecodeError) -> BadRecord:
    """Text that is not UTF-8."""
    if offset == 0 and data.startswith(_UTF16):
        reason = "this is UTF-16, not UTF-8; convert it with: iconv -f UTF-16 -t UTF-8"
    else:
        reason = (
            f"byte 0x{data[error.start]:02x} at offset {offset + error.start} is not valid UTF-8; "
            "convert the file with: iconv -f LATIN1 -t UTF-8 (or from whatever it is in)"
        )
    return BadRecord(record, offset, None, reason, snippet(data))


def diagnose(line: bytes, text_field: str | None) -> tuple[int | None, str]:
    """Why a JSON value gives no record: the character of the fault and the reason.

    The character is 0-based; None stands for the value as a whole.

    Raises:
        MissingField: a JSON object without the field.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        at = len(line[: error.start].decode())
        return at, f"byte 0x{line[error.start]:02x} is not valid UTF-8"
    try:
        value: Any = orjson.loads(text)
    except json.JSONDecodeError as error:
        return error.pos, NOT_JSON + error.msg + _json_remedy(text, error.pos)
    if not isinstance(value, dict):
        wanted = f" with a field {text_field!r}" if text_field else ""
        return 0, f"{_KINDS[type(value)]}, not a JSON object{wanted}"
    if text_field is None:
        return None, "not readable as a JSON object"
    if text_field not in value:
        raise MissingField(missing_field(text_field, list(value)))
    found = value[text_field]
    if not isinstance(found, str):
        return None, f"field {text_field!r} holds {_KINDS[type(found)]}, not text"
    return None, "not readable as JSON with one text field"


def _json_remedy(text: str, at: int) -> str:
    """What to do about the commonest faults at character ``at``; empty where it is another."""
    if text.startswith(("NaN", "Infinity", "-Infinity"), at) or text.startswith("Infinity", at - 1):
        return "; NaN and Infinity are no JSON: write null instead (Python: json.dumps(..., allow_nan=False))"
    if text.startswith(("'", "True", "False", "None"), at):
        return "; this is Python, not JSON: write it with json.dumps"
    return ""


def missing_field(text_field: str, columns: list[str]) -> str:
    """The sentence for a record without the text field: what is there, and what was meant."""
    if not columns:
        return f"no field {text_field!r}: the object is empty"
    shown = ", ".join(repr(name) for name in columns[:_COLUMNS_SHOWN])
    more = f" and {len(columns) - _COLUMNS_SHOWN} more" if len(columns) > _COLUMNS_SHOWN else ""
    hint = nearest(text_field, columns).replace("did you mean ", "did you mean --text-field ")
    hint = hint or "; name the one that holds the text with --text-field"
    return f"no field {text_field!r}: the record has {shown}{more}{hint}"


def row_decoder(text_field: str) -> msgspec.json.Decoder[Any]:
    """A decoder of JSONL rows that builds nothing but the text: rows have it as ``value``."""
    row = msgspec.defstruct("Row", [("value", str)], rename={"value": text_field}, gc=False)
    return msgspec.json.Decoder(row)
