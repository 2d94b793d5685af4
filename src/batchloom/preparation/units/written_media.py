"""The temporary files of media, read back."""

from itertools import groupby
from pathlib import Path

import numpy as np

from batchloom.core.medium import Medium, MediumInfo
from batchloom.preparation.documents import PlacedMedium
from batchloom.preparation.units.media_files import MEDIA_NAMES
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.store import MEDIA_ROW_DTYPE, MediaRows, ShardMedia
from batchloom.store.format import StoredMedium, make_stored_media, read_blob


def read_unit_media(folder: Path) -> ShardMedia | None:
    """The media of the documents of a unit, or of what a stream has kept of one; None where they hold none.

    Raises:
        InputError: the files cannot be read.
    """
    rows, places, blobs = (folder / name for name in MEDIA_NAMES)
    if not rows.exists():
        return None
    with translate_read_errors(rows):
        return ShardMedia(MediaRows(np.fromfile(rows, MEDIA_ROW_DTYPE), places.read_bytes()), blobs)


def read_placed_media(
    media: ShardMedia | None, first: int, documents: int
) -> list[list[PlacedMedium]]:
    """The media of documents of a unit from the first on, as :meth:`UnitMedia.add` took them.

    Empty where none of these holds any.
    """
    if media is None:
        return []
    numbers = media.rows.rows["document"]
    begin, end = np.searchsorted(numbers, [first, first + documents]).tolist()
    if begin == end:
        return []
    found: list[list[PlacedMedium]] = [[] for _ in range(documents)]
    held: dict[int, bytes] = {}
    for number, some in groupby(
        make_stored_media(media.rows, range(begin, end), 0, media.blobs), lambda one: one.document
    ):
        found[number - first] = [_read_medium(one, held) for one in some]
    return found


def _read_medium(one: StoredMedium, held: dict[int, bytes]) -> PlacedMedium:
    """A medium as it was taken; ``held`` knows the bytes that were read last, by where they begin."""
    data = None
    if one.blob is not None:
        path, begin = one.blob
        data = held.get(begin)
        if data is None:
            held.clear()
            data = held[begin] = read_blob(path, begin, one.size)
    kind = "image" if one.kind == "video" else one.kind
    medium = Medium(kind, one.place, data, MediumInfo(one.facts, one.digest, one.size))
    return PlacedMedium(medium, one.start, one.tokens, one.grid)
