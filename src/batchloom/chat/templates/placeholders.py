"""What a template writes where a medium stands, and what a processor writes there instead."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchloom.chat.templates.chat_template import RenderError, Template
from batchloom.chat.templates.markers import Block, Found
from batchloom.chat.templates.turn_positions import Turn
from batchloom.core.medium import Kind
from batchloom.core.wording import counted

# One of these stands for a medium in a content that a template takes as a string only.
_MARKS = range(0xE000, 0xE800)


class Stand(NamedTuple):
    """How media of one kind stand in a text.

    Attributes:
        placeholder: the control token that templates write for one.
        alone: what is written for one where the template knows no media, with the placeholder in it.
    """

    placeholder: str
    alone: str


Stands = Mapping[Kind, Stand]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a template takes media.

    Attributes:
        typed: the kinds for whose parts it writes placeholders; others are put into contents as strings.
        listed: whether it takes contents as lists of parts alone, never as strings.
    """

    typed: frozenset[Kind] = frozenset()
    listed: bool = False


class Place(NamedTuple):
    """Where something is written for a medium, in characters.

    Attributes:
        start: its first character.
        stop: behind its last one.
        kind: of the medium.
        typed: whether the template wrote a placeholder; else it is what stood in a content for it.
    """

    start: int
    stop: int
    kind: Kind
    typed: bool


def learn_manner(template: Template, stands: Stands) -> Manner:
    """How a template takes media, from what it writes of a probe."""
    listed = _answers(template, "y") != _answers(template, [{"type": "text", "text": "y"}])
    listed = listed and "y" not in _answers(template, "y")
    answer: Any = [{"type": "text", "text": "y"}] if listed else "y"
    typed = set()
    for kind, stand in stands.items():
        asked = [{"type": kind}, {"type": "text", "text": "x"}]
        written = _written(template, asked, answer)
        if written.count(stand.placeholder) == 1 and "x" in written and "y" in written:
            typed.add(kind)
    return Manner(frozenset(typed), listed)


def _answers(template: Template, answer: Any) -> str:
    """What a template writes of an answer beside an empty one."""
    asked: Any = "x" if isinstance(answer, str) else [{"type": "text", "text": "x"}]
    whole, empty = _written(template, asked, answer), _written(template, asked, "")
    return whole if whole != empty else ""


def _written(template: Template, asked: Any, answer: Any) -> str:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    try:
        return template.render(messages).text
    except RenderError:
        return ""


def presented_media(
    messages: list[dict[str, Any]], manner: Manner
) -> tuple[list[dict[str, Any]], str]:
    """Messages as a template of this manner takes them, and what stands in strings for a medium.

    Raises:
        RenderError: they use every character that could stand for one.
    """
    mark = _unused(messages)
    return [_presented(message, manner, mark) for message in messages], mark


def _presented(message: dict[str, Any], manner: Manner, mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        if manner.listed:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message
    if not isinstance(content, list) or all(
        part.get("type") == "text" or part.get("type") in manner.typed for part in content
    ):
        return message
    texts = [
        part
        if part.get("type") in manner.typed
        else {"type": "text", "text": part.get("text", mark)}
        for part in content
    ]
    if all(part["type"] == "text" for part in texts) and not manner.listed:
        return {**message, "content": "".join(part["text"] for part in texts)}
    return {**message, "content": texts}


def _unused(value: Any) -> str:
    used = set(_strings(value))
    for code in _MARKS:
        if not any(chr(code) in text for text in used):
            return chr(code)
    raise RenderError("it holds every private-use character that could stand for a medium")


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        if not value.isascii():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def find_places(
    text: str,
    control: Sequence[int],
    kinds: Sequence[Kind],
    mark: str,
    stands: Stands,
    manner: Manner,
) -> list[Place]:
    """Where a template wrote something for each medium.

    Args:
        text: what it wrote.
        control: where it wrote control tokens.
        kinds: of the media, in their order.
        mark: what stands in strings for one.
        stands: how media stand in a text.
        manner: how the template takes them.

    Raises:
        RenderError: it left media out, wrote some twice, or in another order.
    """
    found = [
        Place(place, place + len(stands[kind].placeholder), kind, typed=True)
        for place in control
        for kind in manner.typed
        if text.startswith(stands[kind].placeholder, place)
    ]
    strings = [kind for kind in kinds if kind not in manner.typed]
    marks = [match.start() for match in re.finditer(re.escape(mark), text)] if strings else []
    if len(marks) != len(strings):
        raise RenderError(_wrong_count(strings, len(marks)))
    found += [
        Place(place, place + len(mark), kind, typed=False)
        for place, kind in zip(marks, strings, strict=True)
    ]
    found.sort()
    if [place.kind for place in found] != list(kinds):
        raise RenderError(_wrong_count(kinds, len(found)))
    return found


def _wrong_count(kinds: Sequence[Kind], found: int) -> str:
    media = counted(len(kinds), "medium").replace("mediums", "media")
    if found == len(kinds):
        return "the template writes its media in another order"
    return f"the template writes {counted(found, 'placeholder')} for its {media}"


def with_blocks(found: Found, places: Sequence[Place], owners: Sequence[int]) -> Found:
    """A marked text whose media are blocks of their messages, too: a turn may hold nothing else."""
    media = [
        Block(owner, place.start, place.stop, opened=True, closed=True)
        for owner, place in zip(owners, places, strict=True)
    ]
    blocks: list[Block] = []
    for block in sorted([*found.blocks, *media], key=lambda one: (one.start, one.stop)):
        before = blocks[-1] if blocks else None
        if before is not None and before.owner == block.owner:
            stop = max(before.stop, block.stop)
            blocks[-1] = Block(block.owner, before.start, stop, before.opened, block.closed)
        else:
            blocks.append(block)
    return Found(found.text, blocks, found.given, found.whole, found.lost)


def owners_of(messages: Sequence[dict[str, Any]], stands: Stands) -> list[int]:
    """The message of each medium."""
    return [
        number
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type") in stands
    ]


class Written(NamedTuple):
    """A text with what a processor writes for its media. All places are in characters of it.

    Attributes:
        text: the text.
        turns: where messages stand.
        control: where control tokens stand.
        generation: the template's generation marks; None where it has none.
        media: (start, stop) of what stands for each medium, in order.
    """

    text: str
    turns: list[Turn | None]
    control: list[int]
    generation: tuple[tuple[int, int], ...] | None
    media: list[tuple[int, int]]


def write_media(
    text: str,
    turns: Sequence[Turn | None],
    control: Sequence[int],
    generation: tuple[tuple[int, int], ...] | None,
    places: Sequence[Place],
    written: Sequence[str],
    pattern: re.Pattern[str],
) -> Written:
    """Put what a processor writes for each medium where the template wrote something for it.

    Args:
        text: of the rendered conversation.
        turns: where its messages stand.
        control: where it has control tokens.
        generation: its generation marks.
        places: of its media.
        written: for each of them.
        pattern: matches control tokens.
    """
    stops = [place.stop for place in places]
    grown = [0]
    for place, new in zip(places, written, strict=True):
        grown.append(grown[-1] + len(new) - (place.stop - place.start))

    def moved(at: int) -> int:
        # A place inside what is replaced is its beginning.
        passed = bisect_right(stops, at)
        if passed < len(places) and places[passed].start < at:
            at = places[passed].start
        return at + grown[passed]

    pieces: list[str] = []
    media, at = [], 0
    kept = [place for place in control if not any(one.start <= place < one.stop for one in places)]
    fresh = []
    for place, new in zip(places, written, strict=True):
        pieces += (text[at : place.start], new)
        start = moved(place.start)
        media.append((start, start + len(new)))
        fresh += [start + match.start() for match in pattern.finditer(new)]
        at = place.stop
    pieces.append(text[at:])
    return Written(
        "".join(pieces),
        [None if turn is None else Turn(*map(moved, turn)) for turn in turns],
        sorted([*map(moved, kept), *fresh]),
        None if generation is None else tuple((moved(a), moved(b)) for a, b in generation),
        media,
    )
