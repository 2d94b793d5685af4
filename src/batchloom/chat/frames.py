"""Videos in conversations: where one stood, its frames do, each as an image."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from batchloom.core.conversation import Conversation
from batchloom.core.media import KINDS, Medium


def with_frames(conversation: Conversation, seen: Sequence[Sequence[Medium]]) -> Conversation:
    """A conversation with what each of its media is seen as, one or more, in its place.

    Args:
        conversation: with parts for its media, in their order.
        seen: of each of them.
    """
    left = iter(seen)
    media = [one for some in seen for one in some]
    if all(medium.kind != "video" for medium in conversation.media):
        return replace(conversation, media=media)
    messages = []
    for message in conversation.messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [one for part in content for one in _seen(part, left)]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return replace(conversation, messages=messages, media=media)


def _seen(part: Any, left: Iterator[Sequence[Medium]]) -> list[Any]:
    if part.get("type") not in KINDS:
        return [part]
    return [{"type": one.kind} for one in next(left)]
