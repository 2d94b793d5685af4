"""Records of texts with media: placeholders, parts, parallel lists and captions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchloom.chat.schema.prompt_answer import RoleColumn, not_text_error
from batchloom.chat.schema.record_columns import Row, is_non_empty
from batchloom.chat.schema.record_media import (
    MediaExtractor,
    has_placeholder,
    is_extracted_medium,
    parse_medium,
)
from batchloom.chat.schema.schemas import Schema
from batchloom.core.conversation import InterleavedText
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind
from batchloom.core.wording import describe_json_type, format_count

# Separates consecutive texts of a list, which are paragraphs of a page.
_PARAGRAPH_SEPARATOR = "\n\n"


def make_interleaved_reader(schema: Schema) -> Callable[[Row], InterleavedText]:
    """Return a reader of texts with media.

    Three layouts are read: a string with placeholders (``<image>``) and media columns, a list of typed parts, or
    parallel lists of texts and media; exactly one has a value at each index (OBELICS). In a string without
    placeholders all media come first.

    The reader raises UnusableRecordError, with the position in the record, for a placeholder without a medium, a
    medium without a placeholder or without text, and an invalid medium.
    """
    column = RoleColumn.from_schema(schema, "text")
    name = column.names[0]

    def read(row: Row) -> InterleavedText:
        value = column.get(row)
        if isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
            return _merge_parallel_lists(schema, row, value, name)
        extractor = MediaExtractor(schema, row)
        if isinstance(value, str) and not has_placeholder(value):
            parts: list[Any] = [*extractor.extract_leading(), {"type": "text", "text": value}]
        elif isinstance(value, str | list):
            parts = extractor.extract_content(value, name)
        elif value is None and (media_count := len(extractor.extract_leading())):
            raise UnusableRecordError(
                f"holds {_format_media_count(media_count)} and no text in column {name!r}; write its text there, or "
                "leave the record out"
            )
        else:
            raise not_text_error(row, column, value)
        extractor.check_all_used()
        return _merge_parts(parts, extractor.media, name)

    return read


def _format_media_count(media: int) -> str:
    return "a medium" if media == 1 else f"{media:,} media"


def _merge_parts(parts: Sequence[Any], media: list[Medium], name: str) -> InterleavedText:
    """Convert parts to texts and media."""
    texts, ordered = [""], []
    for part in parts:
        if is_extracted_medium(part):
            ordered.append(media[part["medium"]])
            texts.append("")
        elif isinstance(part, str):
            texts[-1] += part
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts[-1] += part["text"]
        else:
            description = (
                f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else describe_json_type(part)
            )
            raise UnusableRecordError(
                f"column {name!r} holds {description}, which is neither text nor a medium; leave it out"
            )
    return InterleavedText(texts, ordered)


def _merge_parallel_lists(schema: Schema, row: Row, texts: Sequence[Any], name: str) -> InterleavedText:
    """Merge parallel lists; at most one of them has a value at each index."""
    media_lists = _read_media_lists(schema, row, name, len(texts))
    merged_text = InterleavedText([""])
    follows_text = False
    for index, text in enumerate(texts):
        filled_lists = [media_list for media_list in media_lists if is_non_empty(media_list[2][index])]
        if len(filled_lists) + is_non_empty(text) > 1:
            names = [
                *([name] if is_non_empty(text) else []),
                *(column for _, column, _ in filled_lists),
            ]
            raise UnusableRecordError(
                f"index {index} has a value in each of {' and '.join(names)}: write null in all lists but one"
            )
        if filled_lists:
            kind, column, values = filled_lists[0]
            merged_text.media.append(parse_medium(kind, values[index], f"{column}[{index}]"))
            merged_text.texts.append("")
        elif is_non_empty(text):
            if not isinstance(text, str):
                raise UnusableRecordError(f"{name}[{index}] holds {describe_json_type(text)}, not text")
            merged_text.texts[-1] += _PARAGRAPH_SEPARATOR + text if follows_text else text
        follows_text = not filled_lists and (follows_text or is_non_empty(text))
    return merged_text


def _read_media_lists(
    schema: Schema, row: Row, name: str, text_count: int
) -> list[tuple[MediumKind, str, Sequence[Any]]]:
    """Return the media lists of a record, each as long as its list of texts."""
    media_lists: list[tuple[MediumKind, str, Sequence[Any]]] = []
    for kind in MEDIUM_KINDS:
        for column in schema.columns.get(f"{kind}s", ()):
            value = row.get(column)
            if not is_non_empty(value):
                continue
            if not isinstance(value, list | tuple) or len(value) != text_count:
                description = (
                    format_count(len(value), "item") if isinstance(value, list | tuple) else describe_json_type(value)
                )
                raise UnusableRecordError(
                    f"column {name!r} has {format_count(text_count, 'item')} and column {column!r} {description}: "
                    "parallel lists must have the same length, with null where another list has the value"
                )
            media_lists.append((kind, column, value))
    return media_lists
