"""Policies for the reasoning of answers: keep, mask, drop or split."""

import re
from dataclasses import replace
from typing import Any, Literal

from batchloom.chat.templates.chat_template import REASONING_KEYS, RenderError, find_common_prefix, find_thought_end
from batchloom.chat.templates.conversation_text import CharacterSpan, ConversationText
from batchloom.chat.templates.media_placeholders import count_media
from batchloom.chat.templates.trained_spans import is_trained
from batchloom.chat.templates.turn_positions import ASSISTANT
from batchloom.core.document import Conversation, TurnWeight

ReasoningPolicy = Literal["keep", "mask", "drop", "split"]

_TAG = r"[<\[][^<>\[\]\s]{0,20}(?:think|thought|reason)[^<>\[\]\s]{0,20}[>\]]"
_TAG_BEFORE = re.compile(rf"{_TAG}\s*\Z", re.IGNORECASE)
_TAG_BEHIND = re.compile(rf"\s*{_TAG}\s*", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_TAG}\s*)*", re.IGNORECASE)


def drop_reasoning(conversation: Conversation) -> Conversation:
    """Return a conversation without reasoning; the same object if it has none.

    Raises:
        RenderError: an answer is reasoning alone, or has trained ranges that count the characters of its reasoning.
    """
    messages = [_drop_thought(message) for message in conversation.messages]
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
        if _is_blank(content) and not messages[number].get("tool_calls"):
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
            media=conversation.media[: count_media(prefix)],
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
        rendered: its text.
        without: text of the conversation without reasoning.

    Raises:
        RenderError: the template changes more of a turn than its thought.
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
                f"the template writes turn {number + 1} in another form without its reasoning, so that the reasoning "
                "cannot be masked; choose another template, or --reasoning drop"
            )
        spans.append((turn.body + span[0], turn.body + span[1]))
    return tuple(spans)


def _find_insertion(answer: str, remainder: str) -> CharacterSpan | None:
    """Return the span of an answer that its text without the thought lacks.

    It includes the tags. The span is empty if a template leaves the thought out, and None if the two differ by more
    than a thought.
    """
    # The end first: what is left is trained in one piece, also if thought and remainder begin alike.
    end = len(answer) - len(find_common_prefix([answer[::-1], remainder[::-1]]))
    limit = len(remainder) - (len(answer) - end)
    start = len(find_common_prefix([answer[:end], remainder[:limit]]))
    # Templates write an empty thought where there is none.
    if not _EMPTY_THOUGHT.fullmatch(remainder, start, limit):
        return None
    if _EMPTY_THOUGHT.fullmatch(answer, start, end):
        return start, start
    # A tag that the remainder has, too, belongs to the thought if the template writes an empty one.
    if not _TAG_BEFORE.search(answer, start, end) and (tag := _TAG_BEHIND.match(answer, end)):
        end = tag.end()
    if tag := _TAG_BEFORE.search(answer, 0, start):
        start = tag.start()
    return (start if answer[:start].strip() else 0), end


def _drop_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its reasoning; any other message unchanged."""
    if message.get("role") != ASSISTANT:
        return message
    keys = [key for key in REASONING_KEYS if message.get(key)]
    if keys:
        return {key: value for key, value in message.items() if key not in keys}
    content = message.get("content")
    new_content = _cut_thought(content) if isinstance(content, str) else _cut_first_part(content)
    return message if new_content is content else {**message, "content": new_content}


def _cut_first_part(content: Any) -> Any:
    """Return parts without a thought at the beginning of the first text."""
    if not isinstance(content, list) or not content or not isinstance(content[0].get("text"), str):
        return content
    text = _cut_thought(content[0]["text"])
    return content if text is content[0]["text"] else [{**content[0], "text": text}, *content[1:]]


def _cut_thought(text: str) -> str:
    end = find_thought_end(text)
    return text[end:] if end else text


def _is_blank(content: Any) -> bool:
    """Return whether a content has neither text nor media."""
    if isinstance(content, list):
        return all(part.get("type") == "text" and not part.get("text", "").strip() for part in content)
    return not content or not content.strip()
