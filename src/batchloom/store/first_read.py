"""Checking shards of this machine while they are read: each block of 4 KiB once, or every time."""

from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format import checksum
from batchloom.store.headed import CHECK
from batchloom.store.index import map_file
from batchloom.store.manifest import SubsetEntry
from batchloom.store.sums import BLOCK, Sums, block_sums, map_sums


@final
class FirstRead:
    """The checks of one subset. A shard of an older store, which has no checksums of blocks, is checked whole.

    Args:
        folder: of the subset.
        subset: what the manifest says of it.
        always: whether what was checked is checked again.

    Attributes:
        always: as given.

    Raises:
        StoreError: the lengths of the documents were changed.
    """

    def __init__(self, folder: Path, subset: SubsetEntry, *, always: bool) -> None:
        self._folder, self._subset, self.always = folder, subset, always
        self._sums: dict[int, Sums | None] = {}
        self._sound: dict[int, NDArray[np.bool_]] = {}
        for name, layer in zip(subset.length_files, subset.all_layers, strict=True):
            self._whole(folder / name, layer.lengths)

    def mask(self, shard: int) -> None:
        """Check the mask of a shard.

        Raises:
            StoreError: it was changed.
        """
        entry = self._subset.shards[shard]
        if entry.mask is not None:
            self._whole(self._folder / f"{entry.name}.mask", entry.mask)

    def span(self, shard: int, tokens: NDArray[Any], begin: int, stop: int) -> None:
        """Check the blocks that hold tokens ``begin`` to ``stop - 1`` of a mapped shard.

        Raises:
            StoreError: the shard was changed, or its ``.sums``.
        """
        size = tokens.itemsize
        first, last = begin * size // BLOCK, -(-stop * size // BLOCK)
        sound = self._sound.get(shard)
        if sound is None:
            sound = self._begin(shard, tokens)
        if stop == begin or (not self.always and sound[first:last].all()):
            return
        sums = self._sums[shard]
        if sums is None:
            return
        raw = tokens.view(np.uint8)[BLOCK * first : BLOCK * last]
        if not np.array_equal(block_sums(raw.data), sums.expected(first, last)):
            entry = self._subset.shards[shard]
            raise StoreError(
                f"{self._folder / entry.name}.bin holds other bytes from {BLOCK * first:,} to {BLOCK * last:,} than "
                f"its checksums say: it was changed or damaged. {CHECK}"
            )
        sound[first:last] = True

    def _begin(self, shard: int, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        entry = self._subset.shards[shard]
        blocks = -(-tokens.nbytes // BLOCK)
        if entry.sums is None:
            self._whole(self._folder / f"{entry.name}.bin", entry.bin)
            self._sums[shard], sound = None, np.ones(blocks, bool)
        else:
            path = self._folder / f"{entry.name}.sums"
            self._sums[shard] = map_sums(path, entry.sums, tokens.nbytes)
            sound = np.zeros(blocks, bool)
        self._sound[shard] = sound
        return sound

    def _whole(self, path: Path, stated: str) -> None:
        if checksum(map_file(path)) != stated:
            raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK}")
