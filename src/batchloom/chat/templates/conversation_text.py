"""Conversations as text, with the positions of turns, control tokens and media."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from batchloom.chat.templates.marks import MarkedSpan
from batchloom.chat.templates.media_placeholders import PlaceholderSpan
from batchloom.chat.templates.turn_positions import TurnPosition

CharacterSpan = tuple[int, int]


class ConversationText(NamedTuple):
    """A conversation as text. All positions are character offsets.

    Attributes:
        text: text that the template wrote.
        turns: position of each message; None for a message that the template omits, and an empty
            list if turns cannot be located.
        problem: reason why turns cannot be located, else empty.
        control: offsets of the control tokens that the template wrote; contents spelled any
            others.
        generation: (start, stop) of each ``{% generation %}`` block; None if the template has none.
        altered: changes that the template made to contents, in words, else empty.
        media_spans: placeholder of each medium, in order.
        strings: strings of the messages as the template wrote them, in order; empty for plain conversations.
        thoughts: (start, stop) of the reasoning that is not trained.
    """

    text: str
    turns: list[TurnPosition | None]
    problem: str
    control: list[int]
    generation: tuple[tuple[int, int], ...] | None
    altered: tuple[str, ...] = ()
    media_spans: tuple[PlaceholderSpan, ...] = ()
    strings: Sequence[MarkedSpan] = ()
    thoughts: tuple[CharacterSpan, ...] = ()


def expand_placeholders(
    rendered: ConversationText, expansions: Sequence[str], control: re.Pattern[str]
) -> tuple[ConversationText, list[tuple[int, int]]]:
    """Replace each placeholder by its expansion, and shift all positions.

    Args:
        rendered: the conversation with placeholders.
        expansions: expansion of each placeholder.
        control: pattern of the control tokens.

    Returns:
        The conversation with expansions, and the (start, stop) of each of them.
    """
    text = rendered.text
    spans = rendered.media_spans
    stops = [span.stop for span in spans]
    growths = [len(new) - (span.stop - span.start) for span, new in zip(spans, expansions, strict=True)]
    shifts = list(accumulate(growths, initial=0))

    def shift(position: int) -> int:
        # A position inside a placeholder moves to its start.
        passed = bisect_right(stops, position)
        if passed < len(spans) and spans[passed].start < position:
            position = spans[passed].start
        return position + shifts[passed]

    parts: list[str] = []
    ranges = []
    cursor = 0
    offsets = [shift(at) for at in rendered.control if not any(span.start <= at < span.stop for span in spans)]
    for span, expansion in zip(spans, expansions, strict=True):
        parts += (text[cursor : span.start], expansion)
        start = shift(span.start)
        ranges.append((start, start + len(expansion)))
        offsets += [start + match.start() for match in control.finditer(expansion)]
        cursor = span.stop
    generation = rendered.generation
    expanded = rendered._replace(
        text="".join([*parts, text[cursor:]]),
        turns=[None if turn is None else TurnPosition(*map(shift, turn)) for turn in rendered.turns],
        control=sorted(offsets),
        generation=None if generation is None else tuple((shift(start), shift(stop)) for start, stop in generation),
        thoughts=tuple((shift(start), shift(stop)) for start, stop in rendered.thoughts),
        strings=[span._replace(start=shift(span.start), stop=shift(span.stop)) for span in rendered.strings],
    )
    return expanded, ranges
