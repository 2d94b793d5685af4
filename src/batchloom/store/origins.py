r"""The ``.docs`` file: where each document of a shard came from, and the hash of its text.

Layout (little-endian): 8 bytes ``BLMDOCS\0``; u64 version 1; u64 documents D; u64 zero; then
the columns hash u64 [D, 2] (low half, high half), record u64 [D], offset u64 [D], part u32 [D].
Every column begins at a multiple of 8 bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.headed import HEADER, read_header, unlike
from batchloom.store.index import map_file

MAGIC = b"BLMDOCS\x00"
ROW_BYTES = 36


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document came from.

    Attributes:
        source: name of the input file under the inputs.
        record: 0-based number of the record in that file.
        offset: byte offset of the record in that file, after decompression.
        line: 1-based line, for files whose records are lines; else None.
        hash: XXH3-128 of the document's UTF-8 text, 32 hex digits.
    """

    source: str
    record: int
    offset: int
    line: int | None
    hash: str


@dataclass(frozen=True, slots=True)
class Origins:
    """Origin and hash of documents, in columns of equal length D.

    Attributes:
        hashes: XXH3-128 of each document's UTF-8 text as (low, high) halves, uint64 [D, 2].
        records: 0-based number of the record inside its part of the source, uint64 [D].
        offsets: byte offset of the record in the (decompressed) source, uint64 [D].
        parts: number of the part in the manifest's list of parts, uint32 [D].
    """

    hashes: NDArray[np.uint64]
    records: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    parts: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.records)

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """The rows ``chosen`` (indices, or a mask), in their order."""
        return type(self)(
            self.hashes[chosen], self.records[chosen], self.offsets[chosen], self.parts[chosen]
        )

    def to_bytes(self) -> bytes:
        """The whole ``.docs`` file."""
        columns = ([self.hashes], [self.records], [self.offsets], [self.parts])
        return b"".join(origins_pieces(len(self), columns))


def origins_pieces(count: int, columns: Sequence[Iterable[NDArray[np.generic]]]) -> Iterator[bytes]:
    """The bytes of a ``.docs`` file, where its columns need not be in memory together.

    Args:
        count: documents.
        columns: hashes, records, offsets and parts as in :class:`Origins`, each in pieces.
    """
    yield HEADER.pack(MAGIC, 1, count, 0)
    for column, dtype in zip(columns, ("<u8", "<u8", "<u8", "<u4"), strict=True):
        for piece in column:
            yield piece.astype(dtype).tobytes()


def origin_columns(count: int) -> list[tuple[int, int]]:
    """Of the ``.docs`` file of so many documents the byte each column begins at, and the bytes of its rows."""
    at = HEADER.size
    return [(at, 16), (at + 16 * count, 8), (at + 24 * count, 8), (at + 32 * count, 4)]


def map_origins(path: Path) -> Origins:
    """Map a ``.docs`` file; its columns are views of the file.

    Raises:
        StoreError: the file is missing, of another kind or version, or its count does not
            fit its size.
    """
    return origins_of(map_file(path), path)


def origins_of(view: memoryview, path: Path) -> Origins:
    """The columns in the content of a ``.docs`` file, wherever it lies; else as :func:`map_origins`."""
    count, zero = read_header(view, path, MAGIC)
    if zero:
        raise unlike(path)
    if len(view) != HEADER.size + ROW_BYTES * count:
        raise StoreError(f"{path} says {count} documents, which do not fit its {len(view)} bytes.")
    at = HEADER.size
    return Origins(
        hashes=np.frombuffer(view, "<u8", 2 * count, at).reshape(count, 2),
        records=np.frombuffer(view, "<u8", count, at + 16 * count),
        offsets=np.frombuffer(view, "<u8", count, at + 24 * count),
        parts=np.frombuffer(view, "<u4", count, at + 32 * count),
    )
