"""Table of the files of a remote subset: sizes, checksums and block numbers.

Blocks are numbered consecutively through all files. Requested, cached and locked blocks are therefore plain
integer intervals. One unused number separates adjacent files.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote import BLOCK_BYTES, Intervals, merge_intervals
from batchloom.store.format.block_checksums import (
    COUNTED_ENTRY_BYTES,
    PLAIN_ENTRY_BYTES,
    count_entries,
    count_header_bytes,
)
from batchloom.store.format.layout import TOKEN_DTYPES
from batchloom.store.format.manifest import Manifest
from batchloom.store.format.provenance import PROVENANCE_ROW_BYTES
from batchloom.store.format.shard_sidecars import HEADER, PAIR_ROW_BYTES

# whole: by the checksum of the file; blocks: by one .sums entry each; entries: by the root checksums of a .sums.
CheckMethod = Literal["whole", "blocks", "entries", "nothing"]


class RemoteStoreFile(NamedTuple):
    """One remote file; header and entries of a ``.sums`` count as two.

    Attributes:
        name: path relative to the store's URL.
        size: size in bytes, from the manifest.
        checksum: checksum in the manifest, which identifies the content.
        check_method: verification method.
        checksum_file: number of the file with its block checksums; -1 if there is none.
        width: bytes per checksum entry, for a file verified by blocks.
        covered_bytes: for a ``.sums`` header, the size of the checksummed file.
        offset: byte offset in the file of that name.
        base: number of its first block.
    """

    name: str
    size: int
    checksum: str
    check_method: CheckMethod = "whole"
    checksum_file: int = -1
    width: int = 0
    covered_bytes: int = 0
    offset: int = 0
    base: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    def locate_blocks(self, first: int, stop: int) -> tuple[int, int]:
        """Return the byte range of blocks; the last block of a file is shorter."""
        return BLOCK_BYTES * (first - self.base), min(BLOCK_BYTES * (stop - self.base), self.size)


@final
class RemoteFileTable:
    """Numbered files of a remote subset.

    Attributes:
        files: all files.
        lengths, bins, masks, docs, pairs, media, blobs: file numbers for each layer or shard; -1 for a missing file.
        removed: number of the file of removed documents; -1 if there is none.
        bases: first block of each file, ascending, int64.
        sizes: size of each file in bytes, int64.
        by_blocks: True for files verified by blocks, bool.
        dense: 1 for lengths and checksums, whose few bytes serve many tokens; 0 for others.
        keys: low and high half of the cache key of each file, uint64 [N, 2].
    """

    def __init__(self, manifest: Manifest, subset: str) -> None:
        self.files: list[RemoteStoreFile] = []
        self._next = 0
        entry = manifest.subsets[subset]
        itemsize = TOKEN_DTYPES[manifest.dtype].itemsize
        self.lengths: list[int] = []
        for name, checksum_name, layer in zip(
            entry.length_files, entry.length_checksum_files, entry.all_layers, strict=True
        ):
            lengths = RemoteStoreFile(f"{subset}/{name}", 4 * layer.documents, layer.lengths)
            self.lengths.append(
                self._add_with_checksums(lengths, f"{subset}/{checksum_name}", layer.sums, COUNTED_ENTRY_BYTES)
            )
        self.removed = -1
        if entry.removed:
            size = HEADER.size + 8 * entry.removed.documents
            self.removed = self._add_optional(f"{subset}/{entry.removed_file}", size, entry.removed.file)
        self.bins: list[int] = []
        self.masks: list[int] = []
        self.docs: list[int] = []
        self.pairs: list[int] = []
        self.media: list[int] = []
        self.blobs: list[int] = []
        for shard in entry.shards:
            stem = f"{subset}/{shard.name}"
            bin_ = RemoteStoreFile(f"{stem}.bin", shard.tokens * itemsize, shard.bin, "nothing")
            self.bins.append(self._add_with_checksums(bin_, f"{stem}.sums", shard.sums, PLAIN_ENTRY_BYTES))
            mask = HEADER.size + (shard.tokens + 7) // 8
            self.masks.append(self._add_optional(f"{stem}.mask", mask, shard.mask))
            docs = HEADER.size + PROVENANCE_ROW_BYTES * shard.documents
            self.docs.append(self._add_optional(f"{stem}.docs", docs, shard.docs))
            pairs = HEADER.size + PAIR_ROW_BYTES * shard.documents
            self.pairs.append(self._add_optional(f"{stem}.pairs", pairs, shard.pairs))
            self.media.append(self._add_optional(f"{stem}.media", shard.media_bytes or 0, shard.media))
            blobs = -1
            if shard.blobs is not None and shard.blobs_bytes is not None:
                file = RemoteStoreFile(f"{stem}.blobs", shard.blobs_bytes, shard.blobs, "nothing")
                blobs = self._add_with_checksums(file, f"{stem}.blobsums", shard.blobsums, PLAIN_ENTRY_BYTES)
            self.blobs.append(blobs)
        self.bases = np.array([file.base for file in self.files], np.int64)
        self.by_blocks = np.array([file.check_method == "blocks" for file in self.files], bool)
        dense = [file.check_method == "entries" or file.width == COUNTED_ENTRY_BYTES for file in self.files]
        self.dense = np.array(dense, np.int64)
        self.sizes = np.array([file.size for file in self.files], np.int64)
        digests = [int(file.checksum, 16) for file in self.files]
        # One flipped bit separates the entries of a .sums from its header, which has the same checksum.
        flips = [int(file.check_method == "entries") for file in self.files]
        keys = [(digest & (1 << 64) - 1 ^ flip, digest >> 64) for digest, flip in zip(digests, flips, strict=True)]
        self.keys = np.array(keys, np.uint64).reshape(-1, 2)

    def _add_with_checksums(self, file: RemoteStoreFile, name: str, checksum: str | None, width: int) -> int:
        """Add a file, and its ``.sums`` if it has one."""
        if checksum is None:
            return self._add(file)
        size = count_header_bytes(file.size, width)
        head = self._add(RemoteStoreFile(name, size, checksum, width=width, covered_bytes=file.size))
        entries_size = count_entries(file.size) * width
        entries = self._add(RemoteStoreFile(name, entries_size, checksum, "entries", head, offset=size))
        return self._add(file._replace(check_method="blocks", checksum_file=entries, width=width))

    def _add_optional(self, name: str, size: int, checksum: str | None) -> int:
        return -1 if checksum is None else self._add(RemoteStoreFile(name, size, checksum))

    def _add(self, file: RemoteStoreFile) -> int:
        self.files.append(file._replace(base=self._next))
        self._next += file.blocks + 1
        return len(self.files) - 1

    def locate_files(self, intervals: Intervals) -> NDArray[np.int64]:
        return self.bases.searchsorted(intervals[:, 0], side="right") - 1

    def round_intervals(self, intervals: Intervals, unit: int) -> Intervals:
        """Extend intervals to multiples of ``unit`` blocks within each file."""
        numbers = self.locate_files(intervals)
        bases = self.bases[numbers]
        ends = bases + np.array([self.files[number].blocks for number in numbers.tolist()], np.int64)
        starts = bases + (intervals[:, 0] - bases) // unit * unit
        stops = bases - (bases - intervals[:, 1]) // unit * unit
        return merge_intervals(starts, np.minimum(stops, ends))

    def list_intervals(self, numbers: Iterable[int]) -> Intervals:
        files = [self.files[number] for number in numbers]
        return merge_intervals([file.base for file in files], [file.base + file.blocks for file in files])
