"""Policies for the reasoning of answers: keep, mask, drop or split."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from batchloom.chat.templates.chat_template import (
    REASONING_KEYS,
    THOUGHT_TAGS,
    RenderError,
    find_common_prefix,
    find_thought_end,
)
from batchloom.chat.templates.conversation_text import CharacterSpan, ConversationText
from batchloom.chat.templates.marks import MarkedSpan
from batchloom.chat.templates.media_placeholders import list_media_owners
from batchloom.chat.templates.trained_spans import is_trained, require_turn
from batchloom.chat.templates.turn_positions import ASSISTANT, TurnPosition
from batchloom.core.document import Conversation, TurnWeight
from batchloom.core.medium import MEDIUM_KINDS

ReasoningPolicy = Literal["keep", "mask", "drop", "split"]

_TAG = r"[<\[][^<>\[\]\s]{0,20}(?:think|thought|reason)[^<>\[\]\s]{0,20}[>\]]"
_TAG_BEFORE = re.compile(rf"{_TAG}\s*\Z", re.IGNORECASE)
_TAG_BEHIND = re.compile(rf"\s*{_TAG}(?:[^\S\n]*\n)*", re.IGNORECASE)
_TAG_BEGINNING = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_OTHER_THOUGHT = re.compile(
    r"\s*[<\[]([^<>\[\]/\s]{0,20}(?:think|thought|reason)[^<>\[\]/\s]{0,20})[>\]].*?[<\[]/\1[>\]]",
    re.IGNORECASE | re.DOTALL,
)
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_TAG}\s*)*", re.IGNORECASE)


def drop_reasoning(conversation: Conversation, *, keeps_empty: bool = False) -> Conversation:
    """Return a conversation without reasoning; the same object if it has none.

    Args:
        conversation: the conversation.
        keeps_empty: whether answers that are reasoning alone become empty ones.

    Raises:
        RenderError: the end of a thought is not clear, an answer is reasoning alone, or its trained ranges count the
            characters of its reasoning.
    """
    messages = [_drop_thought(message, number) for number, message in enumerate(conversation.messages)]
    changed = [n for n, message in enumerate(conversation.messages) if messages[n] is not message]
    for number in changed:
        flag = conversation.trained[number] if number < len(conversation.trained) else None
        content = messages[number].get("content")
        is_same = content == conversation.messages[number].get("content")
        if isinstance(flag, TurnWeight) and flag.ranges and not is_same:
            raise RenderError(
                f"the trained ranges of turn {number + 1} count the characters of its reasoning; flag the message, or "
                "keep the reasoning (--reasoning keep)"
            )
        if not keeps_empty and _is_blank(content) and not messages[number].get("tool_calls"):
            raise RenderError(f"turn {number + 1} is reasoning alone: nothing is left of it (--reasoning keep)")
    return replace(conversation, messages=messages) if changed else conversation


def split_answers(conversation: Conversation, train_on: str) -> list[Conversation]:
    """Return a conversation for each trained answer, which ends with it alone trained.

    A template that writes only the last answer's reasoning then writes each.

    Args:
        conversation: the conversation; its flags override ``train_on``.
        train_on: ``assistant``, ``last``, ``completion`` or ``flagged``.
    """
    messages = conversation.messages
    flags = conversation.trained or [None] * len(messages)
    answers = [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]
    selected = answers
    if train_on == "completion":
        selected = [number for number in answers if number >= (conversation.completion or 0)]
    elif train_on != "assistant":
        selected = answers[-1:] if train_on == "last" else []
    samples = []
    for number in answers:
        flag = is_trained(flags[number])
        if flag is False or not (flag or number in selected):
            continue
        prefix = messages[: number + 1]
        sample = replace(
            conversation,
            messages=prefix,
            trained=[*[False] * number, flags[number]],
            # The header of an answer is a part of its prompt.
            completion=None if conversation.completion is None else number,
            media=conversation.media[: len(list_media_owners(prefix, MEDIUM_KINDS))],
        )
        samples.append(sample)
    return samples


def find_thoughts(
    conversation: Conversation, rendered: ConversationText, without: ConversationText
) -> tuple[CharacterSpan, ...]:
    """Return the span of each thought, with its tags.

    That is what the template writes for the thought alone.

    Args:
        conversation: the conversation as the template gets it.
        rendered: its text, with the strings of answers.
        without: text of the conversation without reasoning.

    Raises:
        RenderError: the template changes more of a turn than its thought.
    """
    spans = []
    for number, message in enumerate(conversation.messages):
        if _drop_thought(message, number) is message:
            continue
        turn = require_turn(rendered, number)
        other = require_turn(without, number)
        remainder = without.text[other.body : other.end]
        span = _find_thought(
            rendered.text, turn, remainder, [string for string in rendered.strings if string.owner == number]
        )
        if span is None:
            raise RenderError(
                f"the template writes turn {number + 1} in another form without its reasoning, so that the reasoning "
                "cannot be masked; choose another template, or --reasoning drop"
            )
        spans.append(span)
    return tuple(spans)


def _find_thought(text: str, turn: TurnPosition, remainder: str, strings: Sequence[MarkedSpan]) -> CharacterSpan | None:
    """Return the span of the thought of an answer, with its tags.

    Two kinds of evidence agree: the marks around the thought, and what the turn loses without it. The span is empty if
    the template leaves the thought out. Returns None if the two disagree.

    Args:
        text: the rendered conversation.
        turn: position of the answer.
        remainder: text of the answer without the thought.
        strings: strings of the answer.
    """
    thoughts = [string for string in strings if string.key in REASONING_KEYS]
    if not thoughts:
        is_same = _remove_tags(text[turn.body : turn.end]) == _remove_tags(remainder)
        return (turn.body, turn.body) if is_same else None
    first = thoughts[0].start
    last = thoughts[-1].stop
    others = [string for string in strings if string.key not in REASONING_KEYS]
    # The span is between the strings around the thought.
    low = max((string.stop for string in others if string.stop <= first), default=turn.body)
    high = min((string.start for string in others if string.start >= last), default=turn.stop)
    if any(low < string.stop and string.start < high for string in others):
        return None
    answer = text[turn.body : turn.end]
    behind = len(find_common_prefix([answer[::-1], remainder[::-1]]))
    end = max(turn.end - behind, last)
    limit = len(remainder) - (turn.end - end)
    before = len(find_common_prefix([answer, remainder[: max(limit, 0)]]))
    start = min(turn.body + before, first)
    if limit < 0 or not _EMPTY_THOUGHT.fullmatch(remainder, start - turn.body, limit):
        return None
    # Text before the thought may end as the thought does: what is missing may be either of the two.
    shifts = [
        shift
        for shift in range(len(find_common_prefix([text[start:end], text[end:high]])) + 1)
        if low <= start + shift <= first
    ]
    if not shifts:
        return None
    # A tag is masked whole or not at all.
    shift = next((shift for shift in shifts if not _TAG_BEGINNING.search(text, low, end + shift)), shifts[0])
    start += shift
    end += shift
    if tag := _TAG_BEHIND.match(text, end, high):
        end = tag.end()
    if tag := _TAG_BEFORE.search(text, low, start):
        start = tag.start()
    return (start if text[turn.body : start].strip() else turn.body), end


def _remove_tags(text: str) -> str:
    """Return a text without tags of thoughts and white space."""
    return "".join(re.sub(_TAG, "", text, flags=re.IGNORECASE).split())


def _drop_thought(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return answer ``number`` without its reasoning; any other message unchanged.

    Raises:
        RenderError: the end of a thought is not clear.
    """
    if message.get("role") != ASSISTANT:
        return message
    keys = [key for key in REASONING_KEYS if message.get(key)]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in parts]
    text = texts[0] if texts else ""
    begins_with_thought = text.lstrip().startswith(THOUGHT_TAGS[0])
    # With a value of its own, an answer only mentions a tag, unless it begins with one.
    end = find_thought_end(text) if begins_with_thought or not keys else 0
    has_end_behind = any(THOUGHT_TAGS[1] in rest for rest in (text[end:], *texts[1:]))
    if (begins_with_thought and not end) or ((end or not keys) and has_end_behind):
        raise RenderError(
            f"it is not clear where the thought of turn {number + 1} ends: write it as reasoning_content, or keep it "
            "(--reasoning keep)"
        )
    if not keys and (other := _OTHER_THOUGHT.match(text, end)):
        raise RenderError(
            f"turn {number + 1} begins with {other[1]!r} tags, which are not read as reasoning: write the thought as "
            f"reasoning_content or between {THOUGHT_TAGS[0]} and {THOUGHT_TAGS[1]}, or keep it (--reasoning keep)"
        )
    if not keys and not end:
        return message
    kept = {key: value for key, value in message.items() if key not in keys}
    if not end:
        return kept
    return {**kept, "content": [{**parts[0], "text": text[end:]}, *parts[1:]] if parts else text[end:]}


def _is_blank(content: Any) -> bool:
    """Return whether a content has neither text nor media."""
    if isinstance(content, list):
        return all(part.get("type") == "text" and not part.get("text", "").strip() for part in content)
    return not content or not content.strip()
