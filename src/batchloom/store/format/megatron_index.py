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
from batchloom.core.files import describe_os_error, open_regular_file
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
    )


@cache
def install_short_file_handler() -> ctypes.CDLL | None:
    """Install the handler that names a file that becomes shorter.

    Return its library, None without a compiler.
    """
    library = find_library(MAPPED_FILES_SOURCE, "A file that becomes shorter while it is read is not named")
    if library is not None:
        library.batchloom_name_short_files()
    return library


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
