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
from batchloom.core.files import let_go
from batchloom.remote import BLOCK
from batchloom.store.format.file_header import CHECK, HEADER, map_headed, unlike
from batchloom.store.format.layout import checksum
from batchloom.store.format.megatron_index import map_file

MAGIC = b"BLMSUMS\x00"
# One checksum, or one and the tokens before.
PLAIN, COUNTED = 8, 16
_STRETCH = 8 << 20

Sum64 = NDArray[np.uint64]


def block_sums(data: Any) -> Sum64:
    """The XXH3-64 of each 4096 bytes of ``data``, the last of them perhaps shorter, u64 [N]."""
    view, digest = memoryview(data).cast("B"), xxhash.xxh3_64_intdigest
    found = [digest(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]
    return np.array(found, np.uint64)


@final
class BlockSums:
    """The checksums of a file's blocks as its bytes come.

    Args:
        width: bytes of an entry: ``PLAIN``, or ``COUNTED`` for lengths as u32.
    """

    def __init__(self, width: int = PLAIN) -> None:
        self._width, self._rest = width, bytearray()
        self._sums: list[Sum64] = []
        self._tokens: list[Sum64] = []

    def append(self, data: Any) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            some = view[: BLOCK - len(self._rest)]
            self._rest += some
            view = view[len(some) :]
            if len(self._rest) < BLOCK:
                return
            self._add(self._rest)
            self._rest = bytearray()
        whole = len(view) // BLOCK * BLOCK
        if whole:
            self._add(view[:whole])
        self._rest += view[whole:]

    def passing(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Pieces of the file as they are given, each added on its way."""
        for piece in pieces:
            self.append(piece)
            yield piece

    def _add(self, blocks: Any) -> None:
        self._sums.append(block_sums(blocks))
        if self._width == COUNTED:
            lengths = np.frombuffer(blocks, "<u4").reshape(-1, BLOCK // 4)
            self._tokens.append(lengths.sum(axis=1, dtype=np.uint64))

    def to_bytes(self) -> tuple[bytes, str]:
        """The whole ``.sums`` file, and the checksum of its head."""
        sums = [*self._sums, block_sums(self._rest)]
        found = np.concatenate(sums) if len(sums) > 1 else sums[0]
        if self._width == COUNTED:
            tokens = np.concatenate([np.zeros(1, np.uint64), *self._tokens])
            before = np.cumsum(tokens, dtype=np.uint64)[: found.size]
            entries = np.stack([found, before], axis=1).tobytes()
        else:
            entries = found.tobytes()
        head = HEADER.pack(MAGIC, 1, found.size, self._width) + block_sums(entries).tobytes()
        head += bytes(-len(head) % BLOCK)
        return head + entries, checksum(head)


def sums_of_file(path: Path) -> BlockSums:
    """The checksums of the blocks of a whole file.

    Raises:
        StoreError: it cannot be read.
    """
    found, view = BlockSums(), map_file(path)
    for start in range(0, len(view), _STRETCH):
        stretch = np.frombuffer(view[start : start + _STRETCH], np.uint8)
        found.append(stretch.data)
        let_go(stretch)
    return found


def entries_of(size: int) -> int:
    """How many entries the ``.sums`` of a file of ``size`` bytes has."""
    return -(-size // BLOCK)


def head_bytes(size: int, width: int) -> int:
    """Bytes before the entries in the ``.sums`` of a file of ``size`` bytes."""
    return -(-(HEADER.size + 8 * _roots(size, width)) // BLOCK) * BLOCK


def _roots(size: int, width: int) -> int:
    return -(-entries_of(size) * width // BLOCK)


def roots_of(head: bytes | memoryview, stated: str, size: int, width: int) -> Sum64 | None:
    """The roots of a ``.sums`` file from its head; None where the head is not what the manifest says.

    Args:
        head: what stands before the entries.
        stated: their checksum in the manifest.
        size: bytes of the file that it is of.
        width: bytes of an entry.
    """
    if len(head) != head_bytes(size, width) or checksum(head) != stated:
        return None
    if HEADER.unpack_from(head) != (MAGIC, 1, entries_of(size), width):
        return None
    return np.frombuffer(head, "<u8", _roots(size, width), HEADER.size)


@final
class Sums:
    """A mapped ``.sums`` file; what of it is read is checked first, once.

    Attributes:
        path: of the file.
        before: tokens before each block, u64 [N], of a file of lengths; not checked before :meth:`expected` is.
    """

    def __init__(self, path: Path, roots: Sum64, entries: NDArray[np.uint8], width: int) -> None:
        self.path, self._roots, self._raw, self._width = path, roots, entries, width
        self._entries: Sum64 = entries.view("<u8").reshape(-1, width // 8)
        self._sound = np.zeros(len(roots), bool)

    def expected(self, first: int, stop: int) -> Sum64:
        """The checksums of blocks ``first`` to ``stop - 1``, u64.

        Raises:
            StoreError: the file was changed.
        """
        start, end = first * self._width // BLOCK, -(-stop * self._width // BLOCK)
        if not self._sound[start:end].all():
            found = block_sums(self._raw[start * BLOCK : end * BLOCK].data)
            if not np.array_equal(found, self._roots[start:end]):
                raise StoreError(f"{self.path}: checksum differs from the manifest's. {CHECK}")
            self._sound[start:end] = True
        return self._entries[first:stop, 0]

    @property
    def entries(self) -> memoryview:
        """The checksums of all blocks as Python ints, of a ``.bin``; not checked before :meth:`expected` is."""
        return self._raw.data.cast("Q")

    @property
    def before(self) -> Sum64:
        """Tokens before each block, u64 [N]."""
        return self._entries[:, 1]


def map_sums(path: Path, stated: str, size: int, width: int = PLAIN) -> Sums:
    """Map the ``.sums`` file of a file of ``size`` bytes.

    Raises:
        StoreError: it is missing, of another kind, version or number of blocks, or its head is not
            what the manifest says.
    """
    view, count, stated_width = map_headed(path, MAGIC)
    if stated_width != width:
        raise unlike(path)
    head = head_bytes(size, width)
    if count != entries_of(size) or len(view) != head + count * width:
        raise StoreError(
            f"{path} says {count:,} blocks in {len(view):,} bytes; its file has {entries_of(size):,}. {CHECK}"
        )
    roots = roots_of(view[:head], stated, size, width)
    if roots is None:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK}")
    return Sums(path, roots, np.frombuffer(view, np.uint8, offset=head), width)
