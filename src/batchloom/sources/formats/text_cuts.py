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
    least, most = start + limits.document_bytes, start + 2 * limits.document_bytes
    if len(buffer) <= least:
        return len(buffer)
    cut = find_best_cut(buffer, least, min(most, len(buffer)))
    if cut is not None:
        return cut
    # What is left has no better place and is short enough to stay whole.
    return len(buffer) if len(buffer) <= most else find_character_start(buffer, least)


def find_best_cut(buffer: bytes, start: int, stop: int) -> int | None:
    """The best cut in [start, stop): after blank lines, after a line, before a space."""
    match = _BLANK_LINE_PATTERN.search(buffer, start, stop)
    if match:
        return match.end()
    found = buffer.find(b"\n", start, stop)
    if found >= 0:
        return found + 1
    found = buffer.find(b" ", start, stop)
    return found if found >= 0 else None


def find_character_start(buffer: bytes, place: int) -> int:
    """The first place at or after ``place`` where a UTF-8 character begins."""
    for at in range(place, min(place + 4, len(buffer))):
        if buffer[at] & 0xC0 != 0x80:
            return at
    # Four such bytes in a row are no UTF-8, and the end of the text ends a character too.
    return place if place + 4 <= len(buffer) else len(buffer)
