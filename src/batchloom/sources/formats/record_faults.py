"""Bad records: position of the fault, excerpt and remedy."""

import codecs
import json
import re
from dataclasses import replace
from typing import Any

import orjson

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import INVALID_JSON_PREFIX, InputError
from batchloom.core.settings import quote_value, suggest
from batchloom.core.wording import describe_json_type, escape_unprintable, format_list
from batchloom.sources.files.file_opening import ENCODING_BY_MARK

SNIPPET_BYTES = 160
_EXCERPT_BEFORE = 24
_EXCERPT_AFTER = 32
_GUESSED_BYTES = 200
_MAX_GUESSES = 3
_MAX_WORDS = 3
# Those in which texts are commonly found.
_ENCODINGS = [
    "cp1252",
    "gb18030",
    "big5",
    "cp932",
    "euc_jp",
    "cp949",
    "cp1250",
    "cp1251",
    "koi8_r",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "mac_roman",
]
_INVALID_BYTE = re.compile(r"(byte 0x[0-9a-f]{2}(?: at offset \d+)?) is not valid UTF-8.*", re.DOTALL)
_WORD = re.compile(r"[^\s<>\"]+")
# A document at an offset up to this is the first of a file.
_MARK_BYTES = 3
# Magic bytes of other formats in files with text names: the format, and the remedy. No text begins like this.
_NO_TEXT = {
    b"PAR1\x15": ("Parquet", "rename it to end in .parquet"),
    b"ARROW1\0\0": ("Arrow", "rename it to end in .arrow"),
    b"\x1f\x8b\x08": ("gzip", "rename it to end in .gz, or unpack it once if it does"),
    b"\x28\xb5\x2f\xfd": ("zstd", "rename it to end in .zst"),
    b"\xfd7zXZ\0": ("xz", "rename it to end in .xz"),
    b"PK\x03\x04": (
        "zip",
        "rename it to end in .zip, or export text from the program that made it",
    ),
    b"%PDF-": ("PDF", "extract its text first"),
    b"\x89PNG\r": ("PNG", "give records that name the image"),
    b"\xff\xd8\xff": ("JPEG", "give records that name the image"),
}
ARC_REMEDY = "convert it to WARC first, for example with arc2warc of warctools"
INDEX_REMEDY = "it holds no pages: name the .warc or .wet files"
_EXTRACTOR_REMEDY = "extract its texts first, for example with wikiextractor --json, and name its output"
# Beginnings of dumps whose texts need a tool of their own, with their names and remedies.
_DUMPS = (
    (rb"(?:<\?xml[^>]*>\s*)?<mediawiki[\s>]", "dump of MediaWiki", _EXTRACTOR_REMEDY),
    (rb'<doc id="[^"\n]*" (?:url|revid)="', "output of wikiextractor", _EXTRACTOR_REMEDY),
    (
        rb"(?:<\?xml[^>]*>\s*)?<(?:posts|comments|users)>\s*<row ",
        "dump of Stack Exchange",
        "convert its rows to JSON Lines first, and their HTML to text",
    ),
    (rb"filedesc://", "ARC archive", ARC_REMEDY),
    (rb"CDX |\S+\)\S* \d{14} \{", "index of a web archive", INDEX_REMEDY),
    (rb"\S+\.(?:warc|wat|wet|paths)\.gz\n", "index of a web archive", INDEX_REMEDY),
)
_MAX_COLUMNS_LISTED = 12
_TEXT_FIELD_NAMES = {"text", "texts", "txt"}


class MissingFieldError(Exception):
    """The record is an object without the text field; holds the message."""


def excerpt_record(record: bytes) -> str:
    """Return the first characters of a record, for a person to recognize it.

    For invalid UTF-8 they are those around the fault. ``record`` may be cut anywhere.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(record)
    except UnicodeDecodeError as error:
        return excerpt_around(record, error.start)
    return escape_unprintable(record[:SNIPPET_BYTES].decode("utf-8", "ignore").strip())


def excerpt_around(data: bytes, at: int) -> str:
    """Return a printable excerpt around byte ``at``, with escapes for other bytes."""
    start = max(0, at - _EXCERPT_BEFORE)
    # An excerpt must not start inside a character.
    while start and start < at and data[start] & 0xC0 == 0x80:
        start += 1
    excerpt = data[start : at + _EXCERPT_AFTER].decode("utf-8", "backslashreplace").rstrip("\r\n")
    return ("..." if start else "") + escape_unprintable(excerpt)


def describe_invalid_utf8(data: bytes, at: int) -> str:
    """Explain a byte that is no UTF-8, and what other encodings make of it."""
    guesses = _guess_encodings(data, at)
    readings = "; ".join(f"{name} reads {words}" for name, words in guesses)
    # The guess of a short text may be wrong: its reader knows which word is right.
    encoding = guesses[0][0] if len(guesses) == 1 else "ENCODING"
    byte = f"byte 0x{data[at]:02x} is not valid UTF-8{f' ({readings})' if readings else ''}"
    return f"{byte}; name the file's encoding: --encoding {encoding}"


def name_encoding(records: Records, encoding: str) -> Records:
    """Name the encoding in the reasons of bad records, instead of UTF-8."""
    reason = rf"\1 is not valid {encoding}; remove it, or name the encoding of the file alone (encoding: in a manifest)"
    records.bad[:] = [replace(bad, reason=_INVALID_BYTE.sub(reason, bad.reason)) for bad in records.bad]
    return records


def _guess_encodings(data: bytes, at: int) -> list[tuple[str, str]]:
    """Return the likeliest encodings, each with the words that it gives around a byte.

    A short text fits several: only its reader knows which is right.
    """
    from charset_normalizer import from_bytes

    # Most encodings have the same characters below 128, and none of these inside a longer one but letters.
    start = max(data.rfind(separator, 0, max(0, at - _GUESSED_BYTES)) for separator in (b" ", b'"', b"\n")) + 1
    readings: dict[str, str] = {}
    for match in from_bytes(data[start : at + _GUESSED_BYTES], cp_isolation=_ENCODINGS):
        words = [word for word in _WORD.findall(str(match)) if not word.isascii()]
        if words:
            # Several encodings may read the sample alike; name the commonest, which is likeliest right for the rest.
            name = min(match.could_be_from_charset, key=_ENCODINGS.index)
            readings[name] = " ".join(words[:_MAX_WORDS])
    guesses = list(readings.items())[:_MAX_GUESSES]
    return sorted(guesses, key=lambda guess: guess[0] != _ENCODINGS[0])


def make_too_large_record(record: int, offset: int, start: bytes, max_bytes: int, line: int | None = None) -> BadRecord:
    """Return the bad record for one above ``max_bytes``, given its first bytes."""
    size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes} bytes"
    reason = f"record larger than {size}; cut it into documents (text files: --split-on line|paragraph|MARKER)"
    return BadRecord(record, offset, None, reason, excerpt_record(start), line)


def make_non_text_record(record: int, offset: int, data: bytes, at: int) -> BadRecord:
    """Return the bad record for a document whose byte at ``at`` is not text."""
    first = record == 0 and offset <= _MARK_BYTES
    reason = describe_wide_encoding(data) if first else None
    if reason is None and data[at]:
        reason = describe_invalid_utf8(data, at).replace(" is not", f" at offset {offset + at} is not", 1)
    elif reason is None:
        reason = (
            f"a NUL byte at offset {offset + at}, which is not text; if the file is UTF-16: --encoding utf-16-le, else "
            r"remove the NUL bytes: tr -d '\000'"
        )
    if not first or describe_wide_encoding(data):
        return BadRecord(record, offset, None, reason, excerpt_around(data, at))
    # Only the first document has a known line and column in the file.
    before = data[:at].decode("utf-8", "replace")
    column = len(before) - before.rfind("\n")
    return BadRecord(record, offset, column, reason, excerpt_around(data, at), before.count("\n") + 1)


def find_dump(start: bytes) -> tuple[str, str] | None:
    """Return name and remedy of a dump that needs a tool of its own.

    Args:
        start: its first bytes.
    """
    return next(((label, remedy) for pattern, label, remedy in _DUMPS if re.match(pattern, start)), None)


def find_records(start: bytes) -> BadRecord | None:
    """Return the bad record for a text that holds records of another format.

    Args:
        start: its first bytes, with a complete line.
    """
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    reason = ""
    if dump := find_dump(text):
        reason = f"this is no text ({dump[0]}); {dump[1]}"
    elif text.startswith(b"WARC/1."):
        reason = "this is no text (web archive); rename it to end in .warc"
    elif _holds_objects(text):
        form, ending = ("list of JSON objects", "json") if text.startswith(b"[") else ("JSON Lines", "jsonl")
        reason = (
            f"this is no text ({form}); rename it to end in .{ending}, or keep its lines as they are: --split-on line"
        )
    return BadRecord(0, 0, None, reason, excerpt_record(start)) if reason else None


def _holds_objects(text: bytes) -> bool:
    """Return whether a text is JSON Lines, or a list of objects."""
    if text.startswith(b"["):
        return text[1:].lstrip()[:1] == b"{" and _is_object(text[1:].lstrip().partition(b"\n")[0].rstrip(b",\r ]"))
    first, _, rest = text.partition(b"\n")
    second = rest.lstrip().partition(b"\n")[0]
    return text.startswith(b"{") and _is_object(first) and (not second or _is_object(second))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except json.JSONDecodeError:
        return False


def refuse_wide_encoding(name: str, start: bytes) -> None:
    """Raise InputError for text in UTF-16 or UTF-32, and for other formats."""
    if reason := describe_wide_encoding(start):
        raise InputError(f"{name} cannot be read: {reason}")


def describe_wide_encoding(start: bytes) -> str | None:
    """Explain why a file is unreadable: UTF-16, UTF-32 or another format; else None."""
    for magic, (form, remedy) in _NO_TEXT.items():
        if start.startswith(magic):
            return f"the file begins like {form}, not like text; {remedy}"
    for mark, name in ENCODING_BY_MARK.items():
        if start.startswith(mark) and name != "utf-8":
            mark_hex = mark.hex(" ").upper()
            return (
                f"this is {name.upper()}, not UTF-8 (it begins with the byte order mark {mark_hex}); name it: "
                f"--encoding {name}"
            )
    if len(start) > 3 and (start[0] == 0) != (start[1] == 0) and any(start[2:4]):
        order = "BE" if start[0] == 0 else "LE"
        return f"this seems to be UTF-16, not UTF-8; name it: --encoding utf-16-{order.lower()}"
    return None


def diagnose_json(line: bytes, text_field: str | None, late_field: str | None = None) -> tuple[int | None, str]:
    """Return the character of the fault and the reason why a JSON value is no record.

    The character is 0-based; None means the complete value.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return len(line[: error.start].decode()), describe_invalid_utf8(line, error.start)
    try:
        value: Any = orjson.loads(text)
    except json.JSONDecodeError as error:
        return error.pos, INVALID_JSON_PREFIX + error.msg + _json_remedy(error)
    if not isinstance(value, dict):
        field_phrase = f" with a field {text_field!r}" if text_field else ""
        return 0, f"{describe_json_type(value)}, not a JSON object{field_phrase}"
    if text_field is None:
        return None, "not readable as a JSON object"
    if text_field not in value:
        raise MissingFieldError(describe_missing_field(text_field, list(value)))
    field_value = value[text_field]
    if not isinstance(field_value, str):
        return None, f"field {text_field!r} holds {describe_json_type(field_value)}, not text"
    if late_field is not None and value.get(late_field) is not None:
        return None, (
            f"field {late_field!r} has a value, and the first records of this file have none: give its first record "
            f"one, too, or ignore the field with --ignore {late_field}"
        )
    return None, "not readable as JSON with one text field"


def _json_remedy(error: json.JSONDecodeError) -> str:
    """Return the remedy for the most common faults, or "" for others."""
    text = error.doc
    at = error.pos
    if text.strip() in ("{", "["):
        return "; the value goes on in the next line: write one object per line with: jq -c . FILE"
    if text[at:].strip() == ",":
        return "; a comma follows the object: remove it with: sed 's/,[[:space:]]*$//' FILE"
    if "depth" in error.msg:
        return "; nested too deeply: flatten it, or write it as JSON text in a string"
    if text.startswith(("NaN", "Infinity", "-Infinity"), at) or text.startswith("Infinity", at - 1):
        return "; NaN and Infinity are not JSON: write null instead (Python: json.dumps(..., allow_nan=False))"
    if text.startswith(("'", "True", "False", "None"), at):
        return "; this is Python, not JSON: write it with json.dumps"
    if any(sign < " " for sign in text[max(0, at - 1) : at + 1]):
        return "; write control characters as escapes such as \\n or \\u0000, as json.dumps does"
    return ""


def describe_missing_field(text_field: str, columns: list[str]) -> str:
    """Describe a record without the text field: its fields, and a suggestion."""
    if not columns:
        return f"no field {text_field!r}: the object is empty"
    listed_columns = format_list([quote_value(name) for name in columns], _MAX_COLUMNS_LISTED)
    # Only a field named by the user can be misspelt: `test` is no misspelling of the default `text`.
    candidates = columns if text_field != "text" else [c for c in columns if c.lower() in _TEXT_FIELD_NAMES]
    hint = suggest(text_field, candidates).replace("did you mean ", "did you mean --text-field ")
    hint = hint or "; name the field that holds the text with --text-field"
    return f"no field {text_field!r}: the record has {listed_columns}{hint}"
