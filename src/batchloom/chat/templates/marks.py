"""Marks that show where a template writes strings and messages.

A mark is a character of a private-use plane that neither the conversation nor the template uses. Marks are put around
strings, and the sandbox writes them around the rounds of a loop over the messages. A template that treats the marked
conversation like the plain one gives the same text once the marks are removed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchloom.chat.templates.chat_template import (
    REASONING_KEYS,
    THOUGHT_TAGS,
    RenderError,
    find_thought_end,
)
from batchloom.chat.templates.sandbox import MarkRound

# Pair k of marks: the even character opens, the next one closes.
_PLANE_STARTS = (0xF0000, 0x100000)
MAX_MARKS = 0x7FFE
_PLANE_PATTERNS = tuple(re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]") for plane in _PLANE_STARTS)

TOOLS_OWNER = -1
# Owner of a round over an index or a copy of a message, until the strings in it show the message.
_UNKNOWN_OWNER = -2
# Values that a template branches on rather than writes.
STRUCTURAL_KEYS = frozenset(("id", "type", "tool_call_id"))
_TAG_PATTERN = re.compile(f"({'|'.join(THOUGHT_TAGS)})")
# Key of the marks around rounds.
_ROUND = ""


class MarksError(RenderError):
    """A conversation needs more marks than there are."""


class MarkPair(NamedTuple):
    """Pair of marks around a string, or around a round."""

    owner: int  # Message index; TOOLS_OWNER for the tools
    key: str = _ROUND  # Key of the message's value; empty for a round
    string: str = ""


@dataclass(slots=True)
class Marker:
    """Allocator of marks from one private-use plane."""

    plane: int
    pairs: list[MarkPair] = field(default_factory=list)

    def make_pair(self, owner: int, key: str = _ROUND, string: str = "") -> tuple[str, str]:
        """Return the next pair of marks, by default for the rounds of message ``owner``."""
        if len(self.pairs) >= MAX_MARKS:
            raise MarksError(
                f"it holds more than {MAX_MARKS:,} messages or other strings, the limit of one conversation; "
                "split it into several records"
            )
        first = _PLANE_STARTS[self.plane] + 2 * len(self.pairs)
        self.pairs.append(MarkPair(owner, key, string))
        return chr(first), chr(first + 1)

    def split(self, text: str) -> list[str]:
        """Return the texts between the marks."""
        return _PLANE_PATTERNS[self.plane].split(text)

    def make_round_function(self, messages: list[dict[str, Any]]) -> MarkRound:
        """Return the function that gives the marks of a round over the messages.

        A template may also loop over copies of them, or over indices.
        """
        pairs = {id(message): self.make_pair(number) for number, message in enumerate(messages)}

        def mark_round(item: Any) -> tuple[str, str]:
            if id(item) in pairs:
                return pairs[id(item)]
            if isinstance(item, int) or (isinstance(item, dict) and "role" in item):
                return self.make_pair(_UNKNOWN_OWNER)
            return "", ""

        return mark_round

    def mark(self, text: str, owner: int, key: str) -> str:
        """Return ``text`` marked inside its surrounding white space; blank text unchanged.

        Templates split a content at the tags of a thought, so its parts are marked like texts of their own.
        """
        thought_end = find_thought_end(text) if key == "content" else 0
        marked: list[str] = []
        position = 0
        for part in _TAG_PATTERN.split(text):
            position += len(part)
            marked.append(self._mark_part(part, owner, REASONING_KEYS[0] if position <= thought_end else key))
        return "".join(marked)

    def _mark_part(self, text: str, owner: int, key: str) -> str:
        core = text.strip()
        if not core or _TAG_PATTERN.fullmatch(core):
            return text
        begin, end = self.make_pair(owner, key, core)
        offset = text.index(core)
        return f"{text[:offset]}{begin}{core}{end}{text[offset + len(core) :]}"

    def mark_all(self, value: Any, owner: int, parent_key: str, unmarked_keys: frozenset[str] = STRUCTURAL_KEYS) -> Any:
        """Mark all strings of a value except keys and the values of some."""
        if isinstance(value, str):
            return self.mark(value, owner, parent_key)
        if isinstance(value, dict):
            return {
                key: item if key in unmarked_keys else self.mark_all(item, owner, parent_key, unmarked_keys)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.mark_all(item, owner, parent_key, unmarked_keys) for item in value]
        return value


def find_unused_plane(text: str) -> int | None:
    """Return a private-use plane without a character in ``text``, or None."""
    return next((plane for plane, pattern in enumerate(_PLANE_PATTERNS) if not pattern.search(text)), None)


class MarkingScope(NamedTuple):
    """Part of a conversation that is marked."""

    roles: tuple[str, ...] | None  # None for all, and the tools
    unmarked_keys: frozenset[str] = STRUCTURAL_KEYS  # Their values are not marked

    def includes(self, role: object) -> bool:
        return self.roles is None or role in self.roles


# From the most informative to the least intrusive. Templates read results of tools as numbers, write arguments as
# Python does, and look for tags in what a user says.
_SPEAKERS = ("system", "developer", "user", "assistant")
_UNMARKED_ARGUMENTS = STRUCTURAL_KEYS | {"arguments"}
MARKING_SCOPES = (
    MarkingScope(None),
    MarkingScope(_SPEAKERS),
    MarkingScope(_SPEAKERS, _UNMARKED_ARGUMENTS),
    MarkingScope(("assistant",)),
    MarkingScope(("assistant",), _UNMARKED_ARGUMENTS),
)
MARKED_KEYS = ("content", *REASONING_KEYS, "tool_calls")


def mark_messages(messages: list[dict[str, Any]], marker: Marker, scope: MarkingScope) -> list[dict[str, Any]]:
    """Return copies of the messages with the strings of ``scope`` marked."""
    marked_messages = []
    for number, message in enumerate(messages):
        marked_message = dict(message)
        marked_messages.append(marked_message)
        if not scope.includes(message.get("role")):
            continue
        marked_reasoning: dict[str, Any] = {}
        for key in MARKED_KEYS:
            if key not in message:
                continue
            # The same reasoning under several names is one string.
            reasoning = str(message[key])
            if key in REASONING_KEYS and reasoning in marked_reasoning:
                marked_message[key] = marked_reasoning[reasoning]
                continue
            marked_message[key] = marker.mark_all(message[key], number, key, scope.unmarked_keys)
            if key in REASONING_KEYS:
                marked_reasoning[reasoning] = marked_message[key]
    return marked_messages


class MarkedSpan(NamedTuple):
    """Text between a pair of marks, in characters."""

    start: int
    stop: int
    owner: int  # Index of the message
    key: str  # Key of the message's value; empty for a round


class MarkPoint(NamedTuple):
    """A mark of a string in a rendered text."""

    position: int  # Offset of the character after it
    owner: int  # Index of the message
    pair: int  # Number of the pair of marks, one for each string


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text rendered from a marked conversation, without the marks.

    Attributes:
        plane: private-use plane of the marks.
        text: the text.
        strings: complete strings, in order.
        rounds: round in which the template writes each message, of its loops over the messages.
        repeated: messages that it writes in several rounds.
        points: every mark of a string, in order. A template may write a part of a string, with one mark.
        missing_strings: (owner, key) of strings whose marks are both missing.
        changed_strings: likewise of those that are written in part, or with other characters.
    """

    plane: int
    text: str
    strings: list[MarkedSpan]
    rounds: dict[int, MarkedSpan]
    repeated: set[int]
    points: list[MarkPoint]
    missing_strings: set[tuple[int, str]]
    changed_strings: set[tuple[int, str]]

    def iter_gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the texts around strings: the template's own."""
        start = 0
        for string in self.strings:
            yield start, string.start
            start = string.stop
        yield start, len(self.text)


def extract_marks(text: str, marker: Marker) -> MarkedText:
    """Remove the marks of ``marker`` from ``text`` and return their positions."""
    chunks: list[str] = []
    marks: list[tuple[int, int]] = []
    length = last = 0
    for match in _PLANE_PATTERNS[marker.plane].finditer(text):
        chunks.append(text[last : match.start()])
        length += match.start() - last
        last = match.end()
        mark = ord(match.group()) - _PLANE_STARTS[marker.plane]
        if mark >> 1 < len(marker.pairs):
            marks.append((mark, length))
    plain = "".join([*chunks, text[last:]])
    string_marks = [(mark, position) for mark, position in marks if marker.pairs[mark >> 1].key != _ROUND]
    strings = []
    changed = set()
    index = 0
    while index < len(string_marks):
        mark, start = string_marks[index]
        next_mark, stop = string_marks[index + 1] if index + 1 < len(string_marks) else (-1, 0)
        owner, key, string = marker.pairs[mark >> 1]
        is_paired = mark % 2 == 0 and next_mark == mark + 1
        if is_paired:
            strings.append(MarkedSpan(start, stop, owner, key))
        # Templates write a string as it is, or as JSON.
        if not (is_paired and plain[start:stop] in (string, json.dumps(string, ensure_ascii=False)[1:-1])):
            changed.add((owner, key))
        index += 1 + is_paired
    present = {mark >> 1 for mark, _ in string_marks}
    missing = {
        (pair.owner, pair.key)
        for number, pair in enumerate(marker.pairs)
        if pair.key != _ROUND and number not in present
    }
    points = [MarkPoint(position, marker.pairs[mark >> 1].owner, mark >> 1) for mark, position in string_marks]
    rounds, repeated = _choose_rounds(_find_rounds(marks, marker))
    return MarkedText(marker.plane, plain, strings, rounds, repeated, points, missing, changed)


def _find_rounds(marks: list[tuple[int, int]], marker: Marker) -> list[MarkedSpan]:
    """Return the rounds that have text; none if their marks are not nested.

    The owner of a round over an index or a copy is the only message that has strings in it.
    """
    rounds: list[MarkedSpan] = []
    anonymous_rounds: list[MarkedSpan] = []
    open_rounds: list[tuple[int, int, int]] = []
    string_owners: list[int] = []
    for mark, position in marks:
        owner, key, _ = marker.pairs[mark >> 1]
        if key != _ROUND:
            string_owners.append(owner)
        elif mark % 2 == 0:
            open_rounds.append((mark, position, len(string_owners)))
        elif open_rounds and open_rounds[-1][0] == mark - 1:
            _, start, first = open_rounds.pop()
            owners_inside = set(string_owners[first:])
            if start == position:
                continue
            if owner != _UNKNOWN_OWNER:
                rounds.append(MarkedSpan(start, position, owner, _ROUND))
            elif len(owners_inside) == 1:
                anonymous_rounds.append(MarkedSpan(start, position, owners_inside.pop(), _ROUND))
        else:
            return []
    owners = {span.owner for span in rounds}
    return [] if open_rounds else rounds + [span for span in anonymous_rounds if span.owner not in owners]


def _choose_rounds(spans: list[MarkedSpan]) -> tuple[dict[int, MarkedSpan], set[int]]:
    """Return the round of each message, and the messages with several."""
    rounds: dict[int, MarkedSpan] = {}
    nested: list[MarkedSpan] = []
    repeated: set[int] = set()
    outer_stop = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if span.start < outer_stop:
            nested.append(span)
            continue
        outer_stop = span.stop
        if rounds.setdefault(span.owner, span) is not span:
            repeated.add(span.owner)
    # A message may be written in the round of another one alone.
    for span in nested:
        rounds.setdefault(span.owner, span)
    return rounds, repeated


def contains_match(value: Any, pattern: re.Pattern[str]) -> bool:
    """Return whether any string in ``value``, keys included, holds a match."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, (list, tuple)):
        return any(contains_match(item, pattern) for item in value)
    return isinstance(value, Mapping) and any(
        contains_match(key, pattern) or contains_match(item, pattern) for key, item in value.items()
    )
