"""Marks around the strings of a conversation, and their positions after rendering.

A mark is a character of a private-use plane that neither the conversation nor the template uses.
A template that treats the marked conversation like the plain one gives the same text once the marks
are removed, and the marks give the position of each string.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Marks of string k: the even character opens, the next one closes.
_PLANE_STARTS = (0xF0000, 0x100000)
MAX_MARKED_STRINGS = 0x7FFE
_PLANE_PATTERNS = tuple(re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]") for plane in _PLANE_STARTS)

TOOLS_OWNER = -1
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Values that a template branches on rather than writes.
STRUCTURAL_KEYS = frozenset(("id", "type", "tool_call_id"))


@dataclass(slots=True)
class Marker:
    """Allocator of marks from one private-use plane."""

    plane: int
    # Message index (TOOLS_OWNER for the tools), key and text of each marked string.
    owners: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    # Whether marks ran out.
    full: bool = False

    def mark(self, text: str, owner: int, key: str) -> str:
        """Return ``text`` marked inside its surrounding white space; blank text unchanged."""
        core = text.strip()
        if not core:
            return text
        if len(self.owners) >= MAX_MARKED_STRINGS:
            self.full = True
            return text
        offset, first = text.index(core), _PLANE_STARTS[self.plane] + 2 * len(self.owners)
        self.owners.append(owner)
        self.keys.append(key)
        self.strings.append(core)
        return f"{text[:offset]}{chr(first)}{core}{chr(first + 1)}{text[offset + len(core) :]}"

    def mark_all(self, value: Any, owner: int, parent_key: str) -> Any:
        """Mark all strings of a value except keys and structural values."""
        if isinstance(value, str):
            return self.mark(value, owner, parent_key)
        if isinstance(value, dict):
            return {
                key: item if key in STRUCTURAL_KEYS else self.mark_all(item, owner, parent_key)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.mark_all(item, owner, parent_key) for item in value]
        return value


def find_unused_plane(text: str) -> int | None:
    """Return a private-use plane of which ``text`` has no character, or None."""
    return next((plane for plane, pattern in enumerate(_PLANE_PATTERNS) if not pattern.search(text)), None)


class MarkingScope(NamedTuple):
    """Part of a conversation that is marked."""

    # Role whose messages are marked; None for all roles and the tools.
    role: str | None
    keys: tuple[str, ...]


# From the most informative to the least intrusive.
MARKING_SCOPES = (
    MarkingScope(None, ("content", *REASONING_KEYS, "tool_calls")),
    MarkingScope("assistant", ("content", *REASONING_KEYS, "tool_calls")),
    MarkingScope("assistant", ("content",)),
)


def mark_messages(messages: list[dict[str, Any]], marker: Marker, scope: MarkingScope) -> list[dict[str, Any]]:
    """Return the messages with the strings of ``scope`` marked."""
    marked_messages = []
    for number, message in enumerate(messages):
        if scope.role not in (None, message.get("role")):
            marked_messages.append(message)
            continue
        marked_message = dict(message)
        marked_reasoning: dict[str, Any] = {}
        for key in filter(message.__contains__, scope.keys):
            # The same reasoning under several names is one string.
            reasoning = str(message[key])
            if key in REASONING_KEYS and reasoning in marked_reasoning:
                marked_message[key] = marked_reasoning[reasoning]
                continue
            marked_message[key] = marker.mark_all(message[key], number, key)
            if key in REASONING_KEYS:
                marked_reasoning[reasoning] = marked_message[key]
        marked_messages.append(marked_message)
    return marked_messages


@dataclass(frozen=True, slots=True)
class MarkedBlock:
    """Consecutive marks of one message in a rendered text, in characters."""

    # Index of the message.
    owner: int
    start: int
    stop: int
    # Whether the first mark opens a string, and the last one closes one.
    opened: bool
    closed: bool


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text rendered from marked messages, without the marks."""

    text: str
    # Blocks of the messages, in order of the text.
    blocks: list[MarkedBlock]
    # (start, stop) of every complete string, in order.
    string_spans: list[tuple[int, int]]
    # Whether every mark is paired and encloses its string, unchanged or as JSON.
    intact: bool
    # (owner, key) of strings whose marks are both missing.
    missing_strings: set[tuple[int, str]]


def extract_marks(text: str, marker: Marker) -> MarkedText:
    """Remove the marks of ``marker`` from ``text`` and return their positions."""
    chunks: list[str] = []
    mark_positions: list[tuple[int, int]] = []
    length = last = 0
    for match in _PLANE_PATTERNS[marker.plane].finditer(text):
        chunks.append(text[last : match.start()])
        length += match.start() - last
        mark_positions.append((ord(match.group()) - _PLANE_STARTS[marker.plane], length))
        last = match.end()
    chunks.append(text[last:])
    plain = "".join(chunks)
    issued_marks = [(mark, position) for mark, position in mark_positions if mark >> 1 < len(marker.owners)]
    present_strings = {mark >> 1 for mark, _ in issued_marks}
    missing_strings = {(owner, marker.keys[k]) for k, owner in enumerate(marker.owners) if k not in present_strings}
    string_spans, intact = [], len(issued_marks) == len(mark_positions)
    index = 0
    while index < len(issued_marks):
        mark, start = issued_marks[index]
        next_mark = issued_marks[index + 1] if index + 1 < len(issued_marks) else (-1, 0)
        if mark % 2 == 0 and next_mark[0] == mark + 1:
            string_spans.append((start, next_mark[1]))
            intact &= _contains_string(plain[start : next_mark[1]], marker.strings[mark >> 1])
            index += 2
        else:
            intact = False
            index += 1
    return MarkedText(plain, _group_marks(issued_marks, marker.owners), string_spans, intact, missing_strings)


def _contains_string(text: str, string: str) -> bool:
    """Return whether a template wrote a string unchanged, or as ``tojson`` escapes it."""
    return text == string or text == json.dumps(string, ensure_ascii=False)[1:-1]


def _group_marks(issued_marks: list[tuple[int, int]], owners: list[int]) -> list[MarkedBlock]:
    blocks: list[MarkedBlock] = []
    for mark, position in issued_marks:
        owner, opens = owners[mark >> 1], mark % 2 == 0
        if blocks and blocks[-1].owner == owner:
            previous = blocks[-1]
            blocks[-1] = MarkedBlock(owner, previous.start, position, previous.opened, not opens)
        else:
            blocks.append(MarkedBlock(owner, position, position, opens, not opens))
    return blocks


def contains_match(value: Any, pattern: re.Pattern[str]) -> bool:
    """Return whether any string in ``value``, keys included, holds a match."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(contains_match(key, pattern) or contains_match(item, pattern) for key, item in value.items())
    return isinstance(value, (list, tuple)) and any(contains_match(item, pattern) for item in value)
