"""Cut positions in a JSON list: after elements whose position is certain.

A cut is certain while every earlier element is a bracketed value, and only a comma and white space
separate elements. Up to there this scan and the reader, which restarts at every element, cannot
disagree. After the first doubt the list is not cut.
"""

import re

import numpy as np

from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import PartStart, ReadRules, Source
from batchloom.sources.formats.json_list_format import find_elements, open_list
from batchloom.sources.formats.json_text import OPENING, JsonTextWindow

_LEAD_PATTERN = re.compile(rb"[ \t\r\n]*(,?)[ \t\r\n]*")


def find_list_cut(source: Source, rules: ReadRules, known_cut: PartStart | None, nominal: int) -> PartStart | None:
    """Return the first cut at or after byte ``nominal``, or None.

    ``known_cut`` is an earlier cut to continue from; None: the source's beginning.

    Raises:
        InputError: the source cannot be read, or holds no list of objects.
    """
    with PartStream(source, known_cut.offset if known_cut else 0) as stream:
        text = JsonTextWindow(stream, known_cut)
        wrapper = known_cut.wrapper if known_cut else open_list(text, rules)
        comma = known_cut is not None
        while (
            is_at_cut := _scan_elements(text, nominal, comma=comma, max_record_bytes=rules.limits.record_bytes)
        ) is None:
            if text.at:
                comma = True
            if not text.read_more():
                return None
        if not is_at_cut:
            return None
        line, column = text.locate()
        return PartStart(text.offset + text.at, line, column, wrapper)


def _scan_elements(text: JsonTextWindow, nominal: int, *, comma: bool, max_record_bytes: int) -> bool | None:
    """Skip elements in the window; return True at a cut, None to read more.

    The result is False if no cut can follow.
    """
    data = text.data[text.at :]
    starts, ends = find_elements(data)
    certain_count = _count_certain(data, starts.tolist(), ends.tolist(), comma=comma)
    index = int(np.searchsorted(ends[:certain_count], nominal - text.offset - text.at))
    if index < certain_count:
        text.at += int(ends[index])
        return True
    if certain_count < len(ends):
        return False
    if certain_count:
        text.at += int(ends[-1])
        comma = True
    lead = _LEAD_PATTERN.match(text.data, text.at)
    begin = lead.end() if lead else text.at
    if begin == len(text.data):
        return None
    if text.data[begin] not in OPENING or lead is None or bool(lead[1]) != comma:
        return False
    if len(text.data) - begin <= max_record_bytes:
        return None
    text.at = begin
    if not text.skip_brackets():
        return False
    return True if text.offset + text.at >= nominal else None


def _count_certain(data: bytes, starts: list[int], ends: list[int], *, comma: bool) -> int:
    """Return the number of elements before the first doubt."""
    gaps = [data[stop:start] for stop, start in zip([0, *ends], starts, strict=False)]
    doubtful = {gap for gap in set(gaps) if not _is_gap(gap, comma=True)}
    if gaps and not comma and _is_gap(gaps[0], comma=False):
        return next((n for n, gap in enumerate(gaps[1:], 1) if gap in doubtful), len(gaps))
    return next((n for n, gap in enumerate(gaps) if gap in doubtful or not comma), len(gaps))


def _is_gap(gap: bytes, *, comma: bool) -> bool:
    lead = _LEAD_PATTERN.fullmatch(gap)
    return lead is not None and bool(lead[1]) == comma
