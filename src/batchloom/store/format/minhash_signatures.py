r"""The ``.bands`` file: by which documents of a shard later ones are found to be alike.

Layout (little-endian): 8 bytes ``BLMBAND\0``; u64 version 1; u64 documents D; four u16: shingle, rows,
bands B and the version of MinHash; then the keys u64 [D, B], 0 throughout where a document is like nothing.
Only shards prepared with ``dedup: near`` have it. What the keys are, ``preparation/dedup/minhash.py`` says.
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
# Pieces lie in so many times their own memory at most.
_SEARCH_REACH = 8


@dataclass(frozen=True, slots=True)
class Banding:
    """How keys of bands were made: those of two ways say nothing of each other.

    Attributes:
        bands: keys of a document.
        rows: hashes of a band.
        shingle: neighbouring tokens that are hashed together.
        minhash: the version of what is computed.
    """

    bands: int
    rows: int
    shingle: int
    minhash: int

    def pack(self) -> int:
        """All of it as one u64."""
        value = 0
        for part in (self.minhash, self.bands, self.rows, self.shingle):
            value = (value << _BITS) | part
        return value


@dataclass(frozen=True, slots=True)
class MinHashSignatures:
    """Keys of the bands of documents, mostly mapped.

    Attributes:
        keys: of some documents, uint64 [N, bands].
        banding: how they were made.
        selection: the documents among these that are meant, in order, int64 [D]; None for all.
    """

    keys: NDArray[np.uint64]
    banding: Banding
    selection: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.keys) if self.selection is None else len(self.selection)

    def take(self, documents: NDArray[np.int64]) -> Self:
        """Those of some documents of these, int64 [D]; copies no key."""
        selection = documents if self.selection is None else self.selection[documents]
        return type(self)(self.keys, self.banding, selection)

    def iter_chunks(self) -> Iterator[bytes]:
        """The bytes of the ``.bands`` file, a bounded piece at a time."""
        yield HEADER.pack(MAGIC, 1, len(self), self.banding.pack())
        chunk_documents = max(1, _CHUNK_BYTES // max(1, 8 * self.banding.bands))
        start = 0
        while start < len(self):
            stop = min(start + chunk_documents, len(self))
            if self.selection is None:
                keys = self.keys[start:stop]
            else:
                # Few documents among very many would have all of the others mapped between them.
                reach = self.selection[start] + _SEARCH_REACH * chunk_documents
                stop = min(stop, int(np.searchsorted(self.selection, reach)))
                keys = self.keys[self.selection[start:stop]]
            yield np.ascontiguousarray(keys, "<u8").tobytes()
            start = stop
            release_pages(self.keys)


def map_signature_file(path: Path, documents: int) -> MinHashSignatures:
    """Map the ``.bands`` file of a shard; the keys are a view of the file.

    Args:
        path: the file.
        documents: how many the shard has.

    Raises:
        StoreError: the file is missing, of another kind or version, or not of so many documents.
    """
    view, count, packed = map_file_with_header(path, MAGIC)
    minhash, bands, rows, shingle = (packed >> bits & _MAX_VALUE for bits in (48, 32, 16, 0))
    if count != documents or len(view) != HEADER.size + 8 * bands * documents:
        raise StoreError(
            f"{path} says {count:,} documents of {bands} bands in {len(view):,} bytes; its shard has {documents:,} "
            f"documents. {CHECK_REMEDY}"
        )
    keys = np.frombuffer(view, "<u8", count * bands, HEADER.size).reshape(count, bands)
    return MinHashSignatures(keys, Banding(bands, rows, shingle, minhash))
