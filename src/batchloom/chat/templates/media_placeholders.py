"""Forms in which templates accept media, and the text that they write for each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchloom.chat.templates.chat_template import ChatTemplate, RenderError
from batchloom.chat.templates.marks import contains_match
from batchloom.core.medium import MediumKind
from batchloom.core.wording import format_count

# Candidates for the mark of a medium in a content that a template accepts only as a string.
_MEDIUM_MARK_CODES = range(0xE000, 0xE800)


class PlaceholderFormat(NamedTuple):
    """Text form of media of one kind.

    Attributes:
        placeholder: control token that templates write for a medium.
        fallback_text: text for a medium under a template without media support, including the placeholder.
    """

    placeholder: str
    fallback_text: str


PlaceholderFormats = Mapping[MediumKind, PlaceholderFormat]


@dataclass(frozen=True, slots=True)
class MediaStyle:
    """Form in which a template accepts media."""

    # Kinds whose parts become placeholders; others are put into contents as strings.
    typed: frozenset[MediumKind] = frozenset()
    # Whether contents must be lists of parts, never strings.
    listed: bool = False


class PlaceholderSpan(NamedTuple):
    """Text written for a medium, in characters.

    Attributes:
        start: offset of its first character.
        stop: offset after its last character.
        kind: kind of the medium.
        typed: whether the template wrote a placeholder; otherwise it is the mark from a content.
    """

    start: int
    stop: int
    kind: MediumKind
    typed: bool


def detect_media_style(template: ChatTemplate, placeholder_formats: PlaceholderFormats) -> MediaStyle:
    """Detect how a template accepts media, by rendering probes."""
    text_parts = [{"type": "text", "text": "y"}]
    listed = "y" in _render_answer(template, text_parts) and "y" not in _render_answer(template, "y")
    answer: Any = text_parts if listed else "y"
    typed = set()
    for kind, placeholder_format in placeholder_formats.items():
        user_content = [{"type": kind}, {"type": "text", "text": "x"}]
        output = _try_render(template, user_content, answer)
        if output.count(placeholder_format.placeholder) == 1 and "x" in output and "y" in output:
            typed.add(kind)
    return MediaStyle(frozenset(typed), listed)


def _render_answer(template: ChatTemplate, answer: Any) -> str:
    """Return the output for an answer; "" if an empty answer renders the same."""
    user_content: Any = "x" if isinstance(answer, str) else [{"type": "text", "text": "x"}]
    output = _try_render(template, user_content, answer)
    return output if output != _try_render(template, user_content, "") else ""


def _try_render(template: ChatTemplate, user_content: Any, answer: Any) -> str:
    messages = [{"role": "user", "content": user_content}, {"role": "assistant", "content": answer}]
    try:
        return template.render(messages).text
    except RenderError:
        return ""


def convert_media_messages(messages: list[dict[str, Any]], media_style: MediaStyle) -> tuple[list[dict[str, Any]], str]:
    """Convert messages to a template's media style; also return the mark of a medium.

    Raises:
        RenderError: the messages use every candidate mark.
    """
    mark = _choose_unused_mark(messages)
    return [_convert_media_message(message, media_style, mark) for message in messages], mark


def _convert_media_message(message: dict[str, Any], media_style: MediaStyle, mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        if media_style.listed:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message
    if not isinstance(content, list) or all(
        part.get("type") == "text" or part.get("type") in media_style.typed for part in content
    ):
        return message
    texts = [
        part if part.get("type") in media_style.typed else {"type": "text", "text": part.get("text", mark)}
        for part in content
    ]
    if all(part["type"] == "text" for part in texts) and not media_style.listed:
        return {**message, "content": "".join(part["text"] for part in texts)}
    return {**message, "content": texts}


def _choose_unused_mark(messages: list[dict[str, Any]]) -> str:
    for mark in map(chr, _MEDIUM_MARK_CODES):
        if not contains_match(messages, re.compile(mark)):
            return mark
    raise RenderError("it uses every private-use character that could mark a medium")


def find_placeholder_spans(
    text: str,
    control: Sequence[int],
    kinds: Sequence[MediumKind],
    mark: str,
    placeholder_formats: PlaceholderFormats,
    media_style: MediaStyle,
) -> list[PlaceholderSpan]:
    """Locate the text that a template wrote for each medium.

    ``control`` holds the offsets of control tokens; ``mark`` replaces media in strings.

    Raises:
        RenderError: the template omitted, repeated or reordered media.
    """
    spans = [
        PlaceholderSpan(position, position + len(placeholder_formats[kind].placeholder), kind, typed=True)
        for position in control
        for kind in media_style.typed
        if text.startswith(placeholder_formats[kind].placeholder, position)
    ]
    strings = [kind for kind in kinds if kind not in media_style.typed]
    marks = [match.start() for match in re.finditer(re.escape(mark), text)] if strings else []
    if len(marks) != len(strings):
        raise RenderError(_describe_wrong_count(strings, len(marks)))
    spans += [
        PlaceholderSpan(position, position + len(mark), kind, typed=False)
        for position, kind in zip(marks, strings, strict=True)
    ]
    spans.sort()
    if [span.kind for span in spans] != list(kinds):
        raise RenderError(_describe_wrong_count(kinds, len(spans)))
    return spans


def _describe_wrong_count(kinds: Sequence[MediumKind], count: int) -> str:
    media = format_count(len(kinds), "medium").replace("mediums", "media")
    if count == len(kinds):
        return "the template writes its media in another order"
    return f"the template writes {format_count(count, 'placeholder')} for its {media}"


def list_media_owners(messages: Sequence[dict[str, Any]], placeholder_formats: PlaceholderFormats) -> list[int]:
    return [
        number
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type") in placeholder_formats
    ]
