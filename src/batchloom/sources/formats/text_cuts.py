"""Document boundaries in a long text, chosen from the nearby bytes alone."""

import re

from batchloom.sources.files.source_rules import ReadLimits

_BLANK_LINE_PATTERN = re.compile(rb"\n(?:[ \t\r]*\n)++")


def find_document_end(buffer: bytes, start: int, limits: ReadLimits) -> int:
    """Return the end of the document that begins at ``start`` of a long text.

    It is the first blank line at or after ``document_bytes``. Without one up to twice that, it is
    the first line end, else the first space, else the first character start.

    Args:
        buffer: at least ``2 * document_bytes`` from ``start``, or all remaining bytes.
        start: start of the document in the buffer.
        limits: sizes that decide documents.
    """
    min_end, max_end = start + limits.document_bytes, start + 2 * limits.document_bytes
    if len(buffer) <= min_end:
        return len(buffer)
    best_cut = find_best_cut(buffer, min_end, min(max_end, len(buffer)))
    if best_cut is not None:
        return best_cut
    # The rest has no better cut and is short enough to be one document.
    return len(buffer) if len(buffer) <= max_end else find_character_start(buffer, min_end)


def find_best_cut(buffer: bytes, start: int, stop: int) -> int | None:
    """Return the best cut in [start, stop): after blank lines, a line, before a space."""
    match = _BLANK_LINE_PATTERN.search(buffer, start, stop)
    if match:
        return match.end()
    index = buffer.find(b"\n", start, stop)
    if index >= 0:
        return index + 1
    index = buffer.find(b" ", start, stop)
    return index if index >= 0 else None


def find_character_start(buffer: bytes, position: int) -> int:
    """Return the first UTF-8 character start at or after ``position``."""
    for index in range(position, min(position + 4, len(buffer))):
        if buffer[index] & 0xC0 != 0x80:
            return index
    # Four continuation bytes in a row are not UTF-8. The end of the text also ends a character.
    return position if position + 4 <= len(buffer) else len(buffer)
