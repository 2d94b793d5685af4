r"""The ``.media`` and ``.blobs`` files: images and audio of a shard's documents.

``.media`` layout (little-endian): 8 bytes ``BLMEDIA\0``; u64 version 1; u64 media M; u64 bytes of locations P; then M
rows of 96 bytes in the order of documents and of tokens in them; then P bytes of UTF-8 locations. A row is: digest u64
[2] (low half, high half; of size and edges, ``media/media_content.py``), u64 size of the medium's file, u64 offset of
its bytes in ``.blobs`` (2**64 - 1 if they are not stored), u64 offset of its location in the locations, facts u64 [3]
(image: width, height, animated; audio: samples, rate, channels; video frame: width, height, time in microseconds), grid
u32 [3] (patches in time, height and width, or zeros), u32 bytes of its location, u32 document in the shard, u32 its
first token in the document, u32 its number of tokens, u8 kind (0 image, 1 audio, 2 video frame), three zeros.

``.blobs`` holds the bytes of media back to back without a header; equal media share their bytes. ``.blobsums`` holds
its block checksums in the format of ``.sums`` (``store/format/shard_sidecars.py``).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import describe_os_error
from batchloom.core.medium import MEDIUM_KINDS, AudioFacts, FrameFacts, ImageFacts, MediumFacts, MediumKind
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, HEADER, map_file_with_header

MAGIC = b"BLMEDIA\x00"
NOT_STORED = (1 << 64) - 1
MEDIA_ROW_DTYPE = np.dtype(
    [
        ("digest", "<u8", (2,)),
        ("size", "<u8"),
        ("blob", "<u8"),
        ("place", "<u8"),
        ("facts", "<u8", (3,)),
        ("grid", "<u4", (3,)),
        ("place_size", "<u4"),
        ("document", "<u4"),
        ("start", "<u4"),
        ("tokens", "<u4"),
        ("kind", "u1"),
        ("zeros", "u1", (3,)),
    ]
)
_CHUNK_BYTES = 8 << 20


class StoredMedium(NamedTuple):
    """A medium of a stored document."""

    document: int  # number of the document
    kind: MediumKind  # ``image``, ``audio``, or ``video`` for a single frame of a video
    start: int  # position of its first token in the document
    tokens: int  # number of its placeholder tokens
    grid: tuple[int, int, int]  # patches in time, height and width; zeros if the model uses no grid
    facts: MediumFacts  # facts from the header of the medium's file
    location: str  # path or URL as given in the record; empty if the record held the bytes
    size: int  # size of its file in bytes
    digest: bytes  # digest that identifies the medium, 16 bytes
    blob: tuple[Path, int] | None  # ``.blobs`` file and byte offset; None if the bytes are not stored


@final
@dataclass(frozen=True, slots=True)
class MediaRows:
    """Media of a range of documents."""

    rows: NDArray[np.void]  # rows in document order, [M] of ``MEDIA_ROW_DTYPE``
    location_bytes: Any  # UTF-8 paths and URLs, back to back

    def __len__(self) -> int:
        return len(self.rows)

    def read_location(self, row: int) -> str:
        """Return the path or URL of a medium."""
        begin = int(self.rows["place"][row])
        data = bytes(self.location_bytes[begin : begin + int(self.rows["place_size"][row])])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise StoreError(f"The location of a medium is not UTF-8: its file is damaged. {CHECK_REMEDY}") from error

    def take(self, documents: NDArray[np.int64]) -> "MediaRows":
        """Return the media of some documents, ascending, int64 [D].

        The rows refer to documents by their index in ``documents``.
        """
        positions = np.searchsorted(documents, self.rows["document"])
        row_mask = positions < len(documents)
        row_mask[row_mask] = documents[positions[row_mask]] == self.rows["document"][row_mask]
        rows = self.rows[row_mask].copy()
        rows["document"] = positions[row_mask]
        texts = [bytes(self.location_bytes[a : a + n]) for a, n in _iter_blob_ranges(rows)]
        sizes = rows["place_size"].astype(np.uint64)
        rows["place"] = np.cumsum(sizes) - sizes
        return MediaRows(rows, b"".join(texts))

    def to_bytes(self) -> bytes:
        """Return the complete ``.media`` file."""
        header = HEADER.pack(MAGIC, 1, len(self.rows), len(self.location_bytes))
        return header + self.rows.tobytes() + bytes(self.location_bytes)


def _iter_blob_ranges(rows: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    return zip(rows["place"].tolist(), rows["place_size"].tolist(), strict=True)


@final
@dataclass(frozen=True, slots=True)
class ShardMedia:
    """Media of a shard to write."""

    rows: MediaRows  # media of its documents; their blob offsets refer to ``blobs``
    blobs: Path | None  # file with the stored bytes; None if no medium is stored

    def take(self, documents: NDArray[np.int64]) -> "ShardMedia":
        """Return the media of some documents, ascending, int64 [D]."""
        return ShardMedia(self.rows.take(documents), self.blobs)

    def pack(self) -> tuple[MediaRows, list[tuple[int, int]]]:
        """Return rows with offsets into a new ``.blobs``, and the byte ranges it copies.

        The ranges are [start, stop) in ``blobs``, in the order of the new file.
        """
        rows = self.rows.rows.copy()
        stored_mask = rows["blob"] != NOT_STORED
        if not stored_mask.any():
            return MediaRows(rows, self.rows.location_bytes), []
        begins, first, back = np.unique(rows["blob"][stored_mask], return_index=True, return_inverse=True)
        sizes = rows["size"][stored_mask][first]
        new = np.cumsum(sizes) - sizes
        rows["blob"][stored_mask] = new[back]
        byte_ranges = list(zip(begins.tolist(), (begins + sizes).tolist(), strict=True))
        return MediaRows(rows, self.rows.location_bytes), byte_ranges


def read_blob(path: Path, begin: int, size: int) -> bytes:
    """Read the bytes of a medium; fewer than ``size`` if the file ends earlier."""
    try:
        with path.open("rb") as file:
            # A damaged row can ask for more bytes than fit into memory.
            inside = min(size, os.fstat(file.fileno()).st_size - begin)
            if inside <= 0:
                return b""
            file.seek(begin)
            return file.read(inside)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}.") from error


def iter_blob_chunks(path: Path, byte_ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of the ranges of a file in bounded chunks."""
    with path.open("rb") as file:
        for begin, end in byte_ranges:
            file.seek(begin)
            remaining_bytes = end - begin
            while remaining_bytes:
                chunk = file.read(min(remaining_bytes, _CHUNK_BYTES))
                if not chunk:
                    raise StoreError(f"{path} is cut short: {remaining_bytes:,} bytes of a medium are missing.")
                remaining_bytes -= len(chunk)
                yield chunk


def map_media(path: Path, documents: int, view: memoryview | None = None) -> MediaRows:
    """Read and check the ``.media`` file of a shard of ``documents`` documents.

    Args:
        path: path of the file, for errors if the content is given.
        documents: number of documents of the shard.
        view: content of the file; None to map it.

    Raises:
        StoreError: the file is missing, of another type or version, or contradicts itself.
    """
    view, count, locations_size = map_file_with_header(path, MAGIC, view)
    end = HEADER.size + MEDIA_ROW_DTYPE.itemsize * count
    if len(view) != end + locations_size:
        raise StoreError(
            f"{path} declares {count:,} media and {locations_size:,} bytes of locations in {len(view):,} bytes. "
            f"{CHECK_REMEDY}"
        )
    rows = np.frombuffer(view, MEDIA_ROW_DTYPE, count, HEADER.size)
    if fault := _find_fault(rows, documents, locations_size):
        raise StoreError(f"{path}: {fault}. {CHECK_REMEDY}")
    return MediaRows(rows, view[end:])


def _find_fault(rows: NDArray[np.void], documents: int, locations_size: int) -> str:
    """Describe the first contradiction in the rows of a shard; empty if there is none."""
    if not len(rows):
        return ""
    owners = rows["document"].astype(np.int64)
    if (np.diff(owners) < 0).any() or int(owners[-1]) >= documents:
        return f"its media are not in the order of its {documents:,} documents"
    ends = rows["start"].astype(np.int64) + rows["tokens"]
    same_document = owners[1:] == owners[:-1]
    if (ends[:-1][same_document] > rows["start"][1:][same_document]).any():
        return "media of a document overlap"
    if int(rows["kind"].max()) >= len(MEDIUM_KINDS):
        return f"a medium has the unknown kind {int(rows['kind'].max())}"
    begins = rows["place"].astype(np.int64)
    sizes = rows["place_size"].astype(np.int64)
    if (begins < 0).any() or (begins + sizes > locations_size).any():
        return "locations of media are outside the file"
    return ""


def make_stored_media(media: MediaRows, rows: range, first: int, blobs: Path | None) -> list[StoredMedium]:
    """Convert rows of a shard to :class:`StoredMedium` values."""
    stored_media = []
    for number in rows:
        row = media.rows[number]
        kind = MEDIUM_KINDS[int(row["kind"])]
        begin = int(row["blob"])
        low, high = row["digest"].tolist()
        stored_media.append(
            StoredMedium(
                document=first + int(row["document"]),
                kind=kind,
                start=int(row["start"]),
                tokens=int(row["tokens"]),
                grid=tuple(row["grid"].tolist()),
                facts=decode_facts(kind, row["facts"].tolist()),
                location=media.read_location(number),
                size=int(row["size"]),
                digest=((high << 64) | low).to_bytes(16, "big"),
                blob=None if begin == NOT_STORED or blobs is None else (blobs, begin),
            )
        )
    return stored_media


def decode_facts(kind: MediumKind, numbers: Sequence[int]) -> MediumFacts:
    first, second, third = numbers
    if kind == "audio":
        return AudioFacts(first, second, third)
    if kind == "video":
        return FrameFacts(first, second, time=third)
    return ImageFacts(first, second, bool(third))


def get_facts_kind(facts: MediumFacts) -> MediumKind:
    """Return the medium kind that a facts object belongs to."""
    if isinstance(facts, AudioFacts):
        return "audio"
    return "video" if isinstance(facts, FrameFacts) else "image"


def encode_facts(facts: MediumFacts) -> tuple[int, int, int]:
    """Convert facts to the facts column of a row; the inverse of :func:`decode_facts`."""
    if isinstance(facts, AudioFacts):
        return facts.samples, facts.rate, facts.channels
    if isinstance(facts, FrameFacts):
        return facts.width, facts.height, facts.time
    return facts.width, facts.height, int(facts.animated)
