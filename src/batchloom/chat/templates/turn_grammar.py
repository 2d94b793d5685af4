"""Detection of the text that a template writes around turns, from one probe."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from batchloom.chat.templates.markers import MarkedText


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Text that a template writes around turns, learned from a probe.

    Attributes:
        prompt: generation prompt; empty if it is unknown.
        stop: text after the last assistant's content, up to its first control token and
            those adjacent to it; empty if there is none, None if it is unknown.
        openers: added tokens that begin a header.
        enders: control tokens that end a turn.
        control: pattern of the tokenizer's control tokens.
        added_pattern: pattern of all its added tokens.
    """

    prompt: str
    stop: str | None
    openers: frozenset[str]
    enders: frozenset[str]
    control: re.Pattern[str]
    added_pattern: re.Pattern[str]


def make_control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of ``tokens``, preferring the longest."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def make_unknown_grammar(control: re.Pattern[str], added_pattern: re.Pattern[str]) -> TurnGrammar:
    """Return the grammar of a template that accepts no probe."""
    return TurnGrammar("", None, frozenset(), frozenset(), control, added_pattern)


def detect_grammar(
    prompt: str, marked_probe: MarkedText, control: re.Pattern[str], added_pattern: re.Pattern[str]
) -> TurnGrammar:
    """Detect the grammar from a probe of alternating user and assistant turns.

    The contents of ``marked_probe`` are complete and marked; the last is an assistant's.
    """
    text, blocks = marked_probe.text, marked_probe.blocks
    last = max((block.owner for block in blocks), default=0)
    if not marked_probe.intact or not blocks or blocks[-1].owner != last:
        return TurnGrammar(prompt, None, frozenset(), frozenset(), control, added_pattern)
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
    return TurnGrammar(prompt, stop, frozenset(openers - enders), frozenset(enders), control, added_pattern)


def _find_stop_text(text: str, position: int, control: re.Pattern[str]) -> str:
    """Return the text after the last content, up to its first run of control tokens."""
    match = control.search(text, position)
    end = position
    while match is not None:
        end = match.end()
        match = control.match(text, end)
    return text[position:end]
