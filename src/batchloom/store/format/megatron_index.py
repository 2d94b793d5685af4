r"""Megatron's ``.idx`` file, written byte for byte as Megatron does.

Layout (little-endian): 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8 dtype code; u64 number
of sequences S; u64 length D of the document index; i32 lengths [S]; i64 byte pointers [S];
i64 document index [D] (first 0, last S); i8 modes [S] in multimodal sets only.
Source: megatron/core/datasets/indexed_dataset.py, ``_IndexWriter`` and ``_IndexReader``.
"""

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import describe_os_error, open_regular_file, release_pages
from batchloom.core.native import MAPPED_FILES_SOURCE, find_library
from batchloom.store.format.layout import DTYPE_CODES

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_REMEDIES = {errno.ENOENT: "No such file or directory; restore the file from a copy, or make the store again"}
_MAX_TOKENS = 2**31 - 1
_CHUNK_DOCUMENTS = 1 << 20


def encode_index(lengths: NDArray[np.uint32], dtype: np.dtype[np.generic]) -> bytes:
    """Return the complete ``.idx`` of a shard with one sequence per document."""
    return b"".join(iter_index_chunks(lengths, dtype))


def iter_index_chunks(lengths: NDArray[np.uint32], dtype: np.dtype[np.generic]) -> Iterator[bytes]:
    """Yield the bytes of :func:`encode_index` in bounded chunks."""
    count = len(lengths)
    if count and int(lengths.max()) > _MAX_TOKENS:
        raise StoreError(
            f"Document {int(lengths.argmax())} has {int(lengths.max()):,} tokens; a Megatron index allows at most "
            f"{_MAX_TOKENS:,} per document. Split it first."
        )
    code = next(code for code, token_dtype in DTYPE_CODES.items() if token_dtype == dtype)
    yield HEADER.pack(MAGIC, 1, code, count, count + 1)
    starts = range(0, count, _CHUNK_DOCUMENTS)
    for start in starts:
        yield lengths[start : start + _CHUNK_DOCUMENTS].astype("<i4").tobytes()
    end = 0
    for start in starts:
        token_ends = end + np.cumsum(lengths[start : start + _CHUNK_DOCUMENTS], dtype="<i8")
        yield (np.concatenate([[end], token_ends[:-1]]) * dtype.itemsize).astype("<i8").tobytes()
        end = int(token_ends[-1])
    for start in range(0, count + 1, _CHUNK_DOCUMENTS):
        yield np.arange(start, min(start + _CHUNK_DOCUMENTS, count + 1), dtype="<i8").tobytes()


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """A mapped ``.idx`` file: its arrays are views of the file, not copies."""

    dtype: np.dtype[np.generic]  # dtype of a token in the ``.bin``
    lengths: NDArray[np.int32]  # tokens of each sequence, int32 [S]
    pointers: NDArray[np.int64]  # byte offset of each sequence in the ``.bin``, int64 [S]
    documents: NDArray[np.int64]  # first sequence of each document, and S at the end, int64 [D]
    size: int  # size of the ``.idx`` in bytes
    path: Path  # path of the ``.idx``

    def iter_chunks(self) -> Iterator[slice]:
        """Yield slices that cover all sequences of the index.

        Each is released from memory before the next: an index of a billion documents has 20 GB.
        """
        for start in range(0, len(self.lengths), _CHUNK_DOCUMENTS):
            yield slice(start, start + _CHUNK_DOCUMENTS)
            release_pages(self.lengths)

    def has_one_sequence_each(self) -> bool:
        """Return whether every document is exactly one sequence."""
        if len(self.documents) != len(self.lengths) + 1:
            return False
        for rows in self.iter_chunks():
            document_starts = self.documents[rows]
            if not np.array_equal(document_starts, np.arange(rows.start, rows.start + len(document_starts))):
                return False
        return True

    def sum_sequence_lengths(self) -> NDArray[np.uint32]:
        """Return the tokens of documents of any number of sequences."""
        if (np.diff(self.documents) < 0).any():
            raise StoreError(
                f"{self.path} has document bounds that run backwards; it is damaged. Make it again from its source."
            )
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        is_inner = np.ones(max(len(ends) - 1, 0), bool)
        first = self.documents[:-1]
        is_inner[first[(first > 0) & (first < len(ends))] - 1] = False
        if (ends[:-1] != self.pointers[1:])[is_inner].any():
            raise StoreError(
                f"{self.path} has a document whose sequences are not consecutive; merge it again with Megatron's own "
                "tools."
            )
        token_offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=token_offsets[1:])
        return np.diff(token_offsets[self.documents]).astype(np.uint32)

    def refuse_overlap(self) -> None:
        """Refuse an index whose sequences do not cover each byte of the ``.bin`` once.

        Sequences may be in any order. The total size was compared before, so that a gap implies an overlap or a
        sequence outside the file.
        """
        expected = 0
        for row_slice in self.iter_chunks():
            sizes = self.lengths[row_slice].astype(np.int64) * self.dtype.itemsize
            ends = expected + np.cumsum(sizes)
            if not np.array_equal(self.pointers[row_slice], ends - sizes):
                break
            expected = int(ends[-1])
        else:
            return
        # Empty sequences may point anywhere.
        nonempty = np.flatnonzero(self.lengths)
        order = nonempty[np.argsort(self.pointers[nonempty], kind="stable")]
        sizes = self.lengths[order].astype(np.int64) * self.dtype.itemsize
        wrong = np.flatnonzero(self.pointers[order] != np.cumsum(sizes) - sizes)
        if wrong.size:
            sequence = int(order[wrong[0]])
            expected_byte = int(sizes[: wrong[0]].sum())
            raise StoreError(
                f"{self.path} points sequence {sequence} to byte {self.pointers[sequence]} of the .bin, but the one "
                f"before it ends at {expected_byte}: sequences overlap or leave gaps, so documents hold tokens of "
                "others. Make the prefix again from its source."
            )


def map_index(path: Path) -> MegatronIndex:
    """Map an ``.idx`` file and check its header against the file size."""
    view = map_file(path)
    if len(view) < HEADER.size:
        raise StoreError(f"{path} is cut short: {len(view)} bytes, its header alone has {HEADER.size}.")
    magic, version, code, sequences, documents = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise StoreError(f"{path} is not a Megatron index: it starts with {magic!r}, not {MAGIC!r}.")
    if version != 1:
        raise StoreError(f"{path} has index version {version}; only version 1 is known.")
    if code not in DTYPE_CODES:
        raise StoreError(f"{path} has dtype code {code}; known are 1 to 8.")
    plain = HEADER.size + 12 * sequences + 8 * documents
    if len(view) not in (plain, plain + sequences):
        raise StoreError(
            f"{path} declares {sequences} sequences and {documents} document bounds, which take {plain} "
            f"bytes, but it has {len(view)}: it is cut short or damaged."
        )
    at_pointers = HEADER.size + 4 * sequences
    at_documents = at_pointers + 8 * sequences
    bounds = np.frombuffer(view, "<i8", documents, at_documents)
    if documents < 1 or bounds[0] != 0 or bounds[-1] != sequences:
        raise StoreError(f"{path} has a document index that does not run from 0 to its {sequences} sequences.")
    return MegatronIndex(
        dtype=DTYPE_CODES[code],
        lengths=np.frombuffer(view, "<i4", sequences, HEADER.size),
        pointers=np.frombuffer(view, "<i8", sequences, at_pointers),
        documents=bounds,
        size=len(view),
        path=path,
    )


def install_short_file_handler() -> ctypes.CDLL | None:
    """Install the handler that names a file that becomes shorter.

    Return its library, None without a compiler. Call it again where another library has installed its own since.
    """
    library = find_mapped_files_library()
    if library is not None:
        library.batchloom_name_short_files()
    return library


@cache
def find_mapped_files_library() -> ctypes.CDLL | None:
    """Return the library that names shorter files; None without a compiler."""
    return find_library(MAPPED_FILES_SOURCE, "A file that becomes shorter while it is read is not named")


def map_file(path: Path) -> memoryview:
    """Map a file read-only; an empty file gives an empty view.

    Raises:
        StoreError: the file is missing or cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            install_short_file_handler()
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error, _REMEDIES)}.") from error
