"""Verification of local files by their checksums, as they are read."""

from pathlib import Path
from typing import final

import numpy as np

from batchloom.core.errors import StoreError
from batchloom.remote import BLOCK_BYTES
from batchloom.store.format.block_checksums import ChecksumFile, count_entries, locate_entries, map_checksum_file
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.manifest import ShardEntry, SubsetEntry
from batchloom.store.format.megatron_index import map_file
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, HEADER, LossMask, LossWeights
from batchloom.store.read.subset_files import Ids

# Flags are verified in runs of documents with about so many tokens: 32 KiB of a .mask, which a disk reads at once.
_RUN_TOKENS = 1 << 18


@final
class FirstRead:
    """Verification of the tokens of one subset as they are read."""

    def __init__(self, folder: Path, subset: SubsetEntry, *, always: bool) -> None:
        self._folder = folder
        self._subset = subset
        self.always = always
        self.max_mapped = 16
        # Each shard gets one extra block: an empty document at its end begins there.
        blocks = np.array([-(-shard.bytes // BLOCK_BYTES) + 1 for shard in subset.shards], np.int64)
        self._bases = np.cumsum(blocks) - blocks
        # Untouched pages of the zeroed array take no memory.
        self._verified_blocks = np.zeros(int(blocks.sum()), bool)
        self._verified_blocks[self._bases + blocks - 1] = True
        self._shards: dict[int, tuple[memoryview, ChecksumFile]] = {}
        for name, layer in zip(subset.length_files, subset.all_layers, strict=True):
            verify_file(folder / name, layer.lengths)
        if subset.removed is not None and subset.removed_file is not None:
            verify_file(folder / subset.removed_file, subset.removed.file)

    def verify_spans(self, shards: Ids, begins: Ids, sizes: Ids) -> None:
        bases = self._bases.take(shards)
        firsts = bases + begins // BLOCK_BYTES
        lasts = np.maximum(firsts, bases + (begins + (sizes - 1)) // BLOCK_BYTES)
        if self.always:
            pending_spans = np.flatnonzero(sizes)
        else:
            # The flags of the first and last block do not cover the inner blocks of a longer span.
            is_verified = self._verified_blocks.take(firsts)
            is_verified &= self._verified_blocks.take(lasts)
            is_verified &= lasts - firsts <= 1
            if is_verified.all():
                return
            pending_spans = np.flatnonzero(~is_verified)
        counts = lasts[pending_spans] - firsts[pending_spans] + 1
        preceding_blocks = np.cumsum(counts) - counts
        blocks = np.arange(counts.sum()) + (firsts[pending_spans] - preceding_blocks).repeat(counts)
        owners = shards[pending_spans].repeat(counts)
        if not self.always:
            unverified = ~self._verified_blocks.take(blocks)
            blocks = blocks[unverified]
            owners = owners[unverified]
        self._verify_blocks(owners.tolist(), (blocks - self._bases.take(owners)).tolist())
        self._verified_blocks[blocks] = True

    def _verify_blocks(self, owners: list[int], blocks: list[int]) -> None:
        for shard, block in zip(owners, blocks, strict=True):
            data, checksums = self._shards.get(shard) or self._map(shard)
            checksums.verify(self._folder / f"{self._subset.shards[shard].name}.bin", data, [block])

    def _map(self, shard: int) -> tuple[memoryview, ChecksumFile]:
        """Map a shard and its block checksums."""
        entry = self._subset.shards[shard]
        data = map_file(self._folder / f"{entry.name}.bin")
        if len(self._shards) >= self.max_mapped:
            self._shards.pop(next(iter(self._shards)))
        mapped = self._shards[shard] = (
            data,
            map_checksum_file(self._folder / f"{entry.name}.sums", entry.sums, count_entries(entry)),
        )
        return mapped


@final
class FlagChecks:
    """Verification of the loss flags of one subset, by runs of documents."""

    def __init__(self, folder: Path, subset: SubsetEntry) -> None:
        self._folder = folder
        self._subset = subset
        self._run_documents = max(1, _RUN_TOKENS * subset.documents // max(subset.tokens, 1))
        # Untouched pages of the zeroed array take no memory.
        self._is_verified = np.zeros(-(-subset.documents // self._run_documents), bool)
        self.max_mapped = 16
        self._shards: dict[int, ChecksumFile] = {}

    def list_unverified(self, documents: Ids) -> list[range]:
        """Return the runs that hold these documents and were not verified."""
        runs = documents // self._run_documents
        is_verified = self._is_verified.take(runs)
        if is_verified.all():
            return []
        firsts = [run * self._run_documents for run in sorted(set(runs[~is_verified].tolist()))]
        return [range(first, min(first + self._run_documents, self._subset.documents)) for first in firsts]

    def mark_verified(self, run: range) -> None:
        """Do not list a run again."""
        self._is_verified[run.start // self._run_documents] = True

    def verify(self, shard: int, flags: LossMask | LossWeights, tokens: range) -> None:
        """Verify the flags of tokens of a shard by the blocks that hold them."""
        entry = self._subset.shards[shard]
        path = self._folder / f"{entry.name}{flags.suffix}"
        checksums = self._shards.get(shard) or self._map(shard, entry)
        first_byte = HEADER.size + tokens[0] // flags.tokens_per_byte
        last_byte = HEADER.size + tokens[-1] // flags.tokens_per_byte
        blocks = range(first_byte // BLOCK_BYTES, last_byte // BLOCK_BYTES + 1)
        checksums.verify(path, flags.content, blocks, locate_entries(entry)[flags.suffix].start)

    def _map(self, shard: int, entry: ShardEntry) -> ChecksumFile:
        if len(self._shards) >= self.max_mapped:
            self._shards.pop(next(iter(self._shards)))
        path = self._folder / f"{entry.name}.sums"
        checksums = self._shards[shard] = map_checksum_file(path, entry.sums, count_entries(entry))
        return checksums


def verify_file(path: Path, expected_checksum: str, view: memoryview | None = None) -> None:
    """Compare a file, or its mapped content, with its checksum in the manifest."""
    if compute_checksum(map_file(path) if view is None else view) != expected_checksum:
        raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")
