r"""Checksums of the blocks of files, which verify what is read of them.

``.sums``, checksums of the 4 KiB blocks of a lengths file, or of a shard's ``.bin``, then of its ``.mask`` and
``.weights`` if it has them: ``BLMSUMS\0``, 1, entries N, bytes per entry W, 8 or 16; then the root checksums u64
[ceil(N W / 4096)], the XXH3-64 of each 4096 bytes of the entries; zero padding to a multiple of 4096; then the entries.
An entry is the XXH3-64 of one 4096-byte block of a file (the last block of each file may be shorter). In the ``.sums``
of a lengths file, each entry also holds the token count of all documents in earlier blocks, u64. The checksum in the
manifest covers the bytes before the entries, which hold the checksums of the entries: reading a few blocks takes a few
entries.
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
from batchloom.store.format.manifest import ShardEntry
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import (
    CHECK_REMEDY,
    HEADER,
    check_size,
    compute_mask_size,
    compute_weights_size,
    make_wrong_format_error,
    map_file_with_header,
)

SUMS_MAGIC = b"BLMSUMS\x00"
# A checksum alone, or a checksum followed by the number of tokens before the block.
PLAIN_ENTRY_BYTES = 8
COUNTED_ENTRY_BYTES = 16
# Checksums of a .bin that one root checksum covers.
_ENTRIES_PER_BLOCK = BLOCK_BYTES // PLAIN_ENTRY_BYTES
_CHUNK_BYTES = 8 << 20

ChecksumArray = NDArray[np.uint64]


def compute_block_checksums(data: Any) -> ChecksumArray:
    """Return the XXH3-64 of each 4096 bytes of ``data``, u64 [N].

    The last block may be shorter.
    """
    view = memoryview(data).cast("B")
    digest = xxhash.xxh3_64_intdigest
    checksums = [digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return np.array(checksums, np.uint64)


@final
class BlockChecksums:
    """Incremental block checksums of a file.

    Args:
        width: bytes per entry: ``PLAIN_ENTRY_BYTES``, or ``COUNTED_ENTRY_BYTES`` for lengths as u32.
    """

    def __init__(self, width: int = PLAIN_ENTRY_BYTES) -> None:
        self._width = width
        self._partial_block = bytearray()
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

    def append_file(self, path: Path) -> None:
        """Begin a block, and add the bytes of a file."""
        if self._partial_block:
            self._add(self._partial_block)
            self._partial_block = bytearray()
        view = map_file(path)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = np.frombuffer(view[start : start + _CHUNK_BYTES], np.uint8)
            self.append(chunk.data)
            release_pages(chunk)

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
        head = HEADER.pack(SUMS_MAGIC, 1, checksums.size, self._width) + compute_block_checksums(entries).tobytes()
        head += bytes(-len(head) % BLOCK_BYTES)
        return head + entries, compute_checksum(head)


def compute_file_checksums(path: Path) -> BlockChecksums:
    """Compute the block checksums of a file."""
    checksums = BlockChecksums()
    checksums.append_file(path)
    return checksums


def count_blocks(size: int) -> int:
    """Return the number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def locate_entries(shard: ShardEntry) -> dict[str, range]:
    """Return the numbers of the entries in a shard's ``.sums``, by suffix of the file.

    It covers the ``.bin``, the ``.mask`` and the ``.weights``.
    """
    sizes = {".bin": shard.bytes}
    if shard.mask is not None:
        sizes[".mask"] = compute_mask_size(shard.tokens)
    if shard.weights is not None:
        sizes[".weights"] = compute_weights_size(shard.tokens)
    entries = {}
    first = 0
    for suffix, size in sizes.items():
        entries[suffix] = range(first, first + count_blocks(size))
        first = entries[suffix].stop
    return entries


def count_entries(shard: ShardEntry) -> int:
    """Return the number of entries in the ``.sums`` of a shard."""
    return sum(map(len, locate_entries(shard).values()))


def count_header_bytes(entries: int, width: int) -> int:
    """Return the number of bytes before the entries of a ``.sums`` file."""
    return -(-(HEADER.size + 8 * _count_root_checksums(entries, width)) // BLOCK_BYTES) * BLOCK_BYTES


def _count_root_checksums(entries: int, width: int) -> int:
    return -(-entries * width // BLOCK_BYTES)


def parse_root_checksums(
    head: bytes | memoryview, expected_checksum: str, entries: int, width: int
) -> ChecksumArray | None:
    """Return the root checksums in the header of a ``.sums`` file, u64."""
    if len(head) != count_header_bytes(entries, width) or compute_checksum(head) != expected_checksum:
        return None
    if HEADER.unpack_from(head) != (SUMS_MAGIC, 1, entries, width):
        return None
    return np.frombuffer(head, "<u8", _count_root_checksums(entries, width), HEADER.size)


@final
class ChecksumFile:
    """A mapped ``.sums`` file of a shard."""

    def __init__(self, path: Path, root_checksums: ChecksumArray, data: memoryview) -> None:
        self._path = path
        self._root_checksums = root_checksums
        self._data = data
        self._entries = data.cast("Q")
        self._verified = bytearray(len(root_checksums))

    def verify(self, path: Path, data: memoryview, blocks: Iterable[int], first_entry: int = 0) -> None:
        """Compare blocks of a file with their checksums, which are verified themselves.

        Args:
            path: path of the file, for errors.
            data: content of the file.
            blocks: numbers of blocks of the file.
            first_entry: entry of its first block.

        Raises:
            StoreError: a block, or the checksums, were changed.
        """
        digest = xxhash.xxh3_64_intdigest
        for block in blocks:
            entry = first_entry + block
            if not self._verified[entry // _ENTRIES_PER_BLOCK]:
                self._verify_entries(entry // _ENTRIES_PER_BLOCK)
            begin = BLOCK_BYTES * block
            if digest(data[begin : begin + BLOCK_BYTES]) != self._entries[entry]:
                raise StoreError(
                    f"{path}: bytes {begin:,} to {begin + BLOCK_BYTES:,} do not match its checksums; it was changed or "
                    f"damaged. {CHECK_REMEDY}"
                )

    def _verify_entries(self, number: int) -> None:
        """Verify 4 KiB of entries."""
        data = self._data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(data) != self._root_checksums[number]:
            raise StoreError(f"{self._path}: checksum differs from the manifest's. {CHECK_REMEDY}")
        self._verified[number] = 1


def map_checksum_file(path: Path, expected_checksum: str, entries: int) -> ChecksumFile:
    """Map the ``.sums`` file of a shard with so many entries."""
    view, count, width = map_file_with_header(path, SUMS_MAGIC)
    if width != PLAIN_ENTRY_BYTES:
        raise make_wrong_format_error(path)
    head = count_header_bytes(entries, width)
    check_size(path, view, head + entries * width, count=count, expected=entries, noun="blocks")
    root_checksums = parse_root_checksums(view[:head], expected_checksum, entries, width)
    if root_checksums is None:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
    return ChecksumFile(path, root_checksums, view[head:])
