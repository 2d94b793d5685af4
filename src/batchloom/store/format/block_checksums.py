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
    found = [digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return np.array(found, np.uint64)


@final
class BlockChecksums:
    """The checksums of a file's blocks as its bytes come.

    Args:
        width: bytes of an entry: ``PLAIN_ENTRY_BYTES``, or ``COUNTED_ENTRY_BYTES`` for lengths as u32.
    """

    def __init__(self, width: int = PLAIN_ENTRY_BYTES) -> None:
        self._width, self._rest = width, bytearray()
        self._sums: list[ChecksumArray] = []
        self._tokens: list[ChecksumArray] = []

    def append(self, data: Any) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            some = view[: BLOCK_BYTES - len(self._rest)]
            self._rest += some
            view = view[len(some) :]
            if len(self._rest) < BLOCK_BYTES:
                return
            self._add(self._rest)
            self._rest = bytearray()
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._add(view[:whole])
        self._rest += view[whole:]

    def iter_and_add(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Pieces of the file as they are given, each added on its way."""
        for piece in pieces:
            self.append(piece)
            yield piece

    def _add(self, blocks: Any) -> None:
        self._sums.append(compute_block_checksums(blocks))
        if self._width == COUNTED_ENTRY_BYTES:
            lengths = np.frombuffer(blocks, "<u4").reshape(-1, BLOCK_BYTES // 4)
            self._tokens.append(lengths.sum(axis=1, dtype=np.uint64))

    def to_bytes(self) -> tuple[bytes, str]:
        """The whole ``.sums`` file, and the checksum of its head."""
        sums = [*self._sums, compute_block_checksums(self._rest)]
        found = np.concatenate(sums) if len(sums) > 1 else sums[0]
        if self._width == COUNTED_ENTRY_BYTES:
            tokens = np.concatenate([np.zeros(1, np.uint64), *self._tokens])
            before = np.cumsum(tokens, dtype=np.uint64)[: found.size]
            entries = np.stack([found, before], axis=1).tobytes()
        else:
            entries = found.tobytes()
        head = (
            HEADER.pack(MAGIC, 1, found.size, self._width)
            + compute_block_checksums(entries).tobytes()
        )
        head += bytes(-len(head) % BLOCK_BYTES)
        return head + entries, compute_checksum(head)


def compute_file_checksums(path: Path) -> BlockChecksums:
    """The checksums of the blocks of a whole file.

    Raises:
        StoreError: it cannot be read.
    """
    found, view = BlockChecksums(), map_file(path)
    for start in range(0, len(view), _CHUNK_BYTES):
        stretch = np.frombuffer(view[start : start + _CHUNK_BYTES], np.uint8)
        found.append(stretch.data)
        release_pages(stretch)
    return found


def count_entries(size: int) -> int:
    """How many entries the ``.sums`` of a file of ``size`` bytes has."""
    return -(-size // BLOCK_BYTES)


def count_header_bytes(size: int, width: int) -> int:
    """Bytes before the entries in the ``.sums`` of a file of ``size`` bytes."""
    return -(-(HEADER.size + 8 * _count_root_checksums(size, width)) // BLOCK_BYTES) * BLOCK_BYTES


def _count_root_checksums(size: int, width: int) -> int:
    return -(-count_entries(size) * width // BLOCK_BYTES)


def parse_root_checksums(
    head: bytes | memoryview, stated: str, size: int, width: int
) -> ChecksumArray | None:
    """The roots of a ``.sums`` file from its head; None where the head is not what the manifest says.

    Args:
        head: what stands before the entries.
        stated: their checksum in the manifest.
        size: bytes of the file that it is of.
        width: bytes of an entry.
    """
    if len(head) != count_header_bytes(size, width) or compute_checksum(head) != stated:
        return None
    if HEADER.unpack_from(head) != (MAGIC, 1, count_entries(size), width):
        return None
    return np.frombuffer(head, "<u8", _count_root_checksums(size, width), HEADER.size)


@final
class ChecksumFile:
    """A mapped ``.sums`` file; what of it is read is checked first, once.

    Attributes:
        path: of the file.
        before: tokens before each block, u64 [N], of a file of lengths; not checked before :meth:`expected` is.
    """

    def __init__(
        self, path: Path, roots: ChecksumArray, entries: NDArray[np.uint8], width: int
    ) -> None:
        self.path, self._roots, self._raw, self._width = path, roots, entries, width
        self._entries: ChecksumArray = entries.view("<u8").reshape(-1, width // 8)
        self._sound = np.zeros(len(roots), bool)

    def expected(self, first: int, stop: int) -> ChecksumArray:
        """The checksums of blocks ``first`` to ``stop - 1``, u64.

        Raises:
            StoreError: the file was changed.
        """
        start, end = first * self._width // BLOCK_BYTES, -(-stop * self._width // BLOCK_BYTES)
        if not self._sound[start:end].all():
            found = compute_block_checksums(self._raw[start * BLOCK_BYTES : end * BLOCK_BYTES].data)
            if not np.array_equal(found, self._roots[start:end]):
                raise StoreError(
                    f"{self.path}: checksum differs from the manifest's. {CHECK_REMEDY}"
                )
            self._sound[start:end] = True
        return self._entries[first:stop, 0]

    @property
    def entries(self) -> memoryview:
        """The checksums of all blocks as Python ints, of a ``.bin``; not checked before :meth:`expected` is."""
        return self._raw.data.cast("Q")

    @property
    def before(self) -> ChecksumArray:
        """Tokens before each block, u64 [N]."""
        return self._entries[:, 1]


def map_checksum_file(
    path: Path, stated: str, size: int, width: int = PLAIN_ENTRY_BYTES
) -> ChecksumFile:
    """Map the ``.sums`` file of a file of ``size`` bytes.

    Raises:
        StoreError: it is missing, of another kind, version or number of blocks, or its head is not
            what the manifest says.
    """
    view, count, stated_width = map_file_with_header(path, MAGIC)
    if stated_width != width:
        raise make_wrong_format_error(path)
    head = count_header_bytes(size, width)
    if count != count_entries(size) or len(view) != head + count * width:
        raise StoreError(
            f"{path} says {count:,} blocks in {len(view):,} bytes; its file has {count_entries(size):,}. {CHECK_REMEDY}"
        )
    roots = parse_root_checksums(view[:head], stated, size, width)
    if roots is None:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
    return ChecksumFile(path, roots, np.frombuffer(view, np.uint8, offset=head), width)
