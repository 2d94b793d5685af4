"""Where a long text is cut into documents, from the bytes around the place alone."""

import re

from batchloom.sources.files import ReadLimits

_BLANK_LINE_PATTERN = re.compile(rb"\n(?:[ \t\r]*\n)++")


def find_document_end(buffer: bytes, start: int, limits: ReadLimits) -> int:
    """Where the document that begins at ``start`` of a long text ends.

    The first blank line at or after ``document_bytes``; where there is none within twice that,
    the first line end, else the first space, else the first character that begins there.

    Args:
        buffer: holds at least ``2 * document_bytes`` from ``start`` on, or all that is left.
        start: where the document begins in the buffer.
        limits: the sizes.
    """
    min_end, max_end = start + limits.document_bytes, start + 2 * limits.document_bytes
    if len(buffer) <= min_end:
        return len(buffer)
    best_cut = find_best_cut(buffer, min_end, min(max_end, len(buffer)))
    if best_cut is not None:
        return best_cut
    # What is left has no better place and is short enough to stay whole.
    return len(buffer) if len(buffer) <= max_end else find_character_start(buffer, min_end)


def find_best_cut(buffer: bytes, start: int, stop: int) -> int | None:
    """The best cut in [start, stop): after blank lines, after a line, before a space."""
    match = _BLANK_LINE_PATTERN.search(buffer, start, stop)
    if match:
        return match.end()
    index = buffer.find(b"\n", start, stop)
    if index >= 0:
        return index + 1
    index = buffer.find(b" ", start, stop)
    return index if index >= 0 else None


def find_character_start(buffer: bytes, position: int) -> int:
    """The first place at or after ``position`` where a UTF-8 character begins."""
    for index in range(position, min(position + 4, len(buffer))):
        if buffer[index] & 0xC0 != 0x80:
            return index
    # Four such bytes in a row are no UTF-8, and the end of the text ends a character too.
    return position if position + 4 <= len(buffer) else len(buffer)
