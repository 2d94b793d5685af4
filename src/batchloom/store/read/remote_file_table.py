"""The files of a subset that lies elsewhere: how large each is, how it is checked, and its blocks among all.

The blocks of all files are numbered through, file by file, so that what is wanted, what is kept and what is
claimed are numbers alone. Between two files one number belongs to none.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.remote import BLOCK_BYTES, Intervals, merge_intervals
from batchloom.store.format import (
    COUNTED_ENTRY_BYTES,
    HEADER,
    PAIR_ROW_BYTES,
    PLAIN_ENTRY_BYTES,
    PROVENANCE_ROW_BYTES,
    TOKEN_DTYPES,
    LayerEntry,
    Manifest,
    ShardEntry,
    SubsetEntry,
    count_entries,
    count_header_bytes,
)

# whole: as one, by its checksum; blocks: each by an entry; entries: by the roots in their head.
CheckMethod = Literal["whole", "blocks", "entries", "nothing"]


class RemoteStoreFile(NamedTuple):
    """One file; of a ``.sums`` its head and its entries are two.

    Attributes:
        name: under the store's URL.
        size: in bytes, as the manifest gives it.
        checksum: in the manifest; it names the content.
        check_method: how.
        checksum_file: number of the file that its blocks are checked by; -1 without one.
        width: of a file checked by blocks the bytes of an entry.
        covered_bytes: of a head the bytes of the file that it is for.
        offset: where it begins in the file of its name.
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
        """How many blocks it has."""
        return -(-self.size // BLOCK_BYTES)


@final
class RemoteFileTable:
    """The files of a subset, numbered.

    Attributes:
        files: all of them.
        lengths, bins, masks, docs, pairs, media, blobs: numbers of the files of each layer or shard; -1 for one that
            is not there.
        removed: number of the file of removed documents; -1 without one.
        bases: first block of each file, ascending, int64.
        sizes: bytes of each file, int64.
        by_blocks: whether the blocks of each are checked one by one, bool.
        dense: 1 for lengths and checksums, of which a little is used for many tokens, 0 for others.
        keys: low and high half of what names the content of each, uint64 [N, 2].
    """

    def __init__(self, manifest: Manifest, subset: str) -> None:
        self.files: list[RemoteStoreFile] = []
        self._next = 0
        entry = manifest.subsets[subset]
        itemsize = TOKEN_DTYPES[manifest.dtype].itemsize
        self.lengths = [self._add_lengths(subset, *layer_files) for layer_files in _iter_layers(entry)]
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
            self.blobs.append(self._add_blobs(stem, shard))
        self.bases = np.array([file.base for file in self.files], np.int64)
        self.by_blocks = np.array([file.check_method == "blocks" for file in self.files], bool)
        dense = [file.check_method == "entries" or file.width == COUNTED_ENTRY_BYTES for file in self.files]
        self.dense = np.array(dense, np.int64)
        self.sizes = np.array([file.size for file in self.files], np.int64)
        self.keys = np.array([_cache_key(file) for file in self.files], np.uint64).reshape(-1, 2)

    def _add_lengths(self, subset: str, file: str, checksum_name: str, layer: LayerEntry) -> int:
        lengths = RemoteStoreFile(f"{subset}/{file}", 4 * layer.documents, layer.lengths)
        return self._add_with_checksums(lengths, f"{subset}/{checksum_name}", layer.sums, COUNTED_ENTRY_BYTES)

    def _add_with_checksums(self, file: RemoteStoreFile, name: str, checksum: str | None, width: int) -> int:
        """Add a file, and its ``.sums`` where it has one."""
        if checksum is None:
            return self._add(file)
        size = count_header_bytes(file.size, width)
        head = self._add(RemoteStoreFile(name, size, checksum, width=width, covered_bytes=file.size))
        entries_size = count_entries(file.size) * width
        entries = self._add(RemoteStoreFile(name, entries_size, checksum, "entries", head, offset=size))
        return self._add(file._replace(check_method="blocks", checksum_file=entries, width=width))

    def _add_blobs(self, stem: str, shard: ShardEntry) -> int:
        """Add the media that a shard holds, and their checksums; -1 where it holds none."""
        if shard.blobs is None or shard.blobs_bytes is None:
            return -1
        file = RemoteStoreFile(f"{stem}.blobs", shard.blobs_bytes, shard.blobs, "nothing")
        return self._add_with_checksums(file, f"{stem}.blobsums", shard.blobsums, PLAIN_ENTRY_BYTES)

    def _add_optional(self, name: str, size: int, checksum: str | None) -> int:
        return -1 if checksum is None else self._add(RemoteStoreFile(name, size, checksum))

    def _add(self, file: RemoteStoreFile) -> int:
        self.files.append(file._replace(base=self._next))
        self._next += file.blocks + 1
        return len(self.files) - 1

    def locate_files(self, intervals: Intervals) -> NDArray[np.int64]:
        """Number of the file of each extent."""
        return self.bases.searchsorted(intervals[:, 0], side="right") - 1

    def round_intervals(self, intervals: Intervals, unit: int) -> Intervals:
        """Extents made whole units of so many blocks, counted in each file."""
        numbers = self.locate_files(intervals)
        bases = self.bases[numbers]
        ends = bases + np.array([self.files[number].blocks for number in numbers.tolist()], np.int64)
        starts = bases + (intervals[:, 0] - bases) // unit * unit
        stops = bases - (bases - intervals[:, 1]) // unit * unit
        return merge_intervals(starts, np.minimum(stops, ends))

    def list_intervals(self, numbers: Iterable[int]) -> Intervals:
        """All blocks of some files."""
        files = [self.files[number] for number in numbers]
        return merge_intervals([file.base for file in files], [file.base + file.blocks for file in files])


def _cache_key(file: RemoteStoreFile) -> tuple[int, int]:
    """Low and high half of the checksum; entries are told from their head, which has the same, by one bit."""
    digest = int(file.checksum, 16)
    return digest & (1 << 64) - 1 ^ int(file.check_method == "entries"), digest >> 64


def _iter_layers(entry: SubsetEntry) -> Iterator[tuple[str, str, LayerEntry]]:
    return zip(entry.length_files, entry.length_checksum_files, entry.all_layers, strict=True)
