r"""The ``.bands`` file: MinHash signatures that find near duplicates of a shard.

Layout (little-endian): 8 bytes ``BLMBAND\0``; u64 version 1; u64 documents D; four u16: shingle, rows,
bands B and the MinHash version; then the keys u64 [D, B], all 0 for a document that matches nothing.
Only shards prepared with ``dedup: near`` have it. ``preparation/dedup/minhash.py`` defines the keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import release_pages
from batchloom.store.format.file_header import CHECK_REMEDY, HEADER, map_file_with_header

MAGIC = b"BLMBAND\x00"
_BITS = 16
_MAX_VALUE = (1 << _BITS) - 1
_CHUNK_BYTES = 8 << 20
# A chunk spans at most this many times its own rows of the mapped keys.
_SEARCH_REACH = 8


@dataclass(frozen=True, slots=True)
class Banding:
    """Parameters of the band keys; keys of different parameters are not comparable.

    Attributes:
        bands: number of keys per document.
        rows: number of hashes per band.
        shingle: number of adjacent tokens that are hashed together.
        minhash: version of the MinHash computation.
    """

    bands: int
    rows: int
    shingle: int
    minhash: int

    def pack(self) -> int:
        """Pack the parameters into one u64."""
        value = 0
        for part in (self.minhash, self.bands, self.rows, self.shingle):
            value = (value << _BITS) | part
        return value


@dataclass(frozen=True, slots=True)
class MinHashSignatures:
    """Band keys of documents, usually mapped.

    Attributes:
        keys: keys of the documents in the file, uint64 [N, bands].
        banding: parameters of the keys.
        selection: rows of ``keys`` that this object covers, in order, int64 [D]; None for all.
    """

    keys: NDArray[np.uint64]
    banding: Banding
    selection: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.keys) if self.selection is None else len(self.selection)

    def take(self, documents: NDArray[np.int64]) -> Self:
        """Return the signatures of some documents, int64 [D], without copying keys."""
        selection = documents if self.selection is None else self.selection[documents]
        return type(self)(self.keys, self.banding, selection)

    def iter_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the ``.bands`` file in bounded chunks."""
        yield HEADER.pack(MAGIC, 1, len(self), self.banding.pack())
        chunk_documents = max(1, _CHUNK_BYTES // max(1, 8 * self.banding.bands))
        start = 0
        while start < len(self):
            stop = min(start + chunk_documents, len(self))
            if self.selection is None:
                keys = self.keys[start:stop]
            else:
                # Without this limit, a sparse selection would map all the keys between its rows.
                reach = self.selection[start] + _SEARCH_REACH * chunk_documents
                stop = min(stop, int(np.searchsorted(self.selection, reach)))
                keys = self.keys[self.selection[start:stop]]
            yield np.ascontiguousarray(keys, "<u8").tobytes()
            start = stop
            release_pages(self.keys)


def map_signature_file(path: Path, documents: int) -> MinHashSignatures:
    """Map the ``.bands`` file of a shard; the keys are a view of the file.

    Args:
        path: path of the file.
        documents: number of documents of the shard.

    Raises:
        StoreError: the file is missing, of another type or version, or has another number of documents.
    """
    view, count, packed = map_file_with_header(path, MAGIC)
    minhash, bands, rows, shingle = (packed >> bits & _MAX_VALUE for bits in (48, 32, 16, 0))
    if count != documents or len(view) != HEADER.size + 8 * bands * documents:
        raise StoreError(
            f"{path} declares {count:,} documents with {bands} bands in {len(view):,} bytes; its shard has "
            f"{documents:,} documents. {CHECK_REMEDY}"
        )
    keys = np.frombuffer(view, "<u8", count * bands, HEADER.size).reshape(count, bands)
    return MinHashSignatures(keys, Banding(bands, rows, shingle, minhash))
