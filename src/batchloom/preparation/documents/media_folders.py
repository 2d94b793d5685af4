"""Media of a folder: tables of its files, and captions of the same name."""

import os
from collections.abc import Mapping
from typing import Any

from batchloom.core.addresses import is_url
from batchloom.core.document import InterleavedText
from batchloom.core.errors import InputError, UnusableRecordError
from batchloom.core.files import describe_os_error
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumKind, detect_medium_kind
from batchloom.core.wording import describe_json_type
from batchloom.sources import ReadLimits
from batchloom.sources.files import Source, get_suffix

# Schema description of texts next to media of the same name.
CAPTIONS_NOTE = "texts next to media of the same name -> text with media"
_METADATA_STEM = "metadata"
_FILE_NAME_COLUMNS = ("file_name", "file_names")
_CAPTION_SUFFIXES = (".txt", ".caption")

# Media of a folder by file name stem.
MediaByStem = Mapping[str, tuple[Medium, ...]]


def is_media_table(source: Source) -> bool:
    """Return whether a source is named ``metadata.*``: a table of adjacent media."""
    return source.path.rpartition("/")[2].partition(".")[0] == _METADATA_STEM


def add_file_columns(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table row with its files as ``images``, ``audios`` and ``videos``."""
    file_name_column = next((name for name in _FILE_NAME_COLUMNS if row.get(name) is not None), None)
    if file_name_column is None:
        return row
    value = row[file_name_column]
    media_columns: dict[str, list[str]] = {}
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            raise UnusableRecordError(
                f"column {file_name_column!r} holds {describe_json_type(name)}, not the name of a file next to the "
                "table"
            )
        kind = detect_medium_kind(name)
        if kind is None:
            raise UnusableRecordError(
                f"column {file_name_column!r} names {name!r:.200}, which has no image, audio or video extension; "
                "leave it out"
            )
        media_columns.setdefault(f"{kind}s", []).append(name)
    if filled_column := next((column for column in media_columns if row.get(column)), None):
        raise UnusableRecordError(
            f"columns {file_name_column!r} and {filled_column!r} both name media; leave one of them out"
        )
    return {**{name: cell for name, cell in row.items() if name not in _FILE_NAME_COLUMNS}, **media_columns}


def is_possible_caption(source: Source, limits: ReadLimits) -> bool:
    """Return whether a text may be the caption of media with the same name stem."""
    return (
        get_suffix(source.path).lower() in _CAPTION_SUFFIXES
        and source.compression is None
        and source.member is None
        and source.size <= limits.whole_text_bytes
        and not is_url(source.path)
    )


def list_media_by_stem(folder: str) -> MediaByStem:
    """List the media of a folder by file name stem, images first."""
    files_by_stem: dict[str, list[tuple[int, str, MediumKind]]] = {}
    try:
        for name in os.listdir(folder):
            kind = detect_medium_kind(name)
            if kind is not None and not name.startswith("."):
                stem = name.rpartition(".")[0]
                files_by_stem.setdefault(stem, []).append((MEDIUM_KINDS.index(kind), name, kind))
    except OSError as error:
        raise InputError(
            f"Cannot read folder {folder}, so captions cannot be distinguished from other texts: "
            f"{describe_os_error(error)}."
        ) from error
    return {stem: tuple(Medium(kind, name) for _, name, kind in sorted(files)) for stem, files in files_by_stem.items()}


def make_captioned(media: tuple[Medium, ...], text: str) -> InterleavedText:
    """Return media followed by their caption, without the final line end of its file."""
    caption = text.removesuffix("\n").removesuffix("\r")
    return InterleavedText([*[""] * len(media), caption], list(media))
