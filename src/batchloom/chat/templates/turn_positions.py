"""Positions of strings, turns and media in a rendered conversation.

A mark is a character of a private-use plane that neither the conversation nor the template uses.
A template that treats the marked conversation like the plain one gives the same text once the marks
are removed, and the marks give the position of each string.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from batchloom.chat.templates.chat_template import REASONING_KEYS, ChatTemplate, RenderError
from batchloom.core.medium import MediumKind
from batchloom.core.wording import format_count

# Marks of string k: the even character opens, the next one closes.
_PLANE_STARTS = (0xF0000, 0x100000)
MAX_MARKED_STRINGS = 0x7FFE
_PLANE_PATTERNS = tuple(re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]") for plane in _PLANE_STARTS)
# Candidates for the mark of a medium in a content that a template accepts only as a string.
_MEDIUM_MARK_CODES = range(0xE000, 0xE800)

TOOLS_OWNER = -1
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

    def mark(self, text: str, owner: int, key: str) -> str:
        """Return ``text`` marked inside its surrounding white space; blank text unchanged."""
        core = text.strip()
        if not core:
            return text
        if len(self.owners) >= MAX_MARKED_STRINGS:
            raise RenderError(
                f"it holds more than {MAX_MARKED_STRINGS:,} messages or other strings, the limit of one conversation; "
                "split it into several records"
            )
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
    """Return a private-use plane without a character in ``text``, or None."""
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
        for key in scope.keys:
            if key not in message:
                continue
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
    # (start, stop) of every complete string, in order, and the message and key of each.
    string_spans: list[tuple[int, int]]
    string_owners: list[tuple[int, str]]
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
    string_spans, string_owners = [], []
    intact = len(issued_marks) == len(mark_positions)
    index = 0
    while index < len(issued_marks):
        mark, start = issued_marks[index]
        next_mark = issued_marks[index + 1] if index + 1 < len(issued_marks) else (-1, 0)
        if mark % 2 == 0 and next_mark[0] == mark + 1:
            string_spans.append((start, next_mark[1]))
            string_owners.append((marker.owners[mark >> 1], marker.keys[mark >> 1]))
            intact &= _contains_string(plain[start : next_mark[1]], marker.strings[mark >> 1])
            index += 2
        else:
            intact = False
            index += 1
    blocks = _group_marks(issued_marks, marker.owners)
    return MarkedText(plain, blocks, string_spans, string_owners, intact, missing_strings)


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


ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Text that a template writes around turns, learned from a probe."""

    # Patterns of the tokenizer's control tokens, and of all its added tokens.
    control: re.Pattern[str]
    added_pattern: re.Pattern[str]
    # Generation prompt; empty if it is unknown.
    prompt: str = ""
    # Text that template arguments add to the generation prompt, such as an empty thought.
    prefill: str = ""
    # Text after the last assistant's content, up to its first control token and those adjacent to it; empty if there
    # is none, None if it is unknown.
    stop: str | None = None
    # Added tokens that begin a header, and control tokens that end a turn.
    openers: frozenset[str] = frozenset()
    enders: frozenset[str] = frozenset()


def make_control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of ``tokens``, preferring the longest."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def detect_grammar(
    prompt: str, prefill: str, marked_probe: MarkedText, control: re.Pattern[str], added_pattern: re.Pattern[str]
) -> TurnGrammar:
    """Detect the grammar from a probe of alternating user and assistant turns.

    The contents of ``marked_probe`` are complete and marked; the last is an assistant's.
    """
    text, blocks = marked_probe.text, marked_probe.blocks
    last = max((block.owner for block in blocks), default=0)
    if not marked_probe.intact or not blocks or blocks[-1].owner != last:
        return TurnGrammar(control, added_pattern, prompt, prefill)
    stop = _find_stop_text(text, blocks[-1].stop, control)
    edges = [0, *(block.stop for block in blocks[:-1])]
    segments = [(edge, block.start) for edge, block in zip(edges, blocks, strict=True)]
    enders = {token.group() for token in control.finditer(stop)}
    for edge, start in segments[1:]:
        header_start = text.rfind(prompt, edge, start) if prompt else -1
        if header_start >= 0:  # Control tokens before an assistant's header end the previous turn.
            enders |= {token.group() for token in control.finditer(text, edge, header_start)}
    openers = set()
    for edge, start in segments:
        tokens = (token.group() for token in added_pattern.finditer(text, edge, start))
        openers |= set([token for token in tokens if token not in enders][:1])
    first = added_pattern.match(prompt)
    if first is not None:
        openers.add(first.group())
    return TurnGrammar(control, added_pattern, prompt, prefill, stop, frozenset(openers - enders), frozenset(enders))


def _find_stop_text(text: str, position: int, control: re.Pattern[str]) -> str:
    """Return the text after the last content, up to its first run of control tokens."""
    match = control.search(text, position)
    end = position
    while match is not None:
        end = match.end()
        match = control.match(text, end)
    return text[position:end]


class TurnPosition(NamedTuple):
    """Character offsets of a turn."""

    # Start of the header that the template writes before the turn.
    head: int
    # First character that the model writes, or that was given.
    body: int
    # Start and end of the stop token; both are the end of the content if there is none.
    stop: int
    end: int


class TurnPositionError(Exception):
    """The turns of a conversation cannot be located; the message says why."""


def locate_turns(marked_text: MarkedText, roles: Sequence[str], grammar: TurnGrammar) -> list[TurnPosition | None]:
    """Return the position of each message; None if the template writes no text of it."""
    text, blocks = marked_text.text, marked_text.blocks
    turn_spans: dict[int, tuple[int, int, int]] = {}
    for n, block in enumerate(blocks):
        number = block.owner
        if number < 0:
            continue
        low = blocks[n - 1].stop if n else 0
        high = blocks[n + 1].start if n + 1 < len(blocks) else len(text)
        if roles[number] == ASSISTANT:
            if number in turn_spans:
                raise TurnPositionError(f"the template writes turn {number + 1} in several places")
            if not block.closed:
                raise TurnPositionError(f"the template cuts off the end of turn {number + 1}")
            body = _find_body_start(text, low, block, grammar, number)
            last = _find_last_content(marked_text, block, grammar)
            turn_spans[number] = body, *_find_turn_end(text, last, high, grammar, number)
        else:
            stop = _find_stop(text, block.stop, high, grammar)
            turn_spans.setdefault(number, (block.start, *(stop or (block.stop, block.stop))))
    return _add_turn_heads(text, turn_spans, len(roles), grammar)


def _find_last_content(marked_text: MarkedText, block: MarkedBlock, grammar: TurnGrammar) -> int:
    """Return the end of an assistant's content.

    The header of a later turn may repeat part of it, such as the name of the called tool.
    """
    first = bisect_left(marked_text.string_spans, (block.start, 0))
    behind = bisect_left(marked_text.string_spans, block.stop, key=lambda some: some[0])
    inside = [some for some in marked_text.string_spans[first : behind + 1] if some[1] <= block.stop]
    edges = [block.start, *(edge for some in inside for edge in some), block.stop]
    for n in range(0, len(edges), 2):
        for token in grammar.added_pattern.finditer(marked_text.text, edges[n], edges[n + 1]):
            opens = token.group() in grammar.openers
            if opens and not (grammar.prompt and marked_text.text.startswith(grammar.prompt, token.start())):
                return edges[n]
    return block.stop


def _find_body_start(text: str, low: int, block: MarkedBlock, grammar: TurnGrammar, number: int) -> int:
    """Return the start of an assistant's turn, after the generation prompt."""
    prompt = grammar.prompt
    if not block.opened:
        if not prompt or text.count(prompt, low, block.stop) != 1:
            raise TurnPositionError(f"the template changes the beginning of turn {number + 1}")
        return _skip_prefill(text, text.index(prompt, low) + len(prompt), block.stop, grammar)
    if not prompt:
        return block.start
    prompt_start = text.rfind(prompt, low, block.start)
    if prompt_start < 0:
        return block.start
    prompt_end = _skip_prefill(text, prompt_start + len(prompt), block.start, grammar)
    if any(token in text[prompt_end : block.start] for token in grammar.openers):
        raise TurnPositionError(f"the header of turn {number + 1} differs from the template's generation prompt")
    return prompt_end


def _skip_prefill(text: str, start: int, limit: int, grammar: TurnGrammar) -> int:
    """Return the end of the generation prompt that begins an answer at ``start``."""
    stop = start + len(grammar.prefill)
    return stop if stop <= limit and text.startswith(grammar.prefill, start) else start


def _find_stop(text: str, start: int, high: int, grammar: TurnGrammar) -> tuple[int, int] | None:
    """Return (start, end) of the first stop token from ``start`` on; None without one."""
    stop = grammar.stop
    if stop == "":
        return start, start
    if stop and text.startswith(stop, start):
        return start, start + len(stop)
    first = None
    for match in grammar.added_pattern.finditer(text, start, high):
        token = match.group()
        if token in grammar.openers:
            break
        if token in grammar.enders:
            return match.span()
        if first is None and grammar.control.fullmatch(token):
            first = match.span()
    return first


def _find_turn_end(text: str, start: int, high: int, grammar: TurnGrammar, number: int) -> tuple[int, int]:
    stop = _find_stop(text, start, high, grammar)
    if stop is None:
        if grammar.stop is None:
            return start, start
        raise TurnPositionError(f"the template writes no stop token after turn {number + 1}")
    return stop


def _add_turn_heads(
    text: str, turn_spans: dict[int, tuple[int, int, int]], count: int, grammar: TurnGrammar
) -> list[TurnPosition | None]:
    turns: list[TurnPosition | None] = [None] * count
    previous_end = 0
    for number, (body, stop, end) in sorted(turn_spans.items(), key=lambda item: item[1]):
        match = grammar.control.search(text, previous_end, body) if previous_end else None
        head = match.start() if match else min(previous_end, body)
        turns[number] = TurnPosition(head, body, stop, end)
        previous_end = max(previous_end, end)
    return turns


def describe_alterations(turns: Sequence[TurnPosition | None]) -> tuple[str, ...]:
    """Describe whether a template omitted or reordered messages."""
    altered: tuple[str, ...] = ("leaves out messages",) if None in turns else ()
    positions = [turn for turn in turns if turn is not None]
    if positions != sorted(positions):
        altered += ("writes messages in another order",)
    return altered


class PlaceholderFormat(NamedTuple):
    """Text form of media of one kind.

    Attributes:
        placeholder: control token that templates write for a medium.
        fallback_text: text for a medium under a template without media support, including the placeholder.
    """

    placeholder: str
    fallback_text: str


PlaceholderFormats = Mapping[MediumKind, PlaceholderFormat]


@dataclass(frozen=True, slots=True)
class MediaStyle:
    """Form in which a template accepts media."""

    # Kinds whose parts become placeholders; others are put into contents as strings.
    typed: frozenset[MediumKind] = frozenset()
    # Whether contents must be lists of parts, never strings.
    listed: bool = False


class PlaceholderSpan(NamedTuple):
    """Text written for a medium, in characters.

    Attributes:
        start: offset of its first character.
        stop: offset after its last character.
        kind: kind of the medium.
        typed: whether the template wrote a placeholder; otherwise it is the mark from a content.
    """

    start: int
    stop: int
    kind: MediumKind
    typed: bool


def detect_media_style(template: ChatTemplate, placeholder_formats: PlaceholderFormats) -> MediaStyle:
    """Detect how a template accepts media, by rendering probes."""
    listed = _render_answer(template, "y") != _render_answer(template, [{"type": "text", "text": "y"}])
    listed = listed and "y" not in _render_answer(template, "y")
    answer: Any = [{"type": "text", "text": "y"}] if listed else "y"
    typed = set()
    for kind, placeholder_format in placeholder_formats.items():
        user_content = [{"type": kind}, {"type": "text", "text": "x"}]
        output = _try_render(template, user_content, answer)
        if output.count(placeholder_format.placeholder) == 1 and "x" in output and "y" in output:
            typed.add(kind)
    return MediaStyle(frozenset(typed), listed)


def _render_answer(template: ChatTemplate, answer: Any) -> str:
    """Return the output for an answer; "" if an empty answer renders the same."""
    user_content: Any = "x" if isinstance(answer, str) else [{"type": "text", "text": "x"}]
    output = _try_render(template, user_content, answer)
    return output if output != _try_render(template, user_content, "") else ""


def _try_render(template: ChatTemplate, user_content: Any, answer: Any) -> str:
    messages = [{"role": "user", "content": user_content}, {"role": "assistant", "content": answer}]
    try:
        return template.render(messages).text
    except RenderError:
        return ""


def convert_media_messages(messages: list[dict[str, Any]], media_style: MediaStyle) -> tuple[list[dict[str, Any]], str]:
    """Convert messages to a template's media style; also return the mark of a medium.

    Raises:
        RenderError: the messages use every candidate mark.
    """
    mark = _choose_unused_mark(messages)
    return [_convert_media_message(message, media_style, mark) for message in messages], mark


def _convert_media_message(message: dict[str, Any], media_style: MediaStyle, mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        if media_style.listed:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message
    if not isinstance(content, list) or all(
        part.get("type") == "text" or part.get("type") in media_style.typed for part in content
    ):
        return message
    texts = [
        part if part.get("type") in media_style.typed else {"type": "text", "text": part.get("text", mark)}
        for part in content
    ]
    if all(part["type"] == "text" for part in texts) and not media_style.listed:
        return {**message, "content": "".join(part["text"] for part in texts)}
    return {**message, "content": texts}


def _choose_unused_mark(messages: list[dict[str, Any]]) -> str:
    for mark in map(chr, _MEDIUM_MARK_CODES):
        if not contains_match(messages, re.compile(mark)):
            return mark
    raise RenderError("it uses every private-use character that could mark a medium")


def find_placeholder_spans(
    text: str,
    control: Sequence[int],
    kinds: Sequence[MediumKind],
    mark: str,
    placeholder_formats: PlaceholderFormats,
    media_style: MediaStyle,
) -> list[PlaceholderSpan]:
    """Locate the text that a template wrote for each medium.

    ``control`` holds the offsets of control tokens; ``mark`` replaces media in strings.

    Raises:
        RenderError: the template omitted, repeated or reordered media.
    """
    spans = [
        PlaceholderSpan(position, position + len(placeholder_formats[kind].placeholder), kind, typed=True)
        for position in control
        for kind in media_style.typed
        if text.startswith(placeholder_formats[kind].placeholder, position)
    ]
    strings = [kind for kind in kinds if kind not in media_style.typed]
    marks = [match.start() for match in re.finditer(re.escape(mark), text)] if strings else []
    if len(marks) != len(strings):
        raise RenderError(_describe_wrong_count(strings, len(marks)))
    spans += [
        PlaceholderSpan(position, position + len(mark), kind, typed=False)
        for position, kind in zip(marks, strings, strict=True)
    ]
    spans.sort()
    if [span.kind for span in spans] != list(kinds):
        raise RenderError(_describe_wrong_count(kinds, len(spans)))
    return spans


def _describe_wrong_count(kinds: Sequence[MediumKind], count: int) -> str:
    media = format_count(len(kinds), "medium").replace("mediums", "media")
    if count == len(kinds):
        return "the template writes its media in another order"
    return f"the template writes {format_count(count, 'placeholder')} for its {media}"


def add_media_blocks(marked_text: MarkedText, spans: Sequence[PlaceholderSpan], owners: Sequence[int]) -> MarkedText:
    """Add media to the blocks of their messages: a turn may hold nothing else."""
    media = [
        MarkedBlock(owner, span.start, span.stop, opened=True, closed=True)
        for owner, span in zip(owners, spans, strict=True)
    ]
    blocks: list[MarkedBlock] = []
    for block in sorted([*marked_text.blocks, *media], key=lambda one: (one.start, one.stop)):
        previous = blocks[-1] if blocks else None
        if previous is not None and previous.owner == block.owner:
            blocks[-1] = replace(previous, stop=max(previous.stop, block.stop), closed=block.closed)
        else:
            blocks.append(block)
    return replace(marked_text, blocks=blocks)


def list_media_owners(messages: Sequence[dict[str, Any]], placeholder_formats: PlaceholderFormats) -> list[int]:
    return [
        number
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type") in placeholder_formats
    ]
