"""Location of turns in a rendered text, by what a template writes around them."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchloom.chat.templates.markers import MarkedBlock, MarkedText

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Text that a template writes around turns, learned from a probe."""

    # Patterns of the tokenizer's control tokens, and of all its added tokens.
    control: re.Pattern[str]
    added_pattern: re.Pattern[str]
    # Generation prompt; empty if it is unknown.
    prompt: str = ""
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
    prompt: str, marked_probe: MarkedText, control: re.Pattern[str], added_pattern: re.Pattern[str]
) -> TurnGrammar:
    """Detect the grammar from a probe of alternating user and assistant turns.

    The contents of ``marked_probe`` are complete and marked; the last is an assistant's.
    """
    text, blocks = marked_probe.text, marked_probe.blocks
    last = max((block.owner for block in blocks), default=0)
    if not marked_probe.intact or not blocks or blocks[-1].owner != last:
        return TurnGrammar(control, added_pattern, prompt)
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
    return TurnGrammar(control, added_pattern, prompt, stop, frozenset(openers - enders), frozenset(enders))


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
    # End of the stop token, or of the content if there is none.
    end: int


class TurnPositionError(Exception):
    """The turns of a conversation cannot be located; the message says why."""


def locate_turns(marked_text: MarkedText, roles: Sequence[str], grammar: TurnGrammar) -> list[TurnPosition | None]:
    """Return the position of each message; None if the template writes no text of it."""
    text, blocks = marked_text.text, marked_text.blocks
    turn_spans: dict[int, tuple[int, int]] = {}
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
            turn_spans[number] = body, _find_turn_end(text, last, high, grammar, number)
        else:
            end = _find_stop(text, block.stop, high, grammar)
            turn_spans.setdefault(number, (block.start, block.stop if end is None else end))
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
        return text.index(prompt, low) + len(prompt)
    if not prompt:
        return block.start
    prompt_start = text.rfind(prompt, low, block.start)
    if prompt_start < 0:
        return block.start
    prompt_end = prompt_start + len(prompt)
    if any(token in text[prompt_end : block.start] for token in grammar.openers):
        raise TurnPositionError(f"the header of turn {number + 1} differs from the template's generation prompt")
    return prompt_end


def _find_stop(text: str, start: int, high: int, grammar: TurnGrammar) -> int | None:
    """Return the end of the first stop token from ``start`` on; None without one."""
    stop = grammar.stop
    if stop == "":
        return start
    if stop and text.startswith(stop, start):
        return start + len(stop)
    first = None
    for match in grammar.added_pattern.finditer(text, start, high):
        token = match.group()
        if token in grammar.openers:
            break
        if token in grammar.enders:
            return match.end()
        if first is None and grammar.control.fullmatch(token):
            first = match.end()
    return first


def _find_turn_end(text: str, start: int, high: int, grammar: TurnGrammar, number: int) -> int:
    end = _find_stop(text, start, high, grammar)
    if end is None:
        if grammar.stop is None:
            return start
        raise TurnPositionError(f"the template writes no stop token after turn {number + 1}")
    return end


def _add_turn_heads(
    text: str, turn_spans: dict[int, tuple[int, int]], count: int, grammar: TurnGrammar
) -> list[TurnPosition | None]:
    turns: list[TurnPosition | None] = [None] * count
    previous_end = 0
    for number, (body, end) in sorted(turn_spans.items(), key=lambda item: item[1]):
        match = grammar.control.search(text, previous_end, body) if previous_end else None
        head = match.start() if match else min(previous_end, body)
        turns[number] = TurnPosition(head, body, end)
        previous_end = max(previous_end, end)
    return turns


def describe_alterations(turns: Sequence[TurnPosition | None]) -> tuple[str, ...]:
    """Describe whether a template omitted or reordered messages."""
    altered: tuple[str, ...] = ("leaves out messages",) if None in turns else ()
    positions = [turn for turn in turns if turn is not None]
    if positions != sorted(positions):
        altered += ("writes messages in another order",)
    return altered
