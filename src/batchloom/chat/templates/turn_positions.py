"""Where turns begin and end in a rendered text: pure decisions on places, in characters."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from batchloom.chat.templates.markers import MarkedBlock, MarkedText
from batchloom.chat.templates.turn_grammar import TurnGrammar

ASSISTANT = "assistant"


class TurnPosition(NamedTuple):
    """Where a turn stands.

    Attributes:
        head: where what the template writes before it begins.
        body: the first character that the model writes, or that was given.
        end: behind the stop token after it, or behind its content where there is none.
    """

    head: int
    body: int
    end: int


class TurnPositionError(Exception):
    """The turns of one conversation cannot be told apart; says why."""


def locate_turns(
    found: MarkedText, roles: Sequence[str], empty: Sequence[bool], grammar: TurnGrammar
) -> list[TurnPosition | None]:
    """Where each message stands in a text; None for what the template leaves out.

    Args:
        found: the text, and where marked strings of messages came out.
        roles: of the messages.
        empty: whether a message holds no string that could have been marked.
        grammar: what the template writes around turns.

    Raises:
        TurnPositionError: an assistant's turn whose place is not certain.
    """
    text, blocks = found.text, found.blocks
    places: dict[int, tuple[int, int]] = {}
    for n, block in enumerate(blocks):
        number = block.owner
        if number < 0:
            continue
        low = blocks[n - 1].stop if n else 0
        high = blocks[n + 1].start if n + 1 < len(blocks) else len(text)
        if roles[number] == ASSISTANT:
            if number in places:
                raise TurnPositionError(f"the template writes turn {number + 1} in several places")
            if not block.closed:
                raise TurnPositionError(f"the template cuts off the end of turn {number + 1}")
            body = _find_body_start(text, low, block, grammar, number)
            last = _find_last_content(found, block, grammar)
            places[number] = body, _find_turn_end(text, last, high, grammar, number)
        else:
            end = _find_stop(text, block.stop, high, grammar)
            places.setdefault(number, (block.start, block.stop if end is None else end))
    _locate_empty_turns(found, roles, empty, grammar, places)
    return _add_turn_heads(text, places, len(roles), grammar)


def _find_last_content(found: MarkedText, block: MarkedBlock, grammar: TurnGrammar) -> int:
    """Where an assistant says its last.

    A header of another turn may repeat what it said, such as the name of the tool it called.
    """
    first = bisect_left(found.given, (block.start, 0))
    behind = bisect_left(found.given, block.stop, key=lambda some: some[0])
    inside = [some for some in found.given[first : behind + 1] if some[1] <= block.stop]
    edges = [block.start, *(place for some in inside for place in some), block.stop]
    for n in range(0, len(edges), 2):
        for token in grammar.around.finditer(found.text, edges[n], edges[n + 1]):
            opens = token.group() in grammar.openers
            if opens and not (
                grammar.prompt and found.text.startswith(grammar.prompt, token.start())
            ):
                return edges[n]
    return block.stop


def _find_body_start(
    text: str, low: int, block: MarkedBlock, grammar: TurnGrammar, number: int
) -> int:
    """Where an assistant's turn begins: behind what the model is prompted with."""
    prompt = grammar.prompt
    if not block.opened:
        if not prompt or text.count(prompt, low, block.stop) != 1:
            raise TurnPositionError(f"the template changes the beginning of turn {number + 1}")
        return text.index(prompt, low) + len(prompt)
    if not prompt:
        return block.start
    at = text.rfind(prompt, low, block.start)
    if at < 0:
        return block.start
    behind = at + len(prompt)
    if any(token in text[behind : block.start] for token in grammar.openers):
        raise TurnPositionError(
            f"the header of turn {number + 1} is not the one the template prompts with"
        )
    return behind


def _find_stop(text: str, place: int, high: int, grammar: TurnGrammar) -> int | None:
    """Behind the first stop from ``place`` on, None where a turn has none."""
    stop = grammar.stop
    if stop == "":
        return place
    if stop and text.startswith(stop, place):
        return place + len(stop)
    first = None
    for match in grammar.around.finditer(text, place, high):
        token = match.group()
        if token in grammar.openers:
            break
        if token in grammar.enders:
            return match.end()
        if first is None and grammar.control.fullmatch(token):
            first = match.end()
    return first


def _find_turn_end(text: str, place: int, high: int, grammar: TurnGrammar, number: int) -> int:
    end = _find_stop(text, place, high, grammar)
    if end is None:
        if grammar.stop is None:
            return place
        raise TurnPositionError(f"the template writes no stop token behind turn {number + 1}")
    return end


def _locate_empty_turns(
    found: MarkedText,
    roles: Sequence[str],
    empty: Sequence[bool],
    grammar: TurnGrammar,
    places: dict[int, tuple[int, int]],
) -> None:
    """Find the turns of assistants that say nothing by the prompts before them."""
    text, blocks = found.text, found.blocks

    def silent(number: int) -> bool:
        return roles[number] == ASSISTANT and empty[number] and number not in places

    for number in filter(silent, range(len(roles))):
        if not grammar.prompt or any(n not in places and not empty[n] for n in range(len(roles))):
            raise TurnPositionError(f"the place of the empty turn {number + 1} is not certain")
        low = max((end for other, (_, end) in places.items() if other < number), default=0)
        later = [block for block in blocks if block.owner > number]
        high = min((block.start for block in later), default=len(text))
        following = min((block.owner for block in later), default=len(roles))
        waiting = sum(map(silent, range(number, following)))
        waiting += following < len(roles) and roles[following] == ASSISTANT
        if text.count(grammar.prompt, low, high) != waiting:
            raise TurnPositionError(f"the place of the empty turn {number + 1} is not certain")
        body = text.index(grammar.prompt, low) + len(grammar.prompt)
        places[number] = body, _find_turn_end(text, body, high, grammar, number)


def _add_turn_heads(
    text: str, found: dict[int, tuple[int, int]], count: int, grammar: TurnGrammar
) -> list[TurnPosition | None]:
    turns: list[TurnPosition | None] = [None] * count
    before = 0
    for number, (body, end) in sorted(found.items(), key=lambda item: item[1]):
        match = grammar.control.search(text, before, body) if before else None
        head = match.start() if match else min(before, body)
        turns[number] = TurnPosition(head, body, end)
        before = max(before, end)
    return turns


def describe_alterations(turns: Sequence[TurnPosition | None]) -> tuple[str, ...]:
    """What a template did to messages whose turns stand there, in words."""
    altered: tuple[str, ...] = ("leaves out messages",) if None in turns else ()
    places = [turn for turn in turns if turn is not None]
    if places != sorted(places):
        altered += ("writes messages in another order",)
    return altered
