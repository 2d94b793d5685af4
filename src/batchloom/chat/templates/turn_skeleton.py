"""Fixed text that a template writes around the contents of a conversation shape.

Most conversations are plain strings in turn. Their text is the contents between fixed
texts, which are learned once per shape and compared with every complete rendered text.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchloom.chat.templates.markers import MarkedBlock, MarkedText
from batchloom.chat.templates.turn_positions import TurnPosition, describe_alterations

# White space around the contents of a probe; a template that strips contents removes it.
PROBE_WHITESPACE = ("\t\n ", " \n\t")

# The role of each message, and whether its content is empty.
ConversationShape = tuple[tuple[str, bool], ...]


def get_conversation_shape(messages: Sequence[dict[str, Any]]) -> ConversationShape | None:
    """Return the shape of plain messages; None if any has more than role and string."""
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
    """Return messages of a shape with recognizable contents."""
    before, after = PROBE_WHITESPACE
    return [{"role": role, "content": "" if empty else f"{before}x{after}"} for role, empty in shape]


@dataclass(frozen=True, slots=True)
class TurnSkeleton:
    """Fixed texts of a shape, and the positions of turns among them.

    A position is a pair: the number of contents before it, and the number of fixed characters.

    Attributes:
        fixed_texts: texts that the template writes, one more than slots.
        slots: message index of each slot, and what the template strips: 0 nothing, 1 white
            space before, 2 white space after, 3 both.
        turns: positions of head, body and end of each message; None for omitted messages.
        control: positions of the control tokens in the fixed texts.
        altered: alterations that the template makes to messages of this shape, in words.
        strips: whether it strips any content.
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
        """Return the turns, control token offsets and alterations of ``text``.

        Returns None if the text is not the fixed texts with these contents between them.
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
    """Add the remaining white space of a rendered probe to its contents.

    Also returns the strip mode of each content: 1 if white space before it was stripped, 2 after it, 3 both.
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
    """Build the skeleton from a rendered probe (see :func:`absorb_whitespace`)."""
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
