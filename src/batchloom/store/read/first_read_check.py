"""Checking shards of this machine while they are read: each block of 4 KiB once, or every time."""

from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.remote import BLOCK
from batchloom.store.format import CHECK, PLAIN, SubsetEntry, Sums, checksum, map_file, map_sums

Ids = NDArray[np.int64]
# Entries of a .sums file that one of its roots is of.
ENTRIES = BLOCK // PLAIN


class _Mapped(NamedTuple):
    """A mapped shard: its bytes, the entries of its blocks, and which of these were compared."""

    data: memoryview
    entries: memoryview
    sums: Sums
    known: bytearray


@final
class FirstRead:
    """The checks of one subset. A shard of an older store, which has no checksums of blocks, is checked whole.

    Args:
        folder: of the subset.
        subset: what the manifest says of it.
        always: whether what was checked is checked again.

    Attributes:
        always: as given.
        most: shards that are kept mapped, besides those of the store; each takes two descriptors.

    Raises:
        StoreError: the lengths of the documents were changed, or the list of removed ones.
    """

    def __init__(self, folder: Path, subset: SubsetEntry, *, always: bool) -> None:
        self._folder, self._subset, self.always, self.most = folder, subset, always, 16
        # Behind the blocks of each shard is one more: an empty document at its end lies there.
        blocks = np.array([-(-shard.bytes // BLOCK) + 1 for shard in subset.shards], np.int64)
        self._bases = np.cumsum(blocks) - blocks
        # Memory that is not written to is not taken.
        self._sound = np.zeros(int(blocks.sum()), bool)
        self._sound[self._bases + blocks - 1] = True
        self._shards: dict[int, _Mapped] = {}
        self._compared: set[int] = set()
        for name, layer in zip(subset.length_files, subset.all_layers, strict=True):
            self._whole(folder / name, layer.lengths)
        if subset.removed is not None and subset.removed_file is not None:
            self._whole(folder / subset.removed_file, subset.removed.file)

    def mask(self, shard: int) -> None:
        """Check the mask of a shard.

        Raises:
            StoreError: it was changed.
        """
        entry = self._subset.shards[shard]
        if entry.mask is not None:
            self._whole(self._folder / f"{entry.name}.mask", entry.mask)

    def spans(self, shards: Ids, begins: Ids, sizes: Ids) -> None:
        """Check the blocks that hold spans of mapped shards.

        Args:
            shards: the shard of each [N].
            begins: the byte where each begins in it [N].
            sizes: bytes of each [N].

        Raises:
            StoreError: a shard was changed, or its ``.sums``.
        """
        bases = self._bases.take(shards)
        firsts = bases + begins // BLOCK
        lasts = np.maximum(firsts, bases + (begins + (sizes - 1)) // BLOCK)
        if self.always:
            doubtful = np.flatnonzero(sizes)
        else:
            # Of a span of three blocks and more those in the middle are looked at, too.
            sound = self._sound.take(firsts)
            sound &= self._sound.take(lasts)
            sound &= lasts - firsts <= 1
            if sound.all():
                return
            doubtful = np.flatnonzero(~sound)
        counts = lasts[doubtful] - firsts[doubtful] + 1
        before = np.cumsum(counts) - counts
        blocks = np.arange(counts.sum()) + (firsts[doubtful] - before).repeat(counts)
        owners = shards[doubtful].repeat(counts)
        if not self.always:
            unknown = ~self._sound.take(blocks)
            blocks, owners = blocks[unknown], owners[unknown]
        self._check(owners.tolist(), (blocks - self._bases.take(owners)).tolist())
        self._sound[blocks] = True

    def _check(self, owners: list[int], blocks: list[int]) -> None:
        digest, shards = xxhash.xxh3_64_intdigest, self._shards
        for shard, block in zip(owners, blocks, strict=True):
            mapped = shards.get(shard) or self._map(shard)
            if mapped is None:
                continue
            data, entries, sums, known = mapped
            if not known[block // ENTRIES]:
                sums.expected(block, block + 1)
                known[block // ENTRIES] = 1
            if digest(data[BLOCK * block : BLOCK * block + BLOCK]) != entries[block]:
                name = self._subset.shards[shard].name
                raise StoreError(
                    f"{self._folder / name}.bin holds other bytes from {BLOCK * block:,} to {BLOCK * (block + 1):,} "
                    f"than its checksums say: it was changed or damaged. {CHECK}"
                )

    def _map(self, shard: int) -> "_Mapped | None":
        """Map a shard; None of an older store, which is compared as a whole, once."""
        entry = self._subset.shards[shard]
        path = self._folder / f"{entry.name}.bin"
        if entry.sums is None:
            if shard not in self._compared:
                self._whole(path, entry.bin)
                self._compared.add(shard)
            return None
        data = map_file(path)
        sums = map_sums(self._folder / f"{entry.name}.sums", entry.sums, len(data))
        if len(self._shards) >= self.most:
            self._shards.pop(next(iter(self._shards)))
        mapped = _Mapped(data, sums.entries, sums, bytearray(-(-len(sums.entries) // ENTRIES)))
        self._shards[shard] = mapped
        return mapped

    def _whole(self, path: Path, stated: str) -> None:
        if checksum(map_file(path)) != stated:
            raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK}")
