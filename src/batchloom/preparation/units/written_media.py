"""Reader of the temporary media files."""

from itertools import groupby
from pathlib import Path

import numpy as np

from batchloom.core.medium import Medium, MediumInfo
from batchloom.preparation.documents.media_tokens import PlacedMedium
from batchloom.preparation.units.media_files import MEDIA_NAMES
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.store import MEDIA_ROW_DTYPE, MediaRows, ShardMedia
from batchloom.store.format import StoredMedium, make_stored_media, read_blob


def read_unit_media(folder: Path) -> ShardMedia | None:
    """Read the media of a unit or of a stream batch; None if there are none.

    Raises:
        StoreConflictError: the files cannot be read.
    """
    rows, locations_path, blobs = (folder / name for name in MEDIA_NAMES)
    if not rows.exists():
        return None
    with translate_read_errors(rows):
        return ShardMedia(MediaRows(np.fromfile(rows, MEDIA_ROW_DTYPE), locations_path.read_bytes()), blobs)


def read_placed_media(media: ShardMedia | None, first: int, documents: int) -> list[list[PlacedMedium]]:
    """Return the media of documents from ``first`` on, as the media writer takes them.

    Empty if none of these documents has any.
    """
    if media is None:
        return []
    numbers = media.rows.rows["document"]
    begin, end = np.searchsorted(numbers, [first, first + documents]).tolist()
    if begin == end:
        return []
    placed_media: list[list[PlacedMedium]] = [[] for _ in range(documents)]
    blob_cache: dict[int, bytes] = {}
    for number, document_media in groupby(
        make_stored_media(media.rows, range(begin, end), 0, media.blobs), lambda stored_medium: stored_medium.document
    ):
        placed_media[number - first] = [_read_medium(stored_medium, blob_cache) for stored_medium in document_media]
    return placed_media


def _read_medium(stored_medium: StoredMedium, blob_cache: dict[int, bytes]) -> PlacedMedium:
    """Read a medium; ``blob_cache`` holds the latest bytes by offset."""
    data = None
    if stored_medium.blob is not None:
        path, begin = stored_medium.blob
        data = blob_cache.get(begin)
        if data is None:
            blob_cache.clear()
            data = blob_cache[begin] = read_blob(path, begin, stored_medium.size)
    kind = "image" if stored_medium.kind == "video" else stored_medium.kind
    medium = Medium(
        kind, stored_medium.location, data, MediumInfo(stored_medium.facts, stored_medium.digest, stored_medium.size)
    )
    return PlacedMedium(medium, stored_medium.start, stored_medium.tokens, stored_medium.grid)
