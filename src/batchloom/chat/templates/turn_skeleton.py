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
    return [{"role": role, "content": "" if empty else f"{before}x{after}"} for role, empty in shape]


@dataclass(frozen=True, slots=True)
class TurnSkeleton:
    """The fixed pieces of a shape, and where turns stand between them.

    A place is a pair: how many contents lie before it, and how many fixed characters.

    Attributes:
        fixed_texts: what the template writes, one more than slots.
        slots: the message in each slot, and what the template strips of it: 0 nothing, 1 white
            space before, 2 white space after, 3 both.
        turns: places of head, body and end of each message; None for one that is left out.
        control: places of the control tokens in the pieces.
        altered: what the template does to messages of this shape, in words.
        strips: whether it strips a content.
    """

    fixed_texts: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    turns: tuple[tuple[tuple[int, int], ...] | None, ...]
    control: tuple[tuple[int, int], ...]
    altered: tuple[str, ...]
    strips: bool

    def match(
        self, text: str, contents: Sequence[str]
    ) -> tuple[list[TurnPosition | None], list[int], tuple[str, ...]] | None:
        """Where turns and control tokens stand in ``text``, and what was done to contents.

        None where the text is not these pieces with these contents between them.
        """
        altered = self.altered
        slot_contents = [contents[number] for number, _ in self.slots]
        if self.strips:
            original_contents = slot_contents
            slot_contents = [_STRIP_FUNCTIONS[strip_mode](contents[number]) for number, strip_mode in self.slots]
            if slot_contents != original_contents:
                altered = (*altered, "strips white space around contents")
        parts = [self.fixed_texts[0]]
        content_offsets = [length := 0]
        for content, fixed_text in zip(slot_contents, self.fixed_texts[1:], strict=True):
            parts += (content, fixed_text)
            length += len(content)
            content_offsets.append(length)
        if "".join(parts) != text:
            return None
        turns = [
            None if anchors is None else TurnPosition(*[fixed + content_offsets[slots] for slots, fixed in anchors])
            for anchors in self.turns
        ]
        return turns, [fixed + content_offsets[slots] for slots, fixed in self.control], altered


_STRIP_FUNCTIONS = (str, str.lstrip, str.rstrip, str.strip)


def absorb_whitespace(marked_probe: MarkedText) -> tuple[MarkedText, list[int]]:
    """A rendered probe, the white space that was left counted to its contents; and what was not.

    Of each content: 1 where white space before it was stripped, 2 behind it, 3 both.
    """
    blocks, strip_modes = [], []
    for block in marked_probe.blocks:
        start, stop, strip_mode = block.start, block.stop, 0
        if marked_probe.text[:start].endswith(PROBE_WHITESPACE[0]):
            start -= len(PROBE_WHITESPACE[0])
        else:
            strip_mode |= 1
        if marked_probe.text.startswith(PROBE_WHITESPACE[1], stop):
            stop += len(PROBE_WHITESPACE[1])
        else:
            strip_mode |= 2
        blocks.append(MarkedBlock(block.owner, start, stop, block.opened, block.closed))
        strip_modes.append(strip_mode)
    string_spans = [(block.start, block.stop) for block in blocks]
    return MarkedText(
        marked_probe.text, blocks, string_spans, marked_probe.intact, marked_probe.missing_strings
    ), strip_modes


def make_skeleton(
    marked_probe: MarkedText,
    strip_modes: Sequence[int],
    turns: Sequence[TurnPosition | None],
    control: re.Pattern[str],
) -> TurnSkeleton:
    """The skeleton that a rendered probe shows.

    Args:
        marked_probe: the probe, each content whole (see :func:`absorb_whitespace`).
        strip_modes: what the template stripped of each.
        turns: where its turns stand.
        control: matches control tokens.
    """
    text, blocks = marked_probe.text, marked_probe.blocks
    edges = [0, *(edge for block in blocks for edge in (block.start, block.stop)), len(text)]
    starts = edges[::2]
    fixed_texts = tuple(text[edges[n] : edges[n + 1]] for n in range(0, len(edges), 2))

    stops = [block.stop for block in blocks]
    content_lengths = list(accumulate((block.stop - block.start for block in blocks), initial=0))

    def make_anchor(position: int) -> tuple[int, int]:
        slot_count = bisect_right(stops, position)
        return slot_count, position - content_lengths[slot_count]

    return TurnSkeleton(
        fixed_texts=fixed_texts,
        slots=tuple((block.owner, strip_mode) for block, strip_mode in zip(blocks, strip_modes, strict=True)),
        turns=tuple(None if turn is None else tuple(map(make_anchor, turn)) for turn in turns),
        control=tuple(
            make_anchor(start + match.start())
            for start, fixed_text in zip(starts, fixed_texts, strict=True)
            for match in control.finditer(fixed_text)
        ),
        altered=describe_alterations(turns),
        strips=any(strip_modes),
    )
