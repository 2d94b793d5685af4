r"""The ``.sums`` file: checksums of the 4 KiB blocks of a ``.bin`` or lengths file.

Layout (little-endian): 8 bytes ``BLMSUMS\0``; u64 version 1; u64 number of entries N; u64 bytes per entry W, 8 or 16;
then the root checksums u64 [ceil(N W / 4096)], the XXH3-64 of each 4096 bytes of the entries; zero padding to a
multiple of 4096; then the entries. An entry is the XXH3-64 of one 4096-byte block of the file (the last block may be
shorter). In the ``.sums`` of a lengths file, each entry also holds the token count of all documents in earlier blocks,
u64. The checksum in the manifest covers the bytes before the entries, which hold the checksums of the entries: reading
a few blocks takes a few entries.
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
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import (
    CHECK_REMEDY,
    HEADER,
    check_size,
    make_wrong_format_error,
    map_file_with_header,
)

MAGIC = b"BLMSUMS\x00"
# A checksum alone, or a checksum followed by the number of tokens before the block.
PLAIN_ENTRY_BYTES, COUNTED_ENTRY_BYTES = 8, 16
# Checksums of a .bin that one root checksum covers.
ENTRIES_PER_BLOCK = BLOCK_BYTES // PLAIN_ENTRY_BYTES
_CHUNK_BYTES = 8 << 20

ChecksumArray = NDArray[np.uint64]


def compute_block_checksums(data: Any) -> ChecksumArray:
    """Return the XXH3-64 of each 4096 bytes of ``data``, u64 [N].

    The last block may be shorter.
    """
    view, digest = memoryview(data).cast("B"), xxhash.xxh3_64_intdigest
    checksums = [digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return np.array(checksums, np.uint64)


@final
class BlockChecksums:
    """Incremental block checksums of a file.

    Args:
        width: bytes per entry: ``PLAIN_ENTRY_BYTES``, or ``COUNTED_ENTRY_BYTES`` for lengths as u32.
    """

    def __init__(self, width: int = PLAIN_ENTRY_BYTES) -> None:
        self._width, self._partial_block = width, bytearray()
        self._checksums: list[ChecksumArray] = []
        self._tokens: list[ChecksumArray] = []

    def append(self, data: Any) -> None:
        """Add the next bytes of the file."""
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
        """Yield the chunks unchanged, adding each one."""
        for chunk in chunks:
            self.append(chunk)
            yield chunk

    def _add(self, blocks: Any) -> None:
        self._checksums.append(compute_block_checksums(blocks))
        if self._width == COUNTED_ENTRY_BYTES:
            lengths = np.frombuffer(blocks, "<u4").reshape(-1, BLOCK_BYTES // 4)
            self._tokens.append(lengths.sum(axis=1, dtype=np.uint64))

    def to_bytes(self) -> tuple[bytes, str]:
        """Return the complete ``.sums`` file and the checksum of its header."""
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
    """Compute the block checksums of a file."""
    checksums, view = BlockChecksums(), map_file(path)
    for start in range(0, len(view), _CHUNK_BYTES):
        chunk = np.frombuffer(view[start : start + _CHUNK_BYTES], np.uint8)
        checksums.append(chunk.data)
        release_pages(chunk)
    return checksums


def count_entries(size: int) -> int:
    """Return the number of entries in the ``.sums`` of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def count_header_bytes(size: int, width: int) -> int:
    """Return the number of bytes before the entries of a ``.sums`` file."""
    return -(-(HEADER.size + 8 * _count_root_checksums(size, width)) // BLOCK_BYTES) * BLOCK_BYTES


def _count_root_checksums(size: int, width: int) -> int:
    return -(-count_entries(size) * width // BLOCK_BYTES)


def parse_root_checksums(
    head: bytes | memoryview, expected_checksum: str, size: int, width: int
) -> ChecksumArray | None:
    """Return the root checksums in the header of a ``.sums`` file, u64."""
    if len(head) != count_header_bytes(size, width) or compute_checksum(head) != expected_checksum:
        return None
    if HEADER.unpack_from(head) != (MAGIC, 1, count_entries(size), width):
        return None
    return np.frombuffer(head, "<u8", _count_root_checksums(size, width), HEADER.size)


@final
class ChecksumFile:
    """A mapped ``.sums`` file of a ``.bin``.

    Attributes:
        entries: checksums of all blocks, as Python ints; trustworthy after :meth:`verify_entry`.
        verified: flag of each 4 KiB of the entries.
    """

    def __init__(self, path: Path, root_checksums: ChecksumArray, data: memoryview) -> None:
        self.path, self._root_checksums, self._data = path, root_checksums, data
        self.entries = data.cast("Q")
        self.verified = bytearray(len(root_checksums))

    def verify_entry(self, block: int) -> None:
        """Verify the 4 KiB of entries that hold the checksum of a block."""
        number = block // ENTRIES_PER_BLOCK
        data = self._data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(data) != self._root_checksums[number]:
            raise StoreError(f"{self.path}: checksum differs from the manifest's. {CHECK_REMEDY}")
        self.verified[number] = 1


def map_checksum_file(path: Path, expected_checksum: str, size: int) -> ChecksumFile:
    """Map the ``.sums`` file of a ``.bin`` of ``size`` bytes."""
    view, count, width = map_file_with_header(path, MAGIC)
    if width != PLAIN_ENTRY_BYTES:
        raise make_wrong_format_error(path)
    head = count_header_bytes(size, width)
    check_size(path, view, head + count * width, count=count, expected=count_entries(size), noun="blocks")
    root_checksums = parse_root_checksums(view[:head], expected_checksum, size, width)
    if root_checksums is None:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
    return ChecksumFile(path, root_checksums, view[head:])
