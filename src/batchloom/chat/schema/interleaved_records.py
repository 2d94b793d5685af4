"""Records of texts with media: placeholders, typed parts, lists side by side, and media with a caption."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchloom.chat.schema.prompt_answer import Column, not_text
from batchloom.chat.schema.record_columns import Row, says_something
from batchloom.chat.schema.record_media import Taker, asks, is_medium, medium_of
from batchloom.chat.schema.schemas import Schema
from batchloom.core.conversation import Interleaved
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import KINDS, Kind, Medium
from batchloom.core.wording import counted, kind_of

# Between texts that follow one another in a list, which are paragraphs of a page.
_PARAGRAPH = "\n\n"


def interleaved_reader(schema: Schema) -> Callable[[Row], Interleaved]:
    """A reader of texts with media.

    A text is a string with placeholders (``<image>``) and media beside it, in front of which all media are put where
    it has none; a list of typed parts; or a list beside lists of media, of which at each place one holds something
    (OBELICS).

    Args:
        schema: of the records.

    The function raises UnusableRecordError for a placeholder without its medium, a medium without its placeholder or
    without any text, and a medium that is none, with the place in the record.
    """
    column = Column.of(schema, "text")
    name = column.names[0]

    def read(row: Row) -> Interleaved:
        value = column.get(row)
        if isinstance(value, list) and not any(isinstance(one, Mapping) for one in value):
            return _side_by_side(schema, row, value, name)
        taker = Taker(schema, row)
        if isinstance(value, str) and not asks(value):
            parts: list[Any] = [*taker.leading(), {"type": "text", "text": value}]
        elif isinstance(value, str | list):
            parts = taker.content(value, name)
        elif value is None and (found := len(taker.leading())):
            raise UnusableRecordError(
                f"holds {_counted(found)} and no text in column {name!r}; write what is said of it there, or leave "
                "the record out"
            )
        else:
            raise not_text(row, column, value)
        taker.refuse_left()
        return _joined(parts, taker.media, name)

    return read


def _counted(media: int) -> str:
    return "a medium" if media == 1 else f"{media:,} media"


def _joined(parts: Sequence[Any], media: list[Medium], name: str) -> Interleaved:
    """Parts as texts and media, each part of a medium with the number of its own."""
    texts, ordered = [""], []
    for part in parts:
        if is_medium(part):
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
                else kind_of(part)
            )
            raise UnusableRecordError(
                f"column {name!r} holds {found}, which is no text and no medium; leave it out"
            )
    return Interleaved(texts, ordered)


def _side_by_side(schema: Schema, row: Row, texts: Sequence[Any], name: str) -> Interleaved:
    """Lists of texts and of media, of which at each place one holds something and the others null."""
    beside = _lists(schema, row, name, len(texts))
    found = Interleaved([""])
    follows = False
    for at, text in enumerate(texts):
        here = [one for one in beside if says_something(one[2][at])]
        if len(here) + says_something(text) > 1:
            names = [*([name] if says_something(text) else []), *(column for _, column, _ in here)]
            raise UnusableRecordError(
                f"place {at} holds something in each of {' and '.join(names)}: write null where another list holds "
                "what comes next"
            )
        if here:
            kind, column, values = here[0]
            found.media.append(medium_of(kind, values[at], f"{column}[{at}]"))
            found.texts.append("")
        elif says_something(text):
            if not isinstance(text, str):
                raise UnusableRecordError(f"{name}[{at}] holds {kind_of(text)}, not text")
            found.texts[-1] += _PARAGRAPH + text if follows else text
        follows = not here and (follows or says_something(text))
    return found


def _lists(
    schema: Schema, row: Row, name: str, places: int
) -> list[tuple[Kind, str, Sequence[Any]]]:
    """The lists of media beside a list of texts, which are as long."""
    found: list[tuple[Kind, str, Sequence[Any]]] = []
    for kind in KINDS:
        for column in schema.columns.get(f"{kind}s", ()):
            value = row.get(column)
            if not says_something(value):
                continue
            if not isinstance(value, list | tuple) or len(value) != places:
                shown = (
                    f"{counted(len(value), 'place')}"
                    if isinstance(value, list | tuple)
                    else kind_of(value)
                )
                raise UnusableRecordError(
                    f"column {name!r} has {counted(places, 'place')} and column {column!r} {shown}: of lists that "
                    "stand side by side each holds null where another one holds something"
                )
            found.append((kind, column, value))
    return found
