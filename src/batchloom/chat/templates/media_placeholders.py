"""Forms in which templates accept media, and the text that they write for each."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from batchloom.chat.templates.chat_template import ChatTemplate, RenderError
from batchloom.chat.templates.marks import contains_match
from batchloom.core.medium import TEXT_MARKER_PATTERN, MediumKind
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
class ContentStyle:
    """Form in which a template accepts contents."""

    typed: frozenset[MediumKind] = frozenset()  # Media whose parts become placeholders; others become strings
    texts: Literal["strings", "parts", "any"] = "any"  # Texts as strings, lists of parts, or both


# Change of contents for a template that takes texts as strings alone.
JOINED_PARTS = "takes texts as strings, and gets the text parts of a content joined"


# Change of texts with placeholders in a record without a column of such media.
TEXT_PLACEHOLDERS = (
    "gets markers of media, such as <image> or <img>PATH</img>, as text from records without a column of such media"
)


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


# Texts of a probe, which no template changes.
_SYSTEM = "1701"
_QUESTION = "2803"
_ANSWER = "3907"


def detect_content_style(template: ChatTemplate, placeholder_formats: PlaceholderFormats) -> ContentStyle:
    """Detect how a template accepts contents, by rendering probes."""
    as_strings, as_parts = (_render_probe(template, form) for form in (str, _make_parts))
    takes_strings = _QUESTION in as_strings and _ANSWER in as_strings
    # A template that takes no parts leaves them out, or writes them as Python does.
    takes_parts = _QUESTION in as_parts and _ANSWER in as_parts and "'type'" not in as_parts
    texts: Literal["strings", "parts", "any"] = "any"
    if takes_strings != takes_parts:
        texts = "strings" if takes_strings else "parts"
    form = _make_parts if texts == "parts" else str
    typed = set()
    for kind, placeholder_format in placeholder_formats.items():
        output = _render_probe(template, form, {"type": kind})
        placeholders = output.count(placeholder_format.placeholder)
        if placeholders == 1 and _QUESTION in output and _ANSWER in output:
            typed.add(kind)
    return ContentStyle(frozenset(typed), texts)


def _make_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _render_probe(template: ChatTemplate, form: Callable[[str], Any], medium: dict[str, str] | None = None) -> str:
    """Render a question, with a medium or a system turn that the template takes."""
    question = form(_QUESTION) if medium is None else [medium, *_make_parts(_QUESTION)]
    pair = [{"role": "user", "content": question}, {"role": "assistant", "content": form(_ANSWER)}]
    system = [] if medium else [{"role": "system", "content": form(_SYSTEM)}]
    for messages in ([*system, *pair], pair):
        try:
            return template.render(messages).text
        except RenderError:
            continue
    return ""


def convert_contents(
    messages: list[dict[str, Any]], style: ContentStyle
) -> tuple[list[dict[str, Any]], str, tuple[str, ...]]:
    """Convert contents to a template's style.

    Returns the messages, the mark of a medium that is put into a string, and what was changed, in words.

    Raises:
        RenderError: the messages use every candidate mark.
    """
    mark = _choose_unused_mark(messages)
    converted = [_convert_message(message, style, mark) for message in messages]
    is_joined = style.texts == "strings" and any(
        isinstance(before.get("content"), list) and isinstance(after.get("content"), str)
        for before, after in zip(messages, converted, strict=True)
    )
    return converted, mark, (JOINED_PARTS,) if is_joined else ()


def _convert_message(message: dict[str, Any], style: ContentStyle, mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _make_parts(content)} if style.texts == "parts" else message
    if not isinstance(content, list):
        return message
    parts = [
        part if part.get("type") in ("text", *style.typed) else {"type": "text", "text": part.get("text", mark)}
        for part in content
    ]
    is_text = all(part["type"] == "text" for part in parts)
    if is_text and (style.texts == "strings" or (style.texts == "any" and parts != content)):
        # As templates write them that take parts.
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


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
    style: ContentStyle,
) -> list[PlaceholderSpan]:
    """Locate the text that a template wrote for each medium.

    ``control`` holds the offsets of control tokens; ``mark`` replaces media in strings.

    Raises:
        RenderError: the template omitted, repeated or reordered media.
    """
    spans = [
        PlaceholderSpan(position, position + len(placeholder_formats[kind].placeholder), kind, typed=True)
        for position in control
        for kind in style.typed
        if text.startswith(placeholder_formats[kind].placeholder, position)
    ]
    strings = [kind for kind in kinds if kind not in style.typed]
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


def describe_markers(messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the note about markers of media in texts of records without media."""
    contents = [message.get("content") for message in messages]
    return (TEXT_PLACEHOLDERS,) if contains_match(contents, TEXT_MARKER_PATTERN) else ()


def list_media_owners(messages: Sequence[dict[str, Any]], kinds: Container[str]) -> list[int]:
    """Return the message index of each medium of these kinds."""
    return [
        number
        for number, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("type") in kinds
    ]
