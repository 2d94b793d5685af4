"""What a template writes around turns, learned from one rendered probe."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from batchloom.chat.templates.markers import MarkedText


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """What a template writes around turns, learned from a probe.

    Attributes:
        prompt: the header that it writes for the model to go on from; empty where that is not
            known.
        stop: what it writes behind the last assistant's content, up to its first control token and
            those that adjoin it; empty where it writes none, None where that is not known.
        openers: added tokens that begin a header.
        enders: control tokens that end a turn.
        control: matches the tokenizer's control tokens.
        added_pattern: matches all its added tokens.
    """

    prompt: str
    stop: str | None
    openers: frozenset[str]
    enders: frozenset[str]
    control: re.Pattern[str]
    added_pattern: re.Pattern[str]


def make_control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of ``tokens``, the longest where several begin at a place."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def make_unknown_grammar(control: re.Pattern[str], added_pattern: re.Pattern[str]) -> TurnGrammar:
    """The grammar of a template that takes no probe."""
    return TurnGrammar("", None, frozenset(), frozenset(), control, added_pattern)


def detect_grammar(
    prompt: str, marked_probe: MarkedText, control: re.Pattern[str], added_pattern: re.Pattern[str]
) -> TurnGrammar:
    """The grammar that a probe shows whose turns are a user's and an assistant's, in turn.

    Args:
        prompt: the header that the template writes for the model to go on from.
        marked_probe: the probe, its contents marked and whole; the last is an assistant's.
        control: matches control tokens.
        added_pattern: matches all added tokens.
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
        if header_start >= 0:  # what stands before an assistant's header ends the turn before it
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
    """What follows the last content, up to its first control token and those that adjoin it."""
    match = control.search(text, position)
    end = position
    while match is not None:
        end = match.end()
        match = control.match(text, end)
    return text[position:end]
