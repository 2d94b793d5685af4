"""What a template writes around the contents of conversations of one shape.

Most conversations are strings said in turn. For those the text is the contents between fixed
pieces: learned once a shape, compared whole with every text that the template really rendered.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchloom.chat.templates.markers import MarkedBlock, MarkedText
from batchloom.chat.templates.turn_positions import TurnPosition, describe_alterations

# White space around the contents of a probe; a template that strips it takes it away.
PROBE_WHITESPACE = ("\t\n ", " \n\t")

# The role of each message, and whether it says nothing.
ConversationShape = tuple[tuple[str, bool], ...]


def get_conversation_shape(messages: Sequence[dict[str, Any]]) -> ConversationShape | None:
    """The shape of plain messages, None where a message holds more than a role and a string."""
    shape = []
    for message in messages:
        content = message.get("content")
        if len(message) != 2 or type(content) is not str or type(message.get("role")) is not str:
            return None
        if content.isspace():
            return None
        shape.append((message["role"], not content))
    return tuple(shape)


def make_probe(shape: ConversationShape) -> list[dict[str, Any]]:
    """Messages of a shape whose contents can be told apart."""
    before, after = PROBE_WHITESPACE
    return [
        {"role": role, "content": "" if empty else f"{before}x{after}"} for role, empty in shape
    ]


@dataclass(frozen=True, slots=True)
class TurnSkeleton:
    """The fixed pieces of a shape, and where turns stand between them.

    A place is a pair: how many contents lie before it, and how many fixed characters.

    Attributes:
        pieces: what the template writes, one more than slots.
        slots: the message in each slot, and what the template strips of it: 0 nothing, 1 white
            space before, 2 white space after, 3 both.
        turns: places of head, body and end of each message; None for one that is left out.
        control: places of the control tokens in the pieces.
        altered: what the template does to messages of this shape, in words.
        strips: whether it strips a content.
    """

    pieces: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    turns: tuple[tuple[tuple[int, int], ...] | None, ...]
    control: tuple[tuple[int, int], ...]
    altered: tuple[str, ...]
    strips: bool

    def fit(
        self, text: str, contents: Sequence[str]
    ) -> tuple[list[TurnPosition | None], list[int], tuple[str, ...]] | None:
        """Where turns and control tokens stand in ``text``, and what was done to contents.

        None where the text is not these pieces with these contents between them.
        """
        altered = self.altered
        filled = [contents[number] for number, _ in self.slots]
        if self.strips:
            given = filled
            filled = [_STRIP_FUNCTIONS[way](contents[number]) for number, way in self.slots]
            if filled != given:
                altered = (*altered, "strips white space around contents")
        parts = [self.pieces[0]]
        before = [length := 0]
        for content, piece in zip(filled, self.pieces[1:], strict=True):
            parts += (content, piece)
            length += len(content)
            before.append(length)
        if "".join(parts) != text:
            return None
        turns = [
            None
            if places is None
            else TurnPosition(*[fixed + before[slots] for slots, fixed in places])
            for places in self.turns
        ]
        return turns, [fixed + before[slots] for slots, fixed in self.control], altered


_STRIP_FUNCTIONS = (str, str.lstrip, str.rstrip, str.strip)


def absorb_whitespace(found: MarkedText) -> tuple[MarkedText, list[int]]:
    """A rendered probe, the white space that was left counted to its contents; and what was not.

    Of each content: 1 where white space before it was stripped, 2 behind it, 3 both.
    """
    blocks, ways = [], []
    for block in found.blocks:
        start, stop, way = block.start, block.stop, 0
        if found.text[:start].endswith(PROBE_WHITESPACE[0]):
            start -= len(PROBE_WHITESPACE[0])
        else:
            way |= 1
        if found.text.startswith(PROBE_WHITESPACE[1], stop):
            stop += len(PROBE_WHITESPACE[1])
        else:
            way |= 2
        blocks.append(MarkedBlock(block.owner, start, stop, block.opened, block.closed))
        ways.append(way)
    given = [(block.start, block.stop) for block in blocks]
    return MarkedText(found.text, blocks, given, found.whole, found.lost), ways


def make_skeleton(
    found: MarkedText,
    ways: Sequence[int],
    turns: Sequence[TurnPosition | None],
    control: re.Pattern[str],
) -> TurnSkeleton:
    """The skeleton that a rendered probe shows.

    Args:
        found: the probe, each content whole (see :func:`absorb_whitespace`).
        ways: what the template stripped of each.
        turns: where its turns stand.
        control: matches control tokens.
    """
    text, blocks = found.text, found.blocks
    edges = [0, *(place for block in blocks for place in (block.start, block.stop)), len(text)]
    starts = edges[::2]
    pieces = tuple(text[edges[n] : edges[n + 1]] for n in range(0, len(edges), 2))

    stops = [block.stop for block in blocks]
    sums = list(accumulate((block.stop - block.start for block in blocks), initial=0))

    def place(at: int) -> tuple[int, int]:
        passed = bisect_right(stops, at)
        return passed, at - sums[passed]

    return TurnSkeleton(
        pieces=pieces,
        slots=tuple((block.owner, way) for block, way in zip(blocks, ways, strict=True)),
        turns=tuple(None if turn is None else tuple(map(place, turn)) for turn in turns),
        control=tuple(
            place(start + match.start())
            for start, piece in zip(starts, pieces, strict=True)
            for match in control.finditer(piece)
        ),
        altered=describe_alterations(turns),
        strips=any(ways),
    )
