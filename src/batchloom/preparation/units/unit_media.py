"""Media of a unit: rows, locations and stored bytes."""

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.medium import MEDIUM_KINDS, Medium, MediumInfo
from batchloom.preparation.documents.media_tokens import PlacedMedium
from batchloom.preparation.units.unit_rows import MAX_DOCUMENTS
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.store import MEDIA_ROW_DTYPE, NOT_STORED, MediaRows, ShardMedia, wrap_write_errors
from batchloom.store.format import StoredMedium, encode_facts, get_facts_kind, make_stored_media, read_blob

MEDIA_NAMES = ("media.rows", "media.places", "media.blobs")


@final
class UnitMediaWriter:
    """Writer of the media files, which are created with the first medium."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[bytes]] = {}
        self._location_bytes = self._blob_bytes = 0
        self._blob_offsets: dict[bytes, int] = {}
        self._last: tuple[bytes, int] | None = None

    def add(self, media: Sequence[Sequence[PlacedMedium]], first: int) -> None:
        """Append the media of documents; ``first`` is the unit's index of the first one."""
        if not self._open:
            for name in MEDIA_NAMES:
                with wrap_write_errors(self._folder):
                    self._open[name] = (self._folder / name).open("wb")
        if first + len(media) > MAX_DOCUMENTS:
            raise InputError(
                f"A file that cannot be split into units holds more than {MAX_DOCUMENTS:,} documents with media; "
                "split it into several."
            )
        rows = np.zeros(sum(map(len, media)), MEDIA_ROW_DTYPE)
        encoded_locations = []
        row_index = 0
        for document, document_media in enumerate(media, first):
            for placed_medium in document_media:
                encoded_location = placed_medium.medium.location.encode()
                self._fill(rows[row_index : row_index + 1], placed_medium, document, len(encoded_location))
                encoded_locations.append(encoded_location)
                row_index += 1
        with wrap_write_errors(self._folder):
            self._open[MEDIA_NAMES[0]].write(rows.tobytes())
            self._open[MEDIA_NAMES[1]].write(b"".join(encoded_locations))

    def _fill(self, row: NDArray[np.void], placed_medium: PlacedMedium, document: int, size: int) -> None:
        medium = placed_medium.medium
        if medium.info is None:
            raise AssertionError("media must be inspected before they are encoded")
        number = int.from_bytes(medium.info.digest, "big")
        row["digest"] = (number & NOT_STORED, number >> 64)
        row["size"] = medium.info.size
        row["blob"] = NOT_STORED if medium.data is None else self._store_blob(medium.data)
        row["place"], row["place_size"] = self._location_bytes, size
        row["facts"], row["grid"] = encode_facts(medium.info.facts), placed_medium.grid
        row["document"], row["start"], row["tokens"] = (document, placed_medium.start, placed_medium.tokens)
        row["kind"] = MEDIUM_KINDS.index(get_facts_kind(medium.info.facts))
        self._location_bytes += size

    def _store_blob(self, data: bytes) -> int:
        """Return the offset of bytes in the blob file; equal ones are written once."""
        if self._last is not None and self._last[0] is data:
            return self._last[1]  # The frames of a video share their bytes.
        digest = xxhash.xxh3_128_digest(data)
        begin = self._blob_offsets.get(digest)
        if begin is None:
            begin = self._blob_offsets[digest] = self._blob_bytes
            with wrap_write_errors(self._folder):
                self._open[MEDIA_NAMES[2]].write(data)
            self._blob_bytes += len(data)
        self._last = data, begin
        return begin

    def sync(self) -> None:
        """Flush the files to disk."""
        for file in self._open.values():
            with wrap_write_errors(self._folder):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def compute_media_salts(media: Sequence[Sequence[PlacedMedium]], documents: int) -> NDArray[np.uint64]:
    """Hash the media of each document, 0 for none, uint64 [documents].

    The salts distinguish documents with equal tokens but different media.
    """
    salts = np.zeros(documents, np.uint64)
    for number, document_media in enumerate(media):
        if document_media:
            digests = b"".join(
                placed_medium.medium.info.digest for placed_medium in document_media if placed_medium.medium.info
            )
            salts[number] = xxhash.xxh3_64_intdigest(digests) or 1
    return salts


def read_unit_media(folder: Path) -> ShardMedia | None:
    """Read the media of a unit or of a stream batch; None if there are none."""
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
