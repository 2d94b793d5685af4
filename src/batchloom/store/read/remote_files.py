"""Files of a remote subset, numbered by their blocks, and their fetcher.

Blocks are numbered consecutively through all files. Requested, cached and locked blocks are therefore plain
integer intervals. One unused number separates adjacent files.
"""

from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Literal, NamedTuple, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import redact_url
from batchloom.core.errors import StoreError
from batchloom.remote import (
    BLOCK_BYTES,
    Intervals,
    RangeError,
    RangeFetcher,
    make_remote_error,
    merge_intervals,
)
from batchloom.store.format.block_checksums import (
    COUNTED_ENTRY_BYTES,
    PLAIN_ENTRY_BYTES,
    compute_block_checksums,
    count_blocks,
    count_entries,
    count_header_bytes,
)
from batchloom.store.format.manifest import Manifest, ShardEntry
from batchloom.store.format.shard_sidecars import (
    HEADER,
    PAIR_ROW_BYTES,
    PROVENANCE_ROW_BYTES,
    compute_mask_size,
    compute_weights_size,
)

# Attempts to fetch a block whose content does not match its checksum.
MAX_FETCH_ATTEMPTS = 3

# whole: by the checksum of the file; blocks: by one .sums entry each; entries: by the root checksums of a .sums.
CheckMethod = Literal["whole", "blocks", "entries"]


class RemoteStoreFile(NamedTuple):
    """One remote file; header and entries of a ``.sums`` count as two."""

    name: str  # path relative to the store's URL
    size: int  # size in bytes, from the manifest
    checksum: str  # checksum in the manifest, which identifies the content
    check_method: CheckMethod = "whole"  # verification method
    checksum_file: int = -1  # number of the file with its block checksums; -1 if there is none
    width: int = 0  # bytes per checksum entry, for a file verified by blocks
    entries: int = 0  # for a ``.sums`` header, the number of entries
    offset: int = 0  # byte offset in the file of that name
    base: int = 0  # number of its first block

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
        lengths: file number of the lengths of each layer.
        removed: number of the file of removed documents; None if there is none.
        shard_files: file numbers of each shard by suffix.
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
        self.lengths: list[int] = []
        for name, checksum_name, layer in zip(
            entry.length_files, entry.length_checksum_files, entry.all_layers, strict=True
        ):
            lengths = RemoteStoreFile(f"{subset}/{name}", 4 * layer.documents, layer.lengths)
            self.lengths.append(
                self._add_with_checksums(
                    lengths, f"{subset}/{checksum_name}", layer.sums, COUNTED_ENTRY_BYTES, count_blocks(lengths.size)
                )
            )
        self.removed: int | None = None
        if entry.removed:
            size = HEADER.size + 8 * entry.removed.documents
            self.removed = self._add(RemoteStoreFile(f"{subset}/{entry.removed_file}", size, entry.removed.file))
        self.shard_files = [self._add_shard(f"{subset}/{shard.name}", shard) for shard in entry.shards]
        # A list, since bisect on it is faster than a search in an array.
        self._file_bases = [file.base for file in self.files]
        self.bases = np.array(self._file_bases, np.int64)
        self.by_blocks = np.array([file.check_method == "blocks" for file in self.files], bool)
        dense = [file.check_method == "entries" or file.width == COUNTED_ENTRY_BYTES for file in self.files]
        self.dense = np.array(dense, np.int64)
        self.sizes = np.array([file.size for file in self.files], np.int64)
        digests = [int(file.checksum, 16) for file in self.files]
        # One flipped bit separates the entries of a .sums from its header, which has the same checksum.
        flips = [int(file.check_method == "entries") for file in self.files]
        keys = [(digest & (1 << 64) - 1 ^ flip, digest >> 64) for digest, flip in zip(digests, flips, strict=True)]
        self.keys = np.array(keys, np.uint64).reshape(-1, 2)

    def _add_shard(self, stem: str, shard: ShardEntry) -> dict[str, int]:
        sizes = {
            ".bin": shard.bytes,
            ".mask": compute_mask_size(shard.tokens),
            ".weights": compute_weights_size(shard.tokens),
            ".docs": HEADER.size + PROVENANCE_ROW_BYTES * shard.documents,
            ".pairs": HEADER.size + PAIR_ROW_BYTES * shard.documents,
            ".fields": shard.fields_bytes or 0,
            ".parquet": shard.parquet_bytes or 0,
            ".media": shard.media_bytes or 0,
            ".blobs": shard.blobs_bytes or 0,
        }
        checksum_suffixes = {".bin": ".sums", ".blobs": ".blobsums"}
        numbers = {}
        for suffix, size in sizes.items():
            checksum = shard.checksums.get(suffix)
            if checksum is None:
                continue
            file = RemoteStoreFile(f"{stem}{suffix}", size, checksum)
            if suffix in checksum_suffixes:
                sums = checksum_suffixes[suffix]
                entries = count_entries(shard) if suffix == ".bin" else count_blocks(size)
                numbers[suffix] = self._add_with_checksums(
                    file, f"{stem}{sums}", shard.checksums[sums], PLAIN_ENTRY_BYTES, entries
                )
            else:
                numbers[suffix] = self._add(file)
        return numbers

    def _add_with_checksums(self, file: RemoteStoreFile, name: str, checksum: str, width: int, entries: int) -> int:
        """Add a file and its ``.sums``, whose first entries are the file's."""
        size = count_header_bytes(entries, width)
        head = self._add(RemoteStoreFile(name, size, checksum, width=width, entries=entries))
        entries_file = self._add(RemoteStoreFile(name, entries * width, checksum, "entries", head, offset=size))
        return self._add(file._replace(check_method="blocks", checksum_file=entries_file, width=width))

    def _add(self, file: RemoteStoreFile) -> int:
        self.files.append(file._replace(base=self._next))
        self._next += file.blocks + 1
        return len(self.files) - 1

    def locate_files(self, intervals: Intervals) -> NDArray[np.int64]:
        return self.bases.searchsorted(intervals[:, 0], side="right") - 1

    def find_file(self, block: int) -> RemoteStoreFile:
        """Return the file that holds a block."""
        return self.files[bisect_right(self._file_bases, block) - 1]

    def compute_sizes(self, intervals: Intervals) -> NDArray[np.int64]:
        """Return the sizes of intervals in bytes; the last block of a file is shorter."""
        numbers = self.locate_files(intervals)
        ends = BLOCK_BYTES * self.bases[numbers] + self.sizes[numbers]
        sizes: NDArray[np.int64] = np.minimum(BLOCK_BYTES * intervals[:, 1], ends) - BLOCK_BYTES * intervals[:, 0]
        return sizes

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


@final
class BlockFetcher:
    """Fetcher of blocks of a remote subset, which verifies them by given checksums.

    Args:
        ranges: fetches byte ranges of the store's files.
        files: files of the subset.
    """

    def __init__(self, ranges: RangeFetcher, files: RemoteFileTable) -> None:
        self._ranges = ranges
        self._files = files

    @property
    def received(self) -> int:
        """Number of bytes received."""
        return self._ranges.received

    def after_fork(self) -> None:
        """Reset the state in a forked child."""
        self._ranges.after_fork()

    def request(self, first: int, stop: int) -> Future[bytes]:
        """Begin to fetch the blocks ``first`` to ``stop - 1``, which are in one file."""
        file = self._files.find_file(first)
        start, end = file.locate_blocks(first, stop)
        return self._ranges.submit(file.name, file.offset + start, file.offset + end, file.offset + file.size)

    def receive(
        self,
        future: Future[bytes],
        first: int,
        stop: int,
        expected_checksums: NDArray[np.uint64] | None,
    ) -> bytes:
        """Return requested blocks, which are fetched again while they do not match.

        ``expected_checksums`` is None for blocks that are verified with their whole file.
        """
        file = self._files.find_file(first)
        for _ in range(MAX_FETCH_ATTEMPTS):
            try:
                data = future.result()
            except RangeError as error:
                self._refuse(error)
            if expected_checksums is None or np.array_equal(compute_block_checksums(data), expected_checksums):
                return data
            future = self.request(first, stop)
        raise self.make_changed_error(file, *file.locate_blocks(first, stop))

    def _refuse(self, error: RangeError) -> NoReturn:
        url = f"{self._ranges.url}/{error.name}"
        if error.fault.kind == "missing":
            raise StoreError(
                f"{redact_url(url)} is missing: the manifest of its store names it. Restore it from a copy; the run "
                "continues from its last checkpoint."
            ) from None
        if error.fault.kind == "refused":
            raise StoreError(
                f"{redact_url(url)} does not match the manifest of its store: {error.fault.description}. It was "
                "truncated or rewritten; restore it from a copy."
            ) from None
        raise make_remote_error(error.fault, url) from None

    def make_changed_error(self, file: RemoteStoreFile, start: int, stop: int) -> StoreError:
        """Build the error for bytes of a file that do not match its checksums."""
        file_url = redact_url(f"{self._ranges.url}/{file.name}")
        return StoreError(
            f"{file_url}: bytes {file.offset + start:,} to {file.offset + stop:,} do not match the checksums of its "
            f"store ({MAX_FETCH_ATTEMPTS} tries); it was changed or damaged. Restore it from a copy; the run continues "
            "from its last checkpoint."
        )
