"""Media in records: typed parts, and placeholders in texts with lists of media beside them.

Parts are those of transformers (``{"type": "image", "url": ...}``) and of OpenAI (``image_url``,
``input_audio``); placeholders (``<image>``, ``<audio>``, ``<video>``) those of LLaVA and LLaMA-Factory.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast, final

import orjson

from batchloom.chat.schema.record_columns import Row, is_non_empty
from batchloom.chat.schema.record_keys import PART_KEYS, check_keys
from batchloom.chat.schema.schemas import Schema
from batchloom.core.conversation import Conversation
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind
from batchloom.core.wording import describe_json_type, format_count

_PLACEHOLDER = re.compile("<(image|audio|video)>")
_DATA_URI = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*", re.ASCII)
# How files of media begin, in base64 (JPEG, MP3; PNG, GIF, RIFF, MP3 with tags, FLAC, Ogg, TIFF, BMP; AVIF, MP4 and
# MOV; WebM). A name that does so, of so many letters and no dot, is none of a file of media.
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
# Where a part keeps what it stands for, beside the name of its type.
_CONTENT_KEYS = ("url", "path", "base64", "data", "bytes")


class MediumIndex(int):
    """The number of a medium in its record, inside the part that stands for it: never a number of the data."""


def has_placeholder(text: str) -> bool:
    """Whether a text has a placeholder for a medium."""
    return _PLACEHOLDER.search(text) is not None


def is_extracted_medium(part: object) -> bool:
    """Whether a part of a content stands for a medium that :func:`make_media_reader` has taken out of its record."""
    return isinstance(part, dict) and isinstance(part.get("medium"), MediumIndex)


def make_media_reader(
    schema: Schema, read: Callable[[Row], Conversation]
) -> Callable[[Row], Conversation]:
    """A reader of conversations with media: each stands in a content where its placeholder or its part was.

    Contents that hold media become lists of parts, ``{"type": "image"}`` for an image.

    Args:
        schema: of the records.
        read: reads the conversation of a record.

    The function raises UnusableRecordError for a placeholder without its medium, a medium without its
    placeholder, and a medium that is none, with the place in the record.
    """

    def media_read(row: Row) -> Conversation:
        taker = MediaExtractor(schema, row)
        conversation = read(taker.row())
        taker.check_all_used()
        return _reorder_media(conversation, taker.media)

    return media_read


def parse_medium(kind: MediumKind, value: object, where: str) -> Medium:
    """The medium that a value of a record is: a path, a URL, bytes, base64, or an object that holds one of these.

    Raises:
        UnusableRecordError: it is none.
    """
    if isinstance(value, Mapping):
        return _parse_medium_object(kind, value, where)
    if isinstance(value, bytes | bytearray):
        if not value:
            raise UnusableRecordError(f"{where} is empty: the {kind} has no bytes")
        return Medium(kind, "", bytes(value))
    if not isinstance(value, str) or not value.strip():
        found = "is empty" if value == "" else f"holds {describe_json_type(value)}"
        raise UnusableRecordError(
            f"{where} {found}, not the path, URL, bytes or base64 of the {kind}"
        )
    if uri := _DATA_URI.match(value):
        return Medium(kind, "", _decode_base64(value[uri.end() :], where))
    if value.startswith(_BASE64_SIGNATURES) and _BASE64.fullmatch(value):
        return Medium(kind, "", _decode_base64(value, where))
    if value[:5].lower() == "data:":
        raise UnusableRecordError(f"{where} is a data: URI that is not base64; write it as base64")
    return Medium(kind, value)


def _parse_medium_object(kind: MediumKind, value: Mapping[str, Any], where: str) -> Medium:
    """What an object holds: ``{"url": ...}``, ``{"bytes": ..., "path": ...}`` of Hugging Face, ``{"data": ...}``."""
    if is_non_empty(value.get("bytes")):
        return parse_medium(kind, value["bytes"], f"{where}.bytes")
    for name in ("base64", "data"):
        if is_non_empty(value.get(name)):
            if not isinstance(value[name], str):
                return parse_medium(kind, value[name], f"{where}.{name}")
            return Medium(kind, "", _decode_base64(value[name], f"{where}.{name}"))
    for name in ("url", "path", kind, f"{kind}_url"):
        if is_non_empty(value.get(name)):
            return parse_medium(kind, value[name], f"{where}.{name}")
    keys = ", ".join(repr(str(key)) for key in value) or "nothing"
    raise UnusableRecordError(
        f"{where} has {keys}, and no url, path, bytes or base64 of the {kind}"
    )


def _decode_base64(text: str, where: str) -> bytes:
    text = _DATA_URI.sub("", text, count=1)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise UnusableRecordError(f"{where} is no base64: {error}") from None
    if not data:
        raise UnusableRecordError(f"{where} is base64 of nothing")
    return data


def is_medium_part(part: object) -> bool:
    """Whether a part of a record is typed as a medium."""
    return _get_part_kind(part) is not None


@final
class MediaExtractor:
    """Takes the media out of one record.

    Attributes:
        media: those taken so far; a part holds the number of its own.
    """

    def __init__(self, schema: Schema, row: Row) -> None:
        self._schema, self._row = schema, row
        self.media: list[Medium] = []
        self._beside = {kind: _list_column_media(schema, row, kind) for kind in MEDIUM_KINDS}
        self._taken: dict[MediumKind, set[int]] = {kind: set() for kind in MEDIUM_KINDS}

    def row(self) -> dict[str, Any]:
        """The record with parts for its media, and without the columns of lists."""
        columns = self._schema.columns
        left_out = {name for kind in MEDIUM_KINDS for name in columns.get(f"{kind}s", ())}
        row = {name: value for name, value in self._row.items() if name not in left_out}
        for name in (*columns.get("system", ()), *columns.get("history", ())):
            _check_no_placeholders(row.get(name), name)
        self._join_context(row)
        for role, speaker in _COLUMN_ROLES.items():
            for name in columns.get(role, ()):
                if is_non_empty(row.get(name)):
                    row[name] = self._column(row[name], name, speaker)
        return row

    def check_all_used(self) -> None:
        """Raise where media stand beside the text that no placeholder asked for."""
        for kind, found in self._beside.items():
            used = self._taken[kind]
            left = next((at for at in range(len(found)) if at not in used), None)
            if left is not None:
                where, _ = found[left]
                raise UnusableRecordError(
                    f"holds {format_count(len(found), kind)} and {format_count(len(used), 'placeholder')} for "
                    f"them: {where} "
                    f"stands nowhere; write <{kind}> where it belongs, or leave it out"
                )

    def leading(self) -> list[dict[str, Any]]:
        """Parts for all media that stand beside the text, in front of which they are put."""
        return [
            self._next(kind, "the text")
            for kind in MEDIUM_KINDS
            for _ in range(len(self._beside[kind]))
        ]

    def _join_context(self, row: dict[str, Any]) -> None:
        """Put the context behind the prompt, as it is without media: parts cannot be joined any more."""
        columns = self._schema.columns
        prompts = [name for name in columns.get("prompt", ()) if isinstance(row.get(name), str)]
        more = [name for name in columns.get("context", ()) if isinstance(row.get(name), str)]
        prompts, more = ([name for name in some if row[name].strip()] for some in (prompts, more))
        if prompts and more and _PLACEHOLDER.search(row[prompts[0]] + row[more[0]]):
            row[prompts[0]] = f"{row[prompts[0]]}\n{row.pop(more[0])}"

    def _column(self, value: Any, name: str, speaker: str) -> Any:
        if speaker == "":
            if isinstance(value, str) and value.lstrip().startswith("["):
                value = _parse_turns(value)
            if not isinstance(value, list):
                return value
            return [self._message(one, f"{name}[{at}]") for at, one in enumerate(value)]
        if isinstance(value, str):
            parts = self.content(value, name)
            return value if parts is value else {"role": speaker, "content": parts}
        if isinstance(value, list):
            return [self._message(one, f"{name}[{at}]") for at, one in enumerate(value)]
        return self._message(value, name)

    def _message(self, message: Any, where: str) -> Any:
        if not isinstance(message, dict):
            return message
        changed = message
        for key in ("content", "value"):
            content = message.get(key)
            if isinstance(content, str | list):
                made = self.content(content, f"{where}.{key}")
                if made is not content:
                    changed = {**changed, key: made}
        return changed

    def content(self, content: str | list[Any], where: str) -> Any:
        """A content with parts for its media; the same object where it has none."""
        if isinstance(content, str):
            return self._split(content, where) if _PLACEHOLDER.search(content) else content
        parts: list[Any] = []
        for at, part in enumerate(content):
            parts += self._part(part, f"{where}[{at}]")
        return parts

    def _part(self, part: Any, where: str) -> Iterator[Any]:
        kind = _get_part_kind(part)
        if kind is not None:
            check_keys(part, PART_KEYS, where)
            yield self._extract_typed_part(part, kind, where)
        elif (
            isinstance(part, dict)
            and isinstance(part.get("text"), str)
            and part.get("type") == "text"
        ):
            if _PLACEHOLDER.search(part["text"]):
                yield from self._split(part["text"], f"{where}.text")
            else:
                yield part
        else:
            yield part

    def _extract_typed_part(
        self, part: dict[str, Any], kind: MediumKind, where: str
    ) -> dict[str, Any]:
        own = part.get(part["type"], part.get(kind))
        if is_non_empty(own):
            return self._take(parse_medium(kind, own, f"{where}.{part['type']}"))
        if any(is_non_empty(part.get(name)) for name in _CONTENT_KEYS):
            return self._take(_parse_medium_object(kind, part, where))
        number = part.get("index")
        if number is not None:
            return self._numbered(kind, number, where)
        return self._next(kind, where)

    def _split(self, text: str, where: str) -> list[dict[str, Any]]:
        """A text cut at its placeholders."""
        parts: list[dict[str, Any]] = []
        for at, piece in enumerate(_PLACEHOLDER.split(text)):
            if at % 2:
                parts.append(self._next(cast("MediumKind", piece), where))
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _next(self, kind: MediumKind, where: str) -> dict[str, Any]:
        used, found = self._taken[kind], self._beside[kind]
        number = next((at for at in range(len(found)) if at not in used), None)
        if number is None:
            raise UnusableRecordError(
                f"{where} has a placeholder <{kind}> without its {kind}: the record holds "
                f"{format_count(len(found), kind)} "
                "beside the text; add it, or take the placeholder out"
            )
        used.add(number)
        return self._take(found[number][1])

    def _numbered(self, kind: MediumKind, number: object, where: str) -> dict[str, Any]:
        """The medium of a part that says which of the list it is (``index``, as TRL's data sets have it)."""
        found = self._beside[kind]
        if type(number) is not int or not 0 <= number < len(found):
            raise UnusableRecordError(
                f"{where} has index {number!r:.40}, and the record holds {format_count(len(found), kind)} beside "
                f"the text: "
                f"it can be 0 to {len(found) - 1}"
            )
        self._taken[kind].add(number)
        return self._take(found[number][1])

    def _take(self, medium: Medium) -> dict[str, Any]:
        self.media.append(medium)
        return {"type": medium.kind, "medium": MediumIndex(len(self.media) - 1)}


def _check_no_placeholders(value: object, name: str) -> None:
    """Raise where a column that holds no media asks for one."""
    if isinstance(value, list | tuple):
        for one in value:
            _check_no_placeholders(one, name)
    elif isinstance(value, str) and (found := _PLACEHOLDER.search(value)):
        raise UnusableRecordError(
            f"column {name!r} has a placeholder {found.group()}, and media are read in the turns, the prompt and the "
            "response alone; write the record as messages"
        )


def _get_part_kind(part: object) -> MediumKind | None:
    """The kind of a typed part; None where it is none of a medium."""
    named = part.get("type") if isinstance(part, dict) else None
    return _MEDIUM_TYPES.get(named) if isinstance(named, str) else None


# Columns that hold what is said, and whose turn a text in them is; of messages each says it itself.
_COLUMN_ROLES = {
    "messages": "",
    "prompt": "user",
    "response": "assistant",
    "completion": "assistant",
}


def _list_column_media(schema: Schema, row: Row, kind: MediumKind) -> list[tuple[str, Medium]]:
    """The media of a kind that stand beside the text, each with its place in the record."""
    found: list[tuple[str, Medium]] = []
    for name in schema.columns.get(f"{kind}s", ()):
        value = row.get(name)
        if not is_non_empty(value):
            continue
        if not isinstance(value, list | tuple):
            found.append((f"column {name!r}", parse_medium(kind, value, f"column {name!r}")))
            continue
        for at, one in enumerate(value):
            found.append((f"{name}[{at}]", parse_medium(kind, one, f"{name}[{at}]")))
    return found


def _parse_turns(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        # Whoever reads the turns says what is wrong with them.
        return text


def _reorder_media(conversation: Conversation, media: list[Medium]) -> Conversation:
    """The conversation with its media in the order of its parts, which lose their numbers."""
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
