r"""The ``.sums`` file: a checksum of each 4 KiB of a ``.bin`` or of a file of lengths, so that parts can be checked.

Layout (little-endian): 8 bytes ``BLMSUMS\0``; u64 version 1; u64 entries N; u64 bytes of an entry W, 8 or 16;
then the roots u64 [ceil(N W / 4096)], the XXH3-64 of each 4096 bytes of the entries; zeros up to a multiple of
4096; then the entries. An entry is the XXH3-64 of one block of 4096 bytes of the file (the last may be shorter);
of a file of lengths, behind it, the tokens of all documents in the blocks before, u64. The checksum in the
manifest is that of what stands before the entries, which holds that of all the rest: whoever reads a few blocks
reads a few entries.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import release_pages
from batchloom.remote import BLOCK_BYTES
from batchloom.store.format.file_header import (
    CHECK_REMEDY,
    HEADER,
    make_wrong_format_error,
    map_file_with_header,
)
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.megatron_index import map_file

MAGIC = b"BLMSUMS\x00"
# One checksum, or one and the tokens before.
PLAIN_ENTRY_BYTES, COUNTED_ENTRY_BYTES = 8, 16
_CHUNK_BYTES = 8 << 20

ChecksumArray = NDArray[np.uint64]


def compute_block_checksums(data: Any) -> ChecksumArray:
    """The XXH3-64 of each 4096 bytes of ``data``, the last of them perhaps shorter, u64 [N]."""
    view, digest = memoryview(data).cast("B"), xxhash.xxh3_64_intdigest
    checksums = [digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return np.array(checksums, np.uint64)


@final
class BlockChecksums:
    """The checksums of a file's blocks as its bytes come.

    Args:
        width: bytes of an entry: ``PLAIN_ENTRY_BYTES``, or ``COUNTED_ENTRY_BYTES`` for lengths as u32.
    """

    def __init__(self, width: int = PLAIN_ENTRY_BYTES) -> None:
        self._width, self._partial_block = width, bytearray()
        self._checksums: list[ChecksumArray] = []
        self._tokens: list[ChecksumArray] = []

    def append(self, data: Any) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        if self._partial_block:
            completion = view[: BLOCK_BYTES - len(self._partial_block)]
            self._partial_block += completion
            view = view[len(completion) :]
            if len(self._partial_block) < BLOCK_BYTES:
                return
            self._add(self._partial_block)
            self._partial_block = bytearray()
        aligned_size = len(view) // BLOCK_BYTES * BLOCK_BYTES
        if aligned_size:
            self._add(view[:aligned_size])
        self._partial_block += view[aligned_size:]

    def iter_and_add(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Pieces of the file as they are given, each added on its way."""
        for chunk in chunks:
            self.append(chunk)
            yield chunk

    def _add(self, blocks: Any) -> None:
        self._checksums.append(compute_block_checksums(blocks))
        if self._width == COUNTED_ENTRY_BYTES:
            lengths = np.frombuffer(blocks, "<u4").reshape(-1, BLOCK_BYTES // 4)
            self._tokens.append(lengths.sum(axis=1, dtype=np.uint64))

    def to_bytes(self) -> tuple[bytes, str]:
        """The whole ``.sums`` file, and the checksum of its head."""
        checksum_arrays = [*self._checksums, compute_block_checksums(self._partial_block)]
        checksums = np.concatenate(checksum_arrays) if len(checksum_arrays) > 1 else checksum_arrays[0]
        if self._width == COUNTED_ENTRY_BYTES:
            tokens = np.concatenate([np.zeros(1, np.uint64), *self._tokens])
            preceding_tokens = np.cumsum(tokens, dtype=np.uint64)[: checksums.size]
            entries = np.stack([checksums, preceding_tokens], axis=1).tobytes()
        else:
            entries = checksums.tobytes()
        head = HEADER.pack(MAGIC, 1, checksums.size, self._width) + compute_block_checksums(entries).tobytes()
        head += bytes(-len(head) % BLOCK_BYTES)
        return head + entries, compute_checksum(head)


def compute_file_checksums(path: Path) -> BlockChecksums:
    """The checksums of the blocks of a whole file.

    Raises:
        StoreError: it cannot be read.
    """
    checksums, view = BlockChecksums(), map_file(path)
    for start in range(0, len(view), _CHUNK_BYTES):
        chunk = np.frombuffer(view[start : start + _CHUNK_BYTES], np.uint8)
        checksums.append(chunk.data)
        release_pages(chunk)
    return checksums


def count_entries(size: int) -> int:
    """How many entries the ``.sums`` of a file of ``size`` bytes has."""
    return -(-size // BLOCK_BYTES)


def count_header_bytes(size: int, width: int) -> int:
    """Bytes before the entries in the ``.sums`` of a file of ``size`` bytes."""
    return -(-(HEADER.size + 8 * _count_root_checksums(size, width)) // BLOCK_BYTES) * BLOCK_BYTES


def _count_root_checksums(size: int, width: int) -> int:
    return -(-count_entries(size) * width // BLOCK_BYTES)


def parse_root_checksums(
    head: bytes | memoryview, expected_checksum: str, size: int, width: int
) -> ChecksumArray | None:
    """The roots of a ``.sums`` file from its head; None where the head is not what the manifest says.

    Args:
        head: what stands before the entries.
        expected_checksum: their checksum in the manifest.
        size: bytes of the file that it is of.
        width: bytes of an entry.
    """
    if len(head) != count_header_bytes(size, width) or compute_checksum(head) != expected_checksum:
        return None
    if HEADER.unpack_from(head) != (MAGIC, 1, count_entries(size), width):
        return None
    return np.frombuffer(head, "<u8", _count_root_checksums(size, width), HEADER.size)


@final
class ChecksumFile:
    """A mapped ``.sums`` file; what of it is read is checked first, once.

    Attributes:
        path: of the file.
        preceding_tokens: tokens before each block of a file of lengths, u64 [N]; :meth:`read_checksums` checks it.
    """

    def __init__(self, path: Path, root_checksums: ChecksumArray, entries: NDArray[np.uint8], width: int) -> None:
        self.path, self._root_checksums, self._raw, self._width = (
            path,
            root_checksums,
            entries,
            width,
        )
        self._entries: ChecksumArray = entries.view("<u8").reshape(-1, width // 8)
        self._verified_blocks = np.zeros(len(root_checksums), bool)

    def read_checksums(self, first: int, stop: int) -> ChecksumArray:
        """The checksums of blocks ``first`` to ``stop - 1``, u64.

        Raises:
            StoreError: the file was changed.
        """
        start, end = first * self._width // BLOCK_BYTES, -(-stop * self._width // BLOCK_BYTES)
        if not self._verified_blocks[start:end].all():
            checksums = compute_block_checksums(self._raw[start * BLOCK_BYTES : end * BLOCK_BYTES].data)
            if not np.array_equal(checksums, self._root_checksums[start:end]):
                raise StoreError(f"{self.path}: checksum differs from the manifest's. {CHECK_REMEDY}")
            self._verified_blocks[start:end] = True
        return self._entries[first:stop, 0]

    @property
    def entries(self) -> memoryview:
        """The checksums of all blocks as Python ints, of a ``.bin``; not checked before :meth:`expected` is."""
        return self._raw.data.cast("Q")

    @property
    def preceding_tokens(self) -> ChecksumArray:
        """Tokens before each block, u64 [N]."""
        return self._entries[:, 1]


def map_checksum_file(path: Path, expected_checksum: str, size: int, width: int = PLAIN_ENTRY_BYTES) -> ChecksumFile:
    """Map the ``.sums`` file of a file of ``size`` bytes.

    Raises:
        StoreError: it is missing, of another kind, version or number of blocks, or its head is not
            what the manifest says.
    """
    view, count, header_width = map_file_with_header(path, MAGIC)
    if header_width != width:
        raise make_wrong_format_error(path)
    head = count_header_bytes(size, width)
    if count != count_entries(size) or len(view) != head + count * width:
        raise StoreError(
            f"{path} says {count:,} blocks in {len(view):,} bytes; its file has {count_entries(size):,}. {CHECK_REMEDY}"
        )
    root_checksums = parse_root_checksums(view[:head], expected_checksum, size, width)
    if root_checksums is None:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
    return ChecksumFile(path, root_checksums, np.frombuffer(view, np.uint8, offset=head), width)
