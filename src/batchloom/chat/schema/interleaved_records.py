"""Records of texts with media: placeholders, typed parts, lists side by side, and media with a caption."""

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

# Between texts that follow one another in a list, which are paragraphs of a page.
_PARAGRAPH_SEPARATOR = "\n\n"


def make_interleaved_reader(schema: Schema) -> Callable[[Row], InterleavedText]:
    """A reader of texts with media.

    A text is a string with placeholders (``<image>``) and media beside it, in front of which all media are put where
    it has none; a list of typed parts; or a list beside lists of media, of which at each place one holds something
    (OBELICS).

    Args:
        schema: of the records.

    The function raises UnusableRecordError for a placeholder without its medium, a medium without its placeholder or
    without any text, and a medium that is none, with the place in the record.
    """
    column = RoleColumn.of(schema, "text")
    name = column.names[0]

    def read(row: Row) -> InterleavedText:
        value = column.get(row)
        if isinstance(value, list) and not any(isinstance(one, Mapping) for one in value):
            return _merge_parallel_lists(schema, row, value, name)
        taker = MediaExtractor(schema, row)
        if isinstance(value, str) and not has_placeholder(value):
            parts: list[Any] = [*taker.leading(), {"type": "text", "text": value}]
        elif isinstance(value, str | list):
            parts = taker.content(value, name)
        elif value is None and (found := len(taker.leading())):
            raise UnusableRecordError(
                f"holds {_format_media_count(found)} and no text in column {name!r}; write what is said of it "
                f"there, or leave "
                "the record out"
            )
        else:
            raise not_text_error(row, column, value)
        taker.check_all_used()
        return _merge_parts(parts, taker.media, name)

    return read


def _format_media_count(media: int) -> str:
    return "a medium" if media == 1 else f"{media:,} media"


def _merge_parts(parts: Sequence[Any], media: list[Medium], name: str) -> InterleavedText:
    """Parts as texts and media, each part of a medium with the number of its own."""
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
            found = (
                f"a part of type {part.get('type')!r:.40}"
                if isinstance(part, dict)
                else describe_json_type(part)
            )
            raise UnusableRecordError(
                f"column {name!r} holds {found}, which is no text and no medium; leave it out"
            )
    return InterleavedText(texts, ordered)


def _merge_parallel_lists(
    schema: Schema, row: Row, texts: Sequence[Any], name: str
) -> InterleavedText:
    """Lists of texts and of media, of which at each place one holds something and the others null."""
    beside = _read_media_lists(schema, row, name, len(texts))
    found = InterleavedText([""])
    follows = False
    for at, text in enumerate(texts):
        here = [one for one in beside if is_non_empty(one[2][at])]
        if len(here) + is_non_empty(text) > 1:
            names = [*([name] if is_non_empty(text) else []), *(column for _, column, _ in here)]
            raise UnusableRecordError(
                f"place {at} holds something in each of {' and '.join(names)}: write null where another list holds "
                "what comes next"
            )
        if here:
            kind, column, values = here[0]
            found.media.append(parse_medium(kind, values[at], f"{column}[{at}]"))
            found.texts.append("")
        elif is_non_empty(text):
            if not isinstance(text, str):
                raise UnusableRecordError(
                    f"{name}[{at}] holds {describe_json_type(text)}, not text"
                )
            found.texts[-1] += _PARAGRAPH_SEPARATOR + text if follows else text
        follows = not here and (follows or is_non_empty(text))
    return found


def _read_media_lists(
    schema: Schema, row: Row, name: str, places: int
) -> list[tuple[MediumKind, str, Sequence[Any]]]:
    """The lists of media beside a list of texts, which are as long."""
    found: list[tuple[MediumKind, str, Sequence[Any]]] = []
    for kind in MEDIUM_KINDS:
        for column in schema.columns.get(f"{kind}s", ()):
            value = row.get(column)
            if not is_non_empty(value):
                continue
            if not isinstance(value, list | tuple) or len(value) != places:
                shown = (
                    f"{format_count(len(value), 'place')}"
                    if isinstance(value, list | tuple)
                    else describe_json_type(value)
                )
                raise UnusableRecordError(
                    f"column {name!r} has {format_count(places, 'place')} and column {column!r} {shown}: of lists that "
                    "stand side by side each holds null where another one holds something"
                )
            found.append((kind, column, value))
    return found
