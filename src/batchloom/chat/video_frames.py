"""Videos in conversations and texts: where one stood, its frames do, each as an image."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from batchloom.core.conversation import Conversation, InterleavedText
from batchloom.core.medium import MEDIUM_KINDS, Medium


def replace_media_with_frames(
    document: Conversation | InterleavedText, seen: Sequence[Sequence[Medium]]
) -> Conversation | InterleavedText:
    """A conversation or a text with what each of its media is seen as, one or more, in its place.

    Args:
        document: with a part, or a place between texts, for each of its media, in their order.
        seen: of each of them.
    """
    media = [one for some in seen for one in some]
    if all(medium.kind != "video" for medium in document.media):
        return replace(document, media=media)
    if isinstance(document, InterleavedText):
        between = zip(seen, document.texts[1:], strict=True)
        texts = [text for some, after in between for text in (*[""] * (len(some) - 1), after)]
        return InterleavedText([document.texts[0], *texts], media)
    left, messages = iter(seen), []
    for message in document.messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [one for part in content for one in _expand_part(part, left)]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return replace(document, messages=messages, media=media)


def _expand_part(part: Any, left: Iterator[Sequence[Medium]]) -> list[Any]:
    if part.get("type") not in MEDIUM_KINDS:
        return [part]
    return [{"type": one.kind} for one in next(left)]
