"""Replacement of videos in conversations and texts by their frames, as images."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from batchloom.core.conversation import Conversation, InterleavedText
from batchloom.core.medium import MEDIUM_KINDS, Medium


def replace_media_with_frames(
    document: Conversation | InterleavedText, frames_by_medium: Sequence[Sequence[Medium]]
) -> Conversation | InterleavedText:
    """Replace each medium of a document with its frames.

    Args:
        document: a document with one part, or one gap between texts, per medium.
        frames_by_medium: frames of each medium, at least one, in document order.
    """
    media = [frame for frames in frames_by_medium for frame in frames]
    if all(medium.kind != "video" for medium in document.media):
        return replace(document, media=media)
    if isinstance(document, InterleavedText):
        between = zip(frames_by_medium, document.texts[1:], strict=True)
        texts = [text for frames, after in between for text in (*[""] * (len(frames) - 1), after)]
        return InterleavedText([document.texts[0], *texts], media)
    frame_groups, messages = iter(frames_by_medium), []
    for message in document.messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [new_part for part in content for new_part in _expand_part(part, frame_groups)]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return replace(document, messages=messages, media=media)


def _expand_part(part: Any, frame_groups: Iterator[Sequence[Medium]]) -> list[Any]:
    if part.get("type") not in MEDIUM_KINDS:
        return [part]
    return [{"type": frame.kind} for frame in next(frame_groups)]
