"""Formatting of plain values for messages."""

import re
from collections.abc import Sequence

_JSON_TYPE_NAMES = {
    dict: "an object",
    list: "an array",
    tuple: "an array",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
    bytes: "bytes",
}
# Remedy for columns of bytes if text is required.
BYTES_REMEDY = "convert its bytes to text first (pyarrow: column.cast('string'); pandas: column.str.decode('utf-8'))"


def describe_json_type(value: object) -> str:
    """Return the JSON name of a value's type: ``an object``, ``a number``, ``null``."""
    return _JSON_TYPE_NAMES.get(type(value)) or f"a {type(value).__name__}"


def format_count(number: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``, ``1 pass``, ``1,000 passes``."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def format_list(items: Sequence[str], most: int) -> str:
    """Join the first items by commas and count the others: ``a, b and 3 more``."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more:,} more" if more > 0 else "")


def shorten(text: str, most: int) -> str:
    """Cut a text to at most ``most`` characters, with ``...`` at the end if cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def escape_unprintable(text: str) -> str:
    r"""Make every character visible: control and direction characters as ``\x1b``, ..."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def format_size(size: float) -> str:
    """Format a number of bytes in a readable unit."""
    if size < 10**3:
        return f"{size:,.0f} bytes"
    if size < 10**5:
        return f"{size / 1e3:,.1f} kB"
    if size < 10**10:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e9:,.1f} GB" if size < 10**13 else f"{size / 1e12:,.1f} TB"


def format_duration(seconds: float) -> str:
    """Format a duration in a readable unit."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


_SIZE_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int | None:
    """Parse ``50GB``, ``1.5 TB``, ``64MiB`` or ``1000000`` as bytes; None if invalid."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None or (match[3] and not match[2]):
        return None
    unit = 1024 if match[3] else 1000
    return round(float(match[1]) * float(unit ** _SIZE_UNITS[match[2]]))
