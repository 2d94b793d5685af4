"""Fixed texts that a template writes around plain contents.

They are the same for all conversations of a shape.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from batchloom.chat.templates.conversation_text import ConversationText
from batchloom.chat.templates.marks import MarkedText, MarkPoint
from batchloom.chat.templates.turn_positions import TurnPosition, describe_alterations

# White space around the contents of a probe; a template that strips contents removes it.
PROBE_WHITESPACE = ("\t\n ", " \n\t")

# A tool, and the value of each key of a message of an example.
EXAMPLE_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
_EXAMPLE_ID = "abcdefghi"
_EXAMPLE_CALL = {"type": "function", "id": _EXAMPLE_ID, "function": {"name": "f", "arguments": {}}}
_EXAMPLE_VALUES: dict[str, Any] = {"tool_calls": [_EXAMPLE_CALL], "tool_call_id": _EXAMPLE_ID, "name": "f"}

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


def make_example(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the beginning of a conversation whose last messages have these keys.

    Their values are always the same, so that what is learned does not depend on the records that were seen.
    """
    call = {"role": "assistant", "content": "", "tool_calls": [_EXAMPLE_CALL]}
    example = [
        {key: value if key == "role" else _EXAMPLE_VALUES.get(key, "x") for key, value in message.items()}
        for message in messages
    ]
    if example and example[0]["role"] == "tool":
        example.insert(0, call)
    if example and example[0]["role"] == "assistant":
        example.insert(0, {"role": "user", "content": "x"})
    return example


def make_probe(shape: ConversationShape) -> list[dict[str, Any]]:
    """Return messages of a shape with recognizable contents."""
    before, after = PROBE_WHITESPACE
    return [{"role": role, "content": "" if empty else f"{before}x{after}"} for role, empty in shape]


@dataclass(frozen=True, slots=True)
class TurnSkeleton:
    """Fixed texts of a shape, and the positions of turns among them.

    A position is a pair: the number of contents before it, and the number of fixed characters.
    """

    # Texts that the template writes, one more than slots.
    fixed_texts: tuple[str, ...]
    # Message index of each slot, and the function that strips what the template strips of a content.
    slots: tuple[tuple[int, Callable[[str], str]], ...]
    # Positions of head, body, stop and end of the written messages, one after the other.
    turns: tuple[tuple[int, int], ...]
    # Indices of omitted messages, in ascending order.
    omitted: tuple[int, ...]
    # Positions of the control tokens in the fixed texts.
    control: tuple[tuple[int, int], ...]
    # Alterations that the template makes to messages of this shape, in words.
    altered: tuple[str, ...]

    def fill(self, contents: Sequence[str]) -> ConversationText:
        """Return the fixed texts with these contents of the messages between them."""
        altered = self.altered
        slot_contents = [strip(contents[number]) for number, strip in self.slots]
        if slot_contents != [contents[number] for number, _ in self.slots]:
            altered = (*altered, "strips white space around contents")
        parts = [""] * (2 * len(slot_contents) + 1)
        parts[::2] = self.fixed_texts
        parts[1::2] = slot_contents
        lengths = [0, *accumulate(map(len, slot_contents))]
        offsets = [fixed + lengths[slots] for slots, fixed in self.turns]
        turns: list[TurnPosition | None] = [
            TurnPosition(*offsets[first : first + 4]) for first in range(0, len(offsets), 4)
        ]
        for number in self.omitted:
            turns.insert(number, None)
        control = [fixed + lengths[slots] for slots, fixed in self.control]
        return ConversationText("".join(parts), turns, "", control, None, altered)


_STRIP_FUNCTIONS = (str, str.lstrip, str.rstrip, str.strip)


def absorb_whitespace(probe: MarkedText) -> tuple[MarkedText, list[int]]:
    """Add the remaining white space of a rendered probe to its contents.

    Also returns the strip mode of each content: 1 if white space before it was stripped, 2 after it, 3 both.
    """
    strings = []
    strip_modes = []
    for string in probe.strings:
        start = string.start
        stop = string.stop
        strip_mode = 0
        if probe.text[:start].endswith(PROBE_WHITESPACE[0]):
            start -= len(PROBE_WHITESPACE[0])
        else:
            strip_mode |= 1
        if probe.text.startswith(PROBE_WHITESPACE[1], stop):
            stop += len(PROBE_WHITESPACE[1])
        else:
            strip_mode |= 2
        strings.append(string._replace(start=start, stop=stop))
        strip_modes.append(strip_mode)
    points = [
        MarkPoint(position, string.owner, n)
        for n, string in enumerate(strings)
        for position in (string.start, string.stop)
    ]
    return replace(probe, strings=strings, points=points), strip_modes


def make_skeleton(
    shape: ConversationShape,
    probe: MarkedText,
    strip_modes: Sequence[int],
    turns: Sequence[TurnPosition | None],
    control: re.Pattern[str],
) -> TurnSkeleton:
    """Build the skeleton of a shape from a probe (see :func:`absorb_whitespace`)."""
    text = probe.text
    strings = probe.strings
    edges = [0, *(edge for string in strings for edge in (string.start, string.stop)), len(text)]
    starts = edges[::2]
    fixed_texts = tuple(text[edges[n] : edges[n + 1]] for n in range(0, len(edges), 2))

    stops = [string.stop for string in strings]
    content_lengths = list(accumulate((string.stop - string.start for string in strings), initial=0))

    def make_anchor(position: int) -> tuple[int, int]:
        slot_count = bisect_right(stops, position)
        return slot_count, position - content_lengths[slot_count]

    return TurnSkeleton(
        fixed_texts=fixed_texts,
        slots=tuple((string.owner, _STRIP_FUNCTIONS[mode]) for string, mode in zip(strings, strip_modes, strict=True)),
        turns=tuple(make_anchor(position) for turn in turns if turn is not None for position in turn),
        omitted=tuple(number for number, turn in enumerate(turns) if turn is None),
        control=tuple(
            make_anchor(start + match.start())
            for start, fixed_text in zip(starts, fixed_texts, strict=True)
            for match in control.finditer(fixed_text)
        ),
        altered=describe_alterations(turns, [role for role, _ in shape], [is_empty for _, is_empty in shape]),
    )
