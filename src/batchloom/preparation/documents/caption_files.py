"""Folders with captions: tables of files, as ImageFolder has them, and texts named as media are."""

import os
from collections.abc import Mapping
from typing import Any

from batchloom.core.addresses import is_url
from batchloom.core.conversation import Interleaved
from batchloom.core.errors import InputError, UnusableRecordError
from batchloom.core.files import because
from batchloom.core.medium import KINDS, Kind, Medium, kind_by_name
from batchloom.core.wording import kind_of
from batchloom.sources import Limits
from batchloom.sources.files import Source, ending_of

_TABLE = "metadata"
_NAMES = ("file_name", "file_names")
_CAPTIONS = (".txt", ".caption")

# Media of a folder by their names without endings.
Beside = Mapping[str, tuple[Medium, ...]]


def names_files(source: Source) -> bool:
    """Whether a source is a table of the media that lie beside it, by its name (``metadata.jsonl``)."""
    return source.path.rpartition("/")[2].partition(".")[0] == _TABLE


def with_named_files(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of such a table with ``images``, ``audios`` and ``videos`` for the files that it names.

    Raises:
        UnusableRecordError: a file is none of these, by the ending of its name.
    """
    named = next((name for name in _NAMES if row.get(name) is not None), None)
    if named is None:
        return row
    value = row[named]
    found: dict[str, list[str]] = {}
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            raise UnusableRecordError(
                f"column {named!r} holds {kind_of(name)}, not the name of a file beside the table"
            )
        kind = kind_by_name(name)
        if kind is None:
            raise UnusableRecordError(
                f"column {named!r} names {name!r:.200}, which is no image, sound or video by its ending; leave it out"
            )
        found.setdefault(f"{kind}s", []).append(name)
    if both := next((column for column in found if row.get(column)), None):
        raise UnusableRecordError(
            f"columns {named!r} and {both!r} both name media; leave one of them out"
        )
    return {**{name: one for name, one in row.items() if name not in _NAMES}, **found}


def may_be_caption(source: Source, limits: Limits) -> bool:
    """Whether a text may be the caption of media whose names differ from its own in the ending alone.

    One that is packed, in an archive, elsewhere, or long enough to be cut into documents is none.
    """
    return (
        ending_of(source.path).lower() in _CAPTIONS
        and source.compression is None
        and source.member is None
        and source.size <= limits.whole_text_bytes
        and not is_url(source.path)
    )


def media_in(folder: str) -> Beside:
    """The media of a folder by their names without endings, images first.

    Raises:
        InputError: it cannot be read.
    """
    found: dict[str, list[tuple[int, str, Kind]]] = {}
    try:
        for name in os.listdir(folder):  # noqa: PTH208 - names alone, of very many
            kind = kind_by_name(name)
            if kind is not None and not name.startswith("."):
                stem = name.rpartition(".")[0]
                found.setdefault(stem, []).append((KINDS.index(kind), name, kind))
    except OSError as error:
        raise InputError(
            f"Folder {folder} cannot be read, so its captions cannot be told from other texts: {because(error)}."
        ) from error
    return {
        stem: tuple(Medium(kind, name) for _, name, kind in sorted(some))
        for stem, some in found.items()
    }


def captioned(media: tuple[Medium, ...], text: str) -> Interleaved:
    """Media and their caption: the text of a file without the line end that ends it."""
    caption = text.removesuffix("\n").removesuffix("\r")
    return Interleaved([*[""] * len(media), caption], list(media))
