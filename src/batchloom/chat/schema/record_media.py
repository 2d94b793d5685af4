"""Media in records: typed parts, placeholders in texts, and frames of videos.

A placeholder such as ``<image>`` stands for the next image of a record that has a column of images. In a record without
such a column it is text.
Parts are those of transformers (``{"type": "image", "url": ...}``) and of OpenAI (``image_url``,
``input_audio``); placeholders (``<image>``, ``<audio>``, ``<video>``) those of LLaVA and LLaMA-Factory.
"""

import base64
import binascii
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast, final

import orjson

from batchloom.chat.schema.record_keys import PART_KEYS, check_keys, list_messages
from batchloom.chat.schema.schemas import Row, Schema, is_non_empty
from batchloom.core.document import Conversation, InterleavedText
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind, make_placeholder_pattern
from batchloom.core.wording import describe_json_type, format_count

_DATA_URI = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*", re.ASCII)
# Beginnings of media files in base64 (JPEG, MP3; PNG, GIF, RIFF, MP3 with tags, FLAC, Ogg, TIFF, BMP; AVIF, MP4 and
# MOV; WebM). No file name of media begins like this and has that many letters without a dot.
_BASE64_SIGNATURES = (
    "/9j/",
    "//",
    "iVBORw0KGgo",
    "R0lGOD",
    "UklGR",
    "SUQz",
    "ZkxhQ",
    "T2dnU",
    "SUkqA",
    "TU0AK",
    "Qk",
    "AAAA",
    "GkXfo",
)
_MEDIUM_TYPES: dict[str, MediumKind] = {
    **{kind: kind for kind in MEDIUM_KINDS},
    **{f"{kind}_url": kind for kind in MEDIUM_KINDS},
    "input_image": "image",
    "input_audio": "audio",
}
# Keys of a part that hold its content, in addition to the name of its type; ``value`` is LLaMA-Factory's, ``source``
# Anthropic's.
_CONTENT_KEYS = ("url", "path", "base64", "data", "bytes", "value", "source")


class MediumIndex(int):
    """Index of a medium in its record; its type excludes numbers of the data."""


def is_extracted_medium(part: object) -> bool:
    """Return whether a part refers to a medium that `MediaExtractor` has extracted."""
    return isinstance(part, dict) and isinstance(part.get("medium"), MediumIndex)


def parse_medium(kind: MediumKind, value: object, field_path: str) -> Medium:
    """Parse a path, a URL, bytes, base64, or an object that holds one of these.

    Raises:
        UnusableRecordError: the value is not a medium.
    """
    if isinstance(value, Mapping):
        return _parse_medium_object(kind, value, field_path)
    if isinstance(value, bytes | bytearray):
        if not value:
            raise UnusableRecordError(f"{field_path} is empty: the {kind} has no bytes")
        return Medium(kind, "", bytes(value))
    if not isinstance(value, str) or not value.strip():
        problem = "is empty" if value == "" else f"holds {describe_json_type(value)}"
        raise UnusableRecordError(f"{field_path} {problem}, not the path, URL, bytes or base64 of the {kind}")
    if uri := _DATA_URI.match(value):
        return Medium(kind, "", _decode_base64(value[uri.end() :], field_path))
    if value.startswith(_BASE64_SIGNATURES) and _BASE64.fullmatch(value):
        return Medium(kind, "", _decode_base64(value, field_path))
    if value[:5].lower() == "data:":
        raise UnusableRecordError(f"{field_path} is a data: URI that is not base64; write it as base64")
    return Medium(kind, value)


def _parse_medium_object(kind: MediumKind, value: Mapping[str, Any], field_path: str) -> Medium:
    """Parse ``{"url": ...}``, ``{"data": ...}`` or Hugging Face's bytes and path."""
    if is_non_empty(value.get("bytes")):
        return parse_medium(kind, value["bytes"], f"{field_path}.bytes")
    for name in ("base64", "data"):
        if is_non_empty(value.get(name)):
            if not isinstance(value[name], str):
                return parse_medium(kind, value[name], f"{field_path}.{name}")
            return Medium(kind, "", _decode_base64(value[name], f"{field_path}.{name}"))
    for name in ("url", "path", kind, f"{kind}_url", "value", "source"):
        if is_non_empty(value.get(name)):
            return parse_medium(kind, value[name], f"{field_path}.{name}")
    keys = ", ".join(repr(str(key)) for key in value) or "nothing"
    raise UnusableRecordError(f"{field_path} has {keys}, and no url, path, bytes or base64 of the {kind}")


def _decode_base64(text: str, field_path: str) -> bytes:
    text = _DATA_URI.sub("", text, count=1)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise UnusableRecordError(f"{field_path} is not base64: {error}") from None
    if not data:
        raise UnusableRecordError(f"{field_path} is empty base64")
    return data


def is_medium_part(part: object) -> bool:
    return _get_part_kind(part) is not None


@final
class MediaExtractor:
    """Extraction of the media of one record."""

    def __init__(self, schema: Schema, row: Row) -> None:
        self._schema = schema
        self._row = row
        # Media extracted so far; a part holds the index of its medium.
        self.media: list[Medium] = []
        self._indices: dict[Medium, MediumIndex] = {}
        self._column_media = {kind: _list_column_media(schema, row, kind) for kind in MEDIUM_KINDS}
        self._used_indices: dict[MediumKind, set[int]] = {kind: set() for kind in MEDIUM_KINDS}
        kinds = [kind for kind in MEDIUM_KINDS if self._column_media[kind]]
        self._placeholder = _compile_placeholder(tuple(kinds))

    def has_placeholder(self, text: str) -> bool:
        """Return whether a text has a placeholder of a medium that the record has."""
        return self._placeholder.search(text) is not None

    def extract_row(self) -> dict[str, Any]:
        """Return the record with parts for its media, and without the media columns."""
        columns = self._schema.columns
        left_out = {name for role in _MEDIA_ROLES for name in columns.get(role, ())}
        row = {name: value for name, value in self._row.items() if name not in left_out}
        for name in (*columns.get("system", ()), *columns.get("history", ())):
            self._check_no_placeholders(row.get(name), name)
        self._join_context(row)
        for role, speaker in _COLUMN_ROLES.items():
            for name in columns.get(role, ()):
                if is_non_empty(row.get(name)):
                    row[name] = self._extract_column(row[name], name, speaker)
        if "rejected" in columns:
            self._extract_sides(row)
        return row

    def _extract_sides(self, row: dict[str, Any]) -> None:
        """Extract the two sides of a pair, which share the media of their prompt.

        Placeholders of a complete conversation begin with the first medium, those of an answer with the first one
        after the prompt.
        """
        after_prompt = all_used = _copy(self._used_indices)
        for role in ("chosen", "rejected"):
            (name,) = self._schema.columns[role]
            value = row.get(name)
            if not is_non_empty(value):
                continue
            turns = list_messages(value)
            questions = [n for n, turn in enumerate(turns) if turn.get("role", turn.get("from")) in _QUESTION_ROLES]
            self._used_indices = {kind: set() for kind in MEDIUM_KINDS} if questions else _copy(after_prompt)
            if questions and "prompt" not in self._schema.columns:
                # An answer in the other column follows the last question of this one.
                head = self._extract_column(turns[: questions[-1] + 1], name, "assistant")
                after_prompt = _copy(self._used_indices)
                row[name] = [*head, *self._extract_column(turns[questions[-1] + 1 :], name, "assistant")]
            else:
                row[name] = self._extract_column(value, name, "assistant")
            all_used = {kind: all_used[kind] | self._used_indices[kind] for kind in MEDIUM_KINDS}
        self._used_indices = all_used

    def check_all_used(self) -> None:
        """Raise if a medium in the media columns has no placeholder."""
        for kind, column_media in self._column_media.items():
            used = self._used_indices[kind]
            unused_index = next((index for index in range(len(column_media)) if index not in used), None)
            if unused_index is not None:
                field_path, _ = column_media[unused_index]
                raise UnusableRecordError(
                    f"holds {format_count(len(column_media), kind)} and {format_count(len(used), 'placeholder')} for "
                    f"them: {field_path} has none; write <{kind}> where it belongs, or leave it out"
                )

    def extract_leading(self) -> list[dict[str, Any]]:
        """Return parts for all media of the media columns, which precede the text."""
        return [
            self._extract_next(kind, "the text") for kind in MEDIUM_KINDS for _ in range(len(self._column_media[kind]))
        ]

    def _join_context(self, row: dict[str, Any]) -> None:
        """Append the context to the prompt now, because parts cannot be joined later."""
        columns = self._schema.columns
        prompts = [name for name in columns.get("prompt", ()) if isinstance(row.get(name), str)]
        contexts = [name for name in columns.get("context", ()) if isinstance(row.get(name), str)]
        prompts, contexts = ([name for name in some if row[name].strip()] for some in (prompts, contexts))
        if prompts and contexts and self.has_placeholder(row[prompts[0]] + row[contexts[0]]):
            row[prompts[0]] = f"{row[prompts[0]]}\n{row.pop(contexts[0])}"

    def _extract_column(self, value: Any, name: str, speaker: str) -> Any:
        if isinstance(value, str) and speaker:
            parts = self.extract_content(value, name)
            return value if parts is value else {"role": speaker, "content": parts}
        if isinstance(value, str) and value.lstrip().startswith("["):
            with suppress(orjson.JSONDecodeError):  # The reader of the turns reports the error.
                value = orjson.loads(value)
        if isinstance(value, list):
            return [self._extract_message(message, f"{name}[{index}]") for index, message in enumerate(value)]
        return self._extract_message(value, name)

    def _extract_message(self, message: Any, field_path: str) -> Any:
        if not isinstance(message, dict):
            return message
        new_message = message
        for key in ("content", "value", "output"):
            content = message.get(key)
            if isinstance(content, str | list):
                new_content = self.extract_content(content, f"{field_path}.{key}")
                if new_content is not content:
                    new_message = {**new_message, key: new_content}
        return new_message

    def extract_content(self, content: str | list[Any], field_path: str) -> Any:
        """Return a content with parts for its media; the same object if it has none."""
        if isinstance(content, str):
            return self._split(content, field_path) if self.has_placeholder(content) else content
        parts: list[Any] = []
        for index, part in enumerate(content):
            parts += self._extract_part(part, f"{field_path}[{index}]")
        return parts

    def _extract_part(self, part: Any, field_path: str) -> Iterator[Any]:
        kind = _get_part_kind(part)
        if kind is not None:
            check_keys(part, PART_KEYS, field_path)
            yield self._extract_typed_part(part, kind, field_path)
        elif (
            isinstance(part, dict) and part.get("type") == "tool_result" and isinstance(part.get("content"), str | list)
        ):
            yield {**part, "content": self.extract_content(part["content"], f"{field_path}.content")}
        elif isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") == "text":
            if self.has_placeholder(part["text"]):
                check_keys(part, PART_KEYS, field_path)
                yield from self._split(part["text"], f"{field_path}.text")
            else:
                yield part
        else:
            yield part

    def _extract_typed_part(self, part: dict[str, Any], kind: MediumKind, field_path: str) -> dict[str, Any]:
        typed_value = part.get(part["type"], part.get(kind))
        if is_non_empty(typed_value):
            return self._add_medium(parse_medium(kind, typed_value, f"{field_path}.{part['type']}"))
        if any(is_non_empty(part.get(name)) for name in _CONTENT_KEYS):
            return self._add_medium(_parse_medium_object(kind, part, field_path))
        number = part.get("index")
        if number is not None:
            return self._extract_indexed(kind, number, field_path)
        return self._extract_next(kind, field_path)

    def _split(self, text: str, field_path: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for index, segment in enumerate(self._placeholder.split(text)):
            if index % 2:
                parts.append(self._extract_next(cast("MediumKind", segment), field_path))
            elif segment:
                parts.append({"type": "text", "text": segment})
        return parts

    def _check_no_placeholders(self, value: object, name: str) -> None:
        """Raise if a column that cannot hold media has a placeholder."""
        if isinstance(value, list | tuple):
            for item in value:
                self._check_no_placeholders(item, name)
        elif isinstance(value, str) and (match := self._placeholder.search(value)):
            raise UnusableRecordError(
                f"column {name!r} has a placeholder {match.group()}, but media are read only in the turns, the prompt "
                "and the response; write the record as messages"
            )

    def _extract_next(self, kind: MediumKind, field_path: str) -> dict[str, Any]:
        used = self._used_indices[kind]
        column_media = self._column_media[kind]
        number = next((index for index in range(len(column_media)) if index not in used), None)
        if number is None:
            raise UnusableRecordError(
                f"{field_path} has a placeholder <{kind}> without its {kind}: the record holds "
                f"{format_count(len(column_media), kind)} next to the text; add it, or remove the placeholder"
            )
        used.add(number)
        return self._add_medium(column_media[number][1])

    def _extract_indexed(self, kind: MediumKind, number: object, field_path: str) -> dict[str, Any]:
        """Return the part of the medium at ``index`` of its column, as in TRL's data sets."""
        column_media = self._column_media[kind]
        if type(number) is not int or not 0 <= number < len(column_media):
            raise UnusableRecordError(
                f"{field_path} has index {number!r:.40}, but the record holds "
                f"{format_count(len(column_media), kind)} next to the text: the index can be 0 to "
                f"{len(column_media) - 1}"
            )
        self._used_indices[kind].add(number)
        return self._add_medium(column_media[number][1])

    def _add_medium(self, medium: Medium) -> dict[str, Any]:
        # The two sides of a pair repeat the media of their prompt, and equal parts have equal indices.
        index = self._indices.get(medium)
        if index is None:
            index = self._indices[medium] = MediumIndex(len(self.media))
            self.media.append(medium)
        return {"type": medium.kind, "medium": index}


@functools.cache
def _compile_placeholder(kinds: tuple[MediumKind, ...]) -> re.Pattern[str]:
    """Return the pattern of the placeholders of these kinds."""
    return make_placeholder_pattern(kinds) if kinds else re.compile("(?!)")


def _copy(used_indices: Mapping[MediumKind, set[int]]) -> dict[MediumKind, set[int]]:
    return {kind: set(indices) for kind, indices in used_indices.items()}


def _get_part_kind(part: object) -> MediumKind | None:
    """Return the medium kind of a typed part, or None."""
    part_type = part.get("type") if isinstance(part, dict) else None
    return _MEDIUM_TYPES.get(part_type) if isinstance(part_type, str) else None


_MEDIA_ROLES = (*(f"{kind}s" for kind in MEDIUM_KINDS), "rejected_images")
_QUESTION_ROLES = ("user", "human")
# Columns of speech and the role of a text in them; messages name their own role.
_COLUMN_ROLES = {"messages": "", "prompt": "user", "response": "assistant", "completion": "assistant"}


def _list_column_media(schema: Schema, row: Row, kind: MediumKind) -> list[tuple[str, Medium]]:
    """Return the position and value of each medium of a kind in the media columns."""
    column_media: list[tuple[str, Medium]] = []
    for name in schema.columns.get(f"{kind}s", ()):
        value = row.get(name)
        if isinstance(value, list | tuple):
            items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        else:
            items = [(f"column {name!r}", value)] if is_non_empty(value) else []
        column_media += [(field_path, parse_medium(kind, item, field_path)) for field_path, item in items]
    return column_media


def reorder_media(conversation: Conversation, media: list[Medium]) -> Conversation:
    """Sort media in the order of their parts, which become ``{"type": "image"}``."""
    if not media:
        return conversation
    ordered: list[Medium] = []
    messages = []
    for message in conversation.messages:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_extracted_medium, content)):
            messages.append(message)
            continue
        ordered += [media[part["medium"]] for part in content if is_extracted_medium(part)]
        plain = [{"type": part["type"]} if is_extracted_medium(part) else part for part in content]
        messages.append({**message, "content": plain})
    return replace(conversation, messages=messages, media=ordered)


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
        return replace(document, texts=[document.texts[0], *texts], media=media)
    frame_groups = iter(frames_by_medium)
    messages = []
    for message in document.messages:
        parts: list[Any] = []
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            is_medium = part.get("type") in MEDIUM_KINDS
            parts += [{"type": frame.kind} for frame in next(frame_groups)] if is_medium else [part]
        messages.append({**message, "content": parts} if parts else message)
    return replace(document, messages=messages, media=media)
