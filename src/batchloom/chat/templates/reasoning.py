"""Policies for the reasoning of answers: keep, mask, drop or split."""

import os
import re
from dataclasses import replace
from typing import Any, Literal

from batchloom.chat.templates.chat_template import REASONING_KEYS, RenderError
from batchloom.chat.templates.conversation_text import CharacterSpan, ConversationText
from batchloom.chat.templates.turn_positions import ASSISTANT
from batchloom.core.document import Conversation, TurnWeight

ReasoningPolicy = Literal["keep", "mask", "drop", "split"]

_BEGIN, _END = "<think>", "</think>"
_TAG = r"[<\[][^<>\[\]\s]{0,20}(?:think|thought|reason)[^<>\[\]\s]{0,20}[>\]]"
_TAG_BEFORE = re.compile(rf"{_TAG}\s*\Z", re.IGNORECASE)
_TAG_BEHIND = re.compile(rf"\s*{_TAG}\s*", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_TAG}\s*)*", re.IGNORECASE)


def drop_reasoning(conversation: Conversation) -> Conversation:
    """Return a conversation without reasoning; the same object if it has none.

    Reasoning is a value of its own, or the beginning of a content up to ``</think>``.

    Raises:
        RenderError: an answer is reasoning alone, or has trained ranges that count the characters of its reasoning.
    """
    messages = [_drop_thought(message) for message in conversation.messages]
    changed = [n for n, message in enumerate(conversation.messages) if messages[n] is not message]
    for number in changed:
        flag = conversation.trained[number] if number < len(conversation.trained) else None
        if isinstance(flag, TurnWeight) and flag.ranges:
            raise RenderError(
                f"the trained ranges of turn {number + 1} count the characters of its reasoning; flag the message, or "
                "keep the reasoning (--reasoning keep)"
            )
        if not messages[number].get("content") and not messages[number].get("tool_calls"):
            raise RenderError(f"turn {number + 1} is reasoning alone: nothing is left of it (--reasoning keep)")
    return replace(conversation, messages=messages) if changed else conversation


def split_answers(conversation: Conversation) -> list[Conversation]:
    """Return a conversation for each answer, which ends with it and trains no other.

    A template that writes the reasoning of the last answer alone then writes that of each.
    """
    messages, flags = conversation.messages, conversation.trained or [None] * len(conversation.messages)
    first = conversation.completion or 0
    return [
        replace(conversation, messages=messages[: number + 1], trained=[*[False] * number, flags[number]])
        for number, message in enumerate(messages)
        if number >= first and message.get("role") == ASSISTANT and flags[number] is not False
    ]


def find_thoughts(
    conversation: Conversation, rendered: ConversationText, without: ConversationText
) -> tuple[CharacterSpan, ...]:
    """Return the span of each thought, with its tags.

    That is what the template writes for the thought alone.

    Args:
        conversation: the conversation.
        rendered: its text.
        without: text of the conversation without reasoning.

    Raises:
        RenderError: the template writes more than the thought otherwise.
    """
    spans = []
    for number, message in enumerate(conversation.messages):
        if _drop_thought(message) is message:
            continue
        turn, other = (text.turns[number] if text.turns else None for text in (rendered, without))
        if turn is None or other is None:
            raise RenderError(f"turn {number + 1} cannot be found in the rendered text: {rendered.problem}")
        span = _find_insertion(rendered.text[turn.body : turn.end], without.text[other.body : other.end])
        if span is None:
            raise RenderError(
                f"the template writes turn {number + 1} otherwise without its reasoning, so that the reasoning cannot "
                "be masked; choose another template, or --reasoning drop"
            )
        spans.append((turn.body + span[0], turn.body + span[1]))
    return tuple(spans)


def _find_insertion(answer: str, remainder: str) -> CharacterSpan | None:
    """Return the span that an answer has more than its remainder, with its tags.

    The span is empty if a template leaves the thought out, and None if the two differ by more than a thought.
    """
    # The end first: what is left is trained in one piece, also if thought and remainder begin alike.
    end = len(answer) - _count_common(answer[::-1], remainder[::-1])
    limit = len(remainder) - (len(answer) - end)
    start = _count_common(answer[:end], remainder[:limit])
    # Templates write an empty thought where there is none.
    if not _EMPTY_THOUGHT.fullmatch(remainder, start, limit):
        return None
    if _EMPTY_THOUGHT.fullmatch(answer, start, end):
        return start, start
    if tag := _TAG_BEFORE.search(answer, 0, start):
        start = tag.start()
    if tag := _TAG_BEHIND.match(answer, end):
        end = tag.end()
    return (start if answer[:start].strip() else 0), end


def _count_common(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))  # noqa: RUF071 - of characters


def _drop_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its reasoning; any other message unchanged."""
    if message.get("role") != ASSISTANT:
        return message
    content = message.get("content")
    new_content = _cut_thought(content) if isinstance(content, str) else _cut_first_part(content)
    keys = [key for key in REASONING_KEYS if message.get(key)]
    if not keys and new_content is content:
        return message
    return {**{key: value for key, value in message.items() if key not in keys}, "content": new_content}


def _cut_first_part(content: Any) -> Any:
    """Return parts without a thought at the beginning of the first text."""
    if not isinstance(content, list) or not content or not isinstance(content[0].get("text"), str):
        return content
    text = _cut_thought(content[0]["text"])
    return content if text is content[0]["text"] else [{**content[0], "text": text}, *content[1:]]


def _cut_thought(text: str) -> str:
    """Return a text without the thought at its beginning.

    Its first tag may have been the end of a prompt.
    """
    thought, tag, answer = text.partition(_END)
    begins = thought.lstrip().startswith(_BEGIN) or _BEGIN not in thought
    return answer.lstrip() if tag and begins else text
