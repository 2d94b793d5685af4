r"""Block cache on disk: files of remote blocks, shared by all processes of a node.

``CACHE/STORE/NAME.blocks`` holds blocks that were fetched together. Layout (little-endian): 8 bytes
``BLMBLKS\0``; u64 version 2; u64 number of intervals N; XXH3-64 of the bytes that follow up to the zeros; 16 bytes
of the boot ID of the machine at the time of writing (zeros if the system has none); the table, N rows of the
checksum that names a file of the store (16 bytes), first block u64, blocks u64; zeros up to a multiple of 4096; then
4096 bytes for each block of each interval. A file is written under a temporary name and renamed, and never changes.
A process that has it mapped keeps its bytes when another one deletes it. Any file may be deleted at any time.

A process keeps an index of the cached blocks it knows. Intervals of blocks are int64 [N, 2]: first block and last
block + 1 of each, ascending and disjoint.
"""

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.files import PARTIAL_SUFFIX, describe_os_error, has_same_inode

LOG = logging.getLogger("batchloom")
# Size of a block in bytes, the unit of verification, fetching and caching.
BLOCK_BYTES = 4096
MAGIC = b"BLMBLKS\x00"
# The two halves of the file's checksum, then its first block and the number of blocks.
BLOCK_TABLE_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("first", "<u8"), ("blocks", "<u8")])
_HEADER = struct.Struct("<8sQQQ")
_VERSION = 2
_NO_BOOT_ID = bytes(16)
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
_BLOCKS_SUFFIX = ".blocks"
# struct flock of Linux: type, whence, start, length, process (0 for locks of a description).
_FLOCK_STRUCT = struct.Struct("hhqqi4x")
_SET_LOCK_COMMAND = getattr(fcntl, "F_OFD_SETLK", None)
# Scanning the cache is expensive, so it runs only after 1/100 of the limit was added.
_EVICTION_CHECK_SHARE = 100


class BlockTable(NamedTuple):
    """Table of a block file."""

    rows: NDArray[np.void]  # cached intervals, of ``BLOCK_TABLE_DTYPE``
    begin: int  # byte offset of the first block
    written_this_boot: bool  # False after a reboot, because a power cut may leave zeros in unsynced data

    @property
    def size(self) -> int:
        """Size of the complete file in bytes."""
        return self.begin + BLOCK_BYTES * int(self.rows["blocks"].sum())


@functools.cache
def _read_boot_id() -> bytes:
    """Return the 16-byte ID of this boot of the machine."""
    try:
        return bytes.fromhex(_BOOT_ID_PATH.read_text().strip().replace("-", "")).ljust(16, b"\0")[:16]
    except (OSError, ValueError):
        return _NO_BOOT_ID


def _encode_header(rows: NDArray[np.void]) -> bytes:
    raw = _read_boot_id() + rows.tobytes()
    head = _HEADER.pack(MAGIC, _VERSION, len(rows), xxhash.xxh3_64_intdigest(raw)) + raw
    return head + bytes(-len(head) % BLOCK_BYTES)


@final
class BlockCache:
    """Block files of one store in a cache folder.

    Args:
        folder: cache folder, shared by all stores and all processes of a node.
        store: name of the store's subfolder.
        limit: maximum total size of the block files of all stores, in bytes.

    Attributes:
        folder: subfolder of the store.
        limit: maximum total size of the block files of all stores, in bytes.
    """

    def __init__(self, folder: Path, store: str, limit: int) -> None:
        self._root = folder
        self.folder = folder / store
        self.limit = limit
        self._added_bytes = limit
        self._warned = False
        self.after_fork()
        self._create_folder()

    def after_fork(self) -> None:
        """Replace the lock: a thread that held it does not exist in a forked child."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lock_for_fetch(self, intervals: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Lock block intervals, int64 [N, 2], so that each node fetches a block once.

        Yields the intervals that no other process has locked. A lock is a kernel lock on a byte range of an empty
        file, held by an open file description. It ends with its process, even a killed one, and needs no cleanup. No
        process waits while it holds a lock. On a file system without such locks, blocks may be fetched twice, which
        is slow but correct.
        """
        try:
            descriptor = os.open(self.folder / "claims", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            yield intervals
            return
        try:
            yield _lock_intervals(descriptor, intervals)
        finally:
            # Forked children inherit the locks, so closing the file does not end them.
            with contextlib.suppress(OSError):
                _set_lock(descriptor, fcntl.F_UNLCK, 0, 0)
            os.close(descriptor)

    def list_names(self) -> set[str]:
        """Return the names of the existing block files."""
        try:
            return {name for name in os.listdir(self.folder) if name.endswith(_BLOCKS_SUFFIX)}
        except OSError:
            return set()

    def read_table(self, name: str) -> BlockTable | None:
        """Read the table of a block file; None if it is missing or torn by a power cut."""
        try:
            with (self.folder / name).open("rb") as file:
                table = _parse_table(file.read(BLOCK_BYTES), file.read)
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return None
        if table is None or table.size != size:
            self.drop(name)
            return None
        return table

    def map(self, name: str, table: BlockTable) -> NDArray[np.uint8] | None:
        """Map the blocks of a file; None if it is missing. They outlive its deletion."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != table.size:
                    return None
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Eviction removes the least recently used files first and reads only this time.
            os.utime(path)
        except OSError:
            return None
        return np.frombuffer(view, np.uint8, offset=table.begin)

    def drop(self, name: str) -> None:
        """Delete a file of blocks."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def keep(self, rows: NDArray[np.void], contents: list[bytes]) -> tuple[str | None, BlockTable, NDArray[np.uint8]]:
        """Write blocks to the cache and return the file name, its table and its blocks.

        If the file cannot be written, the name is None and the blocks are in memory. A warning is logged once.

        Args:
            rows: intervals of the blocks, of ``BLOCK_TABLE_DTYPE``.
            contents: bytes of each interval; the last block of a file is shorter.
        """
        head = _encode_header(rows)
        table = BlockTable(rows, len(head), written_this_boot=True)
        chunks = [head]
        for content, count in zip(contents, rows["blocks"].tolist(), strict=True):
            chunks += [content, bytes(BLOCK_BYTES * count - len(content))]
        name = xxhash.xxh3_128_hexdigest(head) + _BLOCKS_SUFFIX
        for may_retry in (True, True, False):
            try:
                blocks = self._write(name, chunks, table)
            except OSError as error:
                # Another process deleted the folder, or deleted this file as abandoned before it was locked.
                if isinstance(error, FileNotFoundError) and may_retry and self._create_folder():
                    continue
                self._warn_once(error)
                break
            self._make_room(table.size)
            return name, table, blocks
        return None, table, np.frombuffer(b"".join(chunks[1:]), np.uint8)

    def _create_folder(self) -> bool:
        """Create the store's folder and return whether it exists."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn_once(error)
            return False
        return True

    def _write(self, name: str, chunks: list[bytes], table: BlockTable) -> NDArray[np.uint8]:
        descriptor, partial_path = tempfile.mkstemp(suffix=PARTIAL_SUFFIX, dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb+") as file:
                # Eviction deletes partial files that are not locked, as those of killed processes.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.writelines(chunks)
                file.flush()
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.replace(partial_path, self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial_path)
            raise
        return np.frombuffer(view, np.uint8, offset=table.begin)

    def _warn_once(self, error: OSError) -> None:
        """Log once that the cache cannot be written; reads continue without it."""
        if not self._warned:
            self._warned = True
            LOG.warning(
                "Blocks of a remote store cannot be cached in %s: %s. Until they can, each process reads them "
                "without the cache.",
                self._root,
                describe_os_error(error),
            )

    def _make_room(self, added_bytes: int) -> None:
        """Delete the least recently used files if the cache exceeds its limit."""
        with self._lock:
            self._added_bytes += added_bytes
        # A thread that evicts may have listed the files before others were written, whose threads leave it to that one.
        while self._added_bytes and self._added_bytes * _EVICTION_CHECK_SHARE >= self.limit:
            if not self._try_to_evict():
                return

    def _try_to_evict(self) -> bool:
        """Evict files; return whether it was done here.

        Another thread or process may be at it, or the folder be read-only.
        """
        with contextlib.suppress(OSError), (self._root / "lock").open("ab") as lock:
            # On a file system without locks several delete the same files, which is harmless.
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            with self._lock:
                self._added_bytes = 0
            self._evict()
            with contextlib.suppress(OSError):
                fcntl.flock(lock.fileno(), fcntl.LOCK_UN)
            return True
        return False

    def _evict(self) -> None:
        candidates = []
        total = 0
        for entry in _iter_cache_files(self._root):
            with contextlib.suppress(OSError):
                if entry.name.endswith(PARTIAL_SUFFIX):
                    _delete_abandoned(Path(entry.path))
                elif entry.name.endswith(_BLOCKS_SUFFIX):
                    status = entry.stat()
                    candidates.append((status.st_mtime_ns, status.st_size, entry.path))
                    total += status.st_size
        target_bytes = self.limit - self.limit // (_EVICTION_CHECK_SHARE // 5)
        for _, size, path in sorted(candidates) if total > self.limit else []:
            if total <= target_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def _lock_intervals(descriptor: int, intervals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lock the intervals that no other process has locked, and return them."""
    is_locked = np.ones(len(intervals), bool)
    for index, (start, stop) in enumerate(intervals.tolist()):
        try:
            _set_lock(descriptor, fcntl.F_WRLCK, start, stop)
        except BlockingIOError:
            is_locked[index] = False
        except OSError:
            # The file system has no such locks.
            return intervals
    return intervals[is_locked]


def _set_lock(descriptor: int, kind: int, start: int, stop: int) -> None:
    if _SET_LOCK_COMMAND is not None:
        lock = _FLOCK_STRUCT.pack(kind, os.SEEK_SET, start, stop - start, 0)
        fcntl.fcntl(descriptor, _SET_LOCK_COMMAND, lock)


def _parse_table(start: bytes, read_more: Callable[[int], bytes]) -> BlockTable | None:
    if len(start) < _HEADER.size:
        return None
    magic, version, count, digest = _HEADER.unpack_from(start)
    if magic != MAGIC or version != _VERSION or count > 1 << 24:
        return None
    size = _HEADER.size + len(_NO_BOOT_ID) + BLOCK_TABLE_DTYPE.itemsize * count
    begin = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    raw = (start + read_more(max(0, begin - len(start))))[_HEADER.size : size]
    if len(raw) != size - _HEADER.size or xxhash.xxh3_64_intdigest(raw) != digest:
        return None
    boot_id = raw[: len(_NO_BOOT_ID)]
    rows = np.frombuffer(raw, BLOCK_TABLE_DTYPE, offset=len(_NO_BOOT_ID))
    return BlockTable(rows, begin, written_this_boot=boot_id == _read_boot_id() != _NO_BOOT_ID)


def _iter_cache_files(root: Path) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(root) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError), os.scandir(folder.path) as files:
                    yield from files


def _delete_abandoned(path: Path) -> None:
    """Delete a partial file that no process locks: its writer was killed."""
    with path.open("rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if has_same_inode(path, file.fileno()):
            path.unlink()


Intervals = NDArray[np.int64]

NO_INTERVALS: Intervals = np.empty((0, 2), np.int64)


def merge_intervals(starts: Any, stops: Any) -> Intervals:
    """Merge block ranges, in any order and overlapping, into intervals."""
    starts = np.asarray(starts, np.int64)
    stops = np.asarray(stops, np.int64)
    filled = stops > starts
    starts = starts[filled]
    stops = stops[filled]
    if not starts.size:
        return NO_INTERVALS
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], ends[last]], axis=1)


def subtract_intervals(intervals: Intervals, subtracted: Intervals) -> Intervals:
    """Return the blocks of ``intervals`` that are not in ``subtracted``."""
    overlapping = subtracted[mask_overlaps(subtracted, intervals)]
    if not overlapping.size or not intervals.size:
        return intervals
    points = np.concatenate([intervals[:, 0], intervals[:, 1], overlapping[:, 0], overlapping[:, 1]])
    begins = np.ones(len(intervals), np.int64)
    ends = -np.ones(len(intervals), np.int64)
    least = 2 * np.ones(len(overlapping), np.int64)
    order = np.argsort(points, kind="stable")
    # The state is 1 in ``intervals`` alone, 2 in ``subtracted`` alone and 3 in both.
    state = np.cumsum(np.concatenate([begins, ends, least, -least])[order])[:-1]
    points = points[order]
    is_remaining = state == 1
    return merge_intervals(points[:-1][is_remaining], points[1:][is_remaining])


def split_by_ranges(intervals: Intervals, starts: Any, stops: Any) -> tuple[NDArray[np.int64], Intervals]:
    """Split intervals at range boundaries; return range numbers and parts.

    Args:
        intervals: intervals that the ranges cover.
        starts: first block of each range, ascending.
        stops: last block + 1 of each range.
    """
    first = starts.searchsorted(intervals[:, 0], side="right") - 1
    counts = starts.searchsorted(intervals[:, 1], side="left") - first
    rows = np.repeat(first, counts)
    rows += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(np.repeat(intervals[:, 0], counts), starts[rows])
    ends = np.minimum(np.repeat(intervals[:, 1], counts), stops[rows])
    return rows, np.stack([begins, ends], axis=1)


def mask_overlaps(intervals: Intervals, other_intervals: Intervals) -> NDArray[np.bool_]:
    """Return, for each of ``intervals``, whether it overlaps ``other_intervals``."""
    first = intervals[:, 1].searchsorted(other_intervals[:, 0], side="right")
    stop = intervals[:, 0].searchsorted(other_intervals[:, 1], side="left")
    marks = np.zeros(len(intervals) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, np.maximum(stop, first), -1)
    overlaps: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return overlaps


def bridge_gaps(intervals: Intervals, files: NDArray[np.int64], share: float, always: NDArray[np.int64]) -> Intervals:
    """Fill the smallest gaps between intervals, since requests cost more than blocks.

    Args:
        intervals: requested intervals.
        files: file number of each interval; gaps between files are not filled.
        share: maximum number of blocks in filled gaps, as a share of the requested blocks.
        always: for each interval, the size in blocks up to which the gap after it is always filled.
    """
    if len(intervals) < 2:
        return intervals
    gaps = intervals[1:, 0] - intervals[:-1, 1]
    in_same_file = files[1:] == files[:-1]
    small_gaps = np.flatnonzero(in_same_file & (gaps <= always[:-1]))
    candidates = np.flatnonzero(in_same_file & (gaps > always[:-1]))
    candidates = candidates[np.argsort(gaps[candidates], kind="stable")]
    allowed = share * float((intervals[:, 1] - intervals[:, 0]).sum())
    bridged_gaps = np.concatenate([small_gaps, candidates[np.cumsum(gaps[candidates]) <= allowed]])
    return merge_intervals(
        np.concatenate([intervals[:, 0], intervals[bridged_gaps, 1]]),
        np.concatenate([intervals[:, 1], intervals[bridged_gaps + 1, 0]]),
    )


def split_intervals(intervals: Intervals, max_blocks: int) -> Intervals:
    """Split intervals into parts of at most ``max_blocks`` blocks, which may touch."""
    sizes = intervals[:, 1] - intervals[:, 0]
    part_counts = -(-sizes // max_blocks)
    starts = np.repeat(intervals[:, 0], part_counts)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(part_counts) - part_counts, part_counts)
    starts = starts + number * max_blocks
    return np.stack([starts, np.minimum(starts + max_blocks, np.repeat(intervals[:, 1], part_counts))], axis=1)


def group_intervals(intervals: Intervals, max_blocks: int) -> list[Intervals]:
    """Group intervals, in order, into groups of about ``max_blocks`` blocks."""
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    bounds = np.flatnonzero(np.diff((ends - 1) // max_blocks)) + 1
    return [group for group in np.split(intervals, bounds) if len(group)]


def count_interval_blocks(intervals: Intervals) -> int:
    """Return the total number of blocks in intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


IntArray = NDArray[np.int64]

# Each mapping costs a file descriptor, and a deleted file uses disk space while it is mapped.
_MAX_MAPPED_FILES = 256
_MAX_MAPPED_BYTES = 2 << 30
# Blocks that could not be written to disk take memory.
_MAX_MEMORY_BYTES = 256 << 20


@dataclass(slots=True)
class CacheFile:
    """Block file that a process knows."""

    name: str | None  # name in the cache; None if the blocks are only in memory
    table: BlockTable
    data: NDArray[np.uint8] | None  # blocks; None while the file is not mapped
    # Whether the file was read since the last eviction. It is set without the lock, so it only orders the files.
    used: bool = False


class BlockIndex(NamedTuple):
    """Cached intervals, disjoint and ascending; arrays but ``sound`` are immutable."""

    starts: NDArray[np.int64]  # first block of each, int64
    stops: NDArray[np.int64]  # last block + 1 of each, int64
    block_offsets: NDArray[np.int64]  # block offset of each in its cache file, int64
    owners: NDArray[np.int64]  # number of the cache file of each, int64
    sound: NDArray[np.bool_]  # whether this process has verified all blocks of each, bool
    runs: NDArray[np.int64]  # number of gaps before each, int64; intervals with the same number are contiguous
    ends: NDArray[np.int64]  # end of each in bytes, int64; 4096 times its ``stops``
    shifts: NDArray[np.int64]  # number to add to a byte position for the byte position in the cache file, int64

    @property
    def stored_columns(self) -> tuple[NDArray[Any], ...]:
        """Columns from which the others are computed."""
        return self.starts, self.stops, self.block_offsets, self.owners, self.sound

    @property
    def intervals(self) -> Intervals:
        """First block and last block + 1 of each interval, int64 [N, 2]."""
        return np.stack([self.starts, self.stops], axis=1)


_NO_INTS = np.empty(0, np.int64)
EMPTY_INDEX = BlockIndex(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, bool), _NO_INTS, _NO_INTS, _NO_INTS)


def _make_index(*columns: NDArray[Any]) -> BlockIndex:
    starts, stops, block_offsets, owners, sound = columns
    runs = np.zeros(len(starts), np.int64)
    np.cumsum(starts[1:] != stops[:-1], out=runs[1:])
    return BlockIndex(
        starts,
        stops,
        block_offsets,
        owners,
        sound,
        runs,
        BLOCK_BYTES * stops,
        BLOCK_BYTES * (block_offsets - starts),
    )


def add_to_index(
    index: BlockIndex,
    owner: int,
    intervals: Intervals,
    block_offsets: NDArray[np.int64],
    sound: NDArray[np.bool_],
) -> BlockIndex:
    """Return an index with one more cache file; blocks already known keep their file.

    Args:
        index: existing index.
        owner: number of the cache file.
        intervals: intervals of the file, disjoint, in any order.
        block_offsets: block offset of each interval in the file.
        sound: whether the blocks of each interval are verified.
    """
    order = np.argsort(intervals[:, 0], kind="stable")
    intervals = intervals[order]
    block_offsets = block_offsets[order]
    sound = sound[order]
    new_intervals = subtract_intervals(intervals, index.intervals)
    if not new_intervals.size:
        return index
    containing_rows = intervals[:, 0].searchsorted(new_intervals[:, 0], side="right") - 1
    insert_positions = index.starts.searchsorted(new_intervals[:, 0])
    new_offsets = block_offsets[containing_rows] + new_intervals[:, 0] - intervals[containing_rows, 0]
    new_columns = (*new_intervals.T, new_offsets, owner, sound[containing_rows])
    columns = zip(index.stored_columns, new_columns, strict=True)
    return _make_index(*(np.insert(column, insert_positions, new) for column, new in columns))


def remove_from_index(index: BlockIndex, owners: set[int]) -> BlockIndex:
    """Return an index without the cache files ``owners``."""
    is_remaining = ~np.isin(index.owners, list(owners))
    return _make_index(*(column[is_remaining] for column in index.stored_columns))


@final
class CacheFileSet:
    """Cache files of an index by number; count and size of mapped ones are bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, _MAX_MAPPED_BYTES)
        self._mapped_bytes = 0
        self.cache_files: dict[int, CacheFile] = {}
        self.names: dict[str, int] = {}
        self._mapped_numbers: OrderedDict[int, None] = OrderedDict()
        self._memory_bytes = 0
        self._next_number = 0

    def add(self, cache_file: CacheFile) -> int:
        """Add a cache file and return its number."""
        number = self._next_number
        self._next_number = self._next_number + 1
        self.cache_files[number] = cache_file
        if cache_file.name is not None:
            self.names[cache_file.name] = number
        return number

    def remove(self, number: int) -> None:
        cache_file = self.cache_files.pop(number, None)
        if cache_file is None:
            return
        if cache_file.name is not None:
            self.names.pop(cache_file.name, None)
        self._unmap(number, cache_file)

    def _unmap(self, number: int, cache_file: CacheFile) -> None:
        if self._mapped_numbers.pop(number, 0) is None:
            self._mapped_bytes -= cache_file.table.size
            if cache_file.name is None:
                self._memory_bytes -= cache_file.table.size
        cache_file.data = None

    def mark_mapped(self, number: int, pinned_owners: set[int]) -> set[int]:
        """Register a mapped cache file and unmap old ones.

        Return the unmapped files that were only in memory, which must be removed.

        Args:
            number: number of the cache file.
            pinned_owners: cache files that a reader waits for, which are not unmapped.
        """
        cache_file = self.cache_files[number]
        if number not in self._mapped_numbers:
            self._mapped_numbers[number] = None
            self._mapped_bytes += cache_file.table.size
            if cache_file.name is None:
                self._memory_bytes += cache_file.table.size
        self._mapped_numbers.move_to_end(number)
        removed_numbers: set[int] = set()
        if not self._exceeds_limits():
            return removed_numbers
        # Recently read files are evicted last.
        used_numbers = [other for other in self._mapped_numbers if other != number and self.cache_files[other].used]
        for other in (*used_numbers, number):
            self.cache_files[other].used = False
            self._mapped_numbers.move_to_end(other)
        for oldest_number in [other for other in self._mapped_numbers if other not in (number, *pinned_owners)]:
            if not self._exceeds_limits():
                break
            oldest_file = self.cache_files[oldest_number]
            self._unmap(oldest_number, oldest_file)
            if oldest_file.name is None:
                removed_numbers.add(oldest_number)
        return removed_numbers

    def _exceeds_limits(self) -> bool:
        too_many_mapped = len(self._mapped_numbers) > _MAX_MAPPED_FILES or self._mapped_bytes > self._limit
        return too_many_mapped or self._memory_bytes > _MAX_MEMORY_BYTES


@final
@dataclass(slots=True)
class CachedBlocks:
    """Index with the bytes of the requested cache files, valid while it exists."""

    index: BlockIndex
    arrays: dict[int, NDArray[np.uint8]]

    def view_ranges(self, begins: IntArray, sizes: IntArray, dtype: np.dtype[np.generic]) -> list[NDArray[Any]]:
        """Return byte ranges as arrays: views, or copies if they span several intervals.

        The blocks must cover the ranges.

        Args:
            begins: byte position of each range, int64 [N]: 4096 times its file's first block, plus the offset in the
                file.
            sizes: size of each range in bytes, int64 [N].
            dtype: dtype of the items; begins and sizes are multiples of its size.
        """
        index = self.index
        last = (begins + np.maximum(sizes, 1) - 1) // BLOCK_BYTES
        if not begins.size or not index.starts.size:
            return [np.empty(0, dtype) for _ in range(begins.size)]
        rows = index.starts.searchsorted(begins // BLOCK_BYTES, side="right") - 1
        split_ranges = np.flatnonzero((rows < 0) | (index.stops[rows] <= last) | (sizes == 0))
        arrays = self.arrays
        if split_ranges.size:
            # The row may belong to a cache file that was not requested. These ranges are joined below.
            arrays = {**dict.fromkeys(index.owners[rows[split_ranges]].tolist(), np.empty(0, np.uint8)), **arrays}
        shift = dtype.itemsize.bit_length() - 1
        typed = {owner: data.view(dtype) for owner, data in arrays.items()}
        firsts = (begins + index.shifts[rows]) >> shift
        counts = sizes >> shift
        spans = zip(index.owners[rows].tolist(), firsts.tolist(), counts.tolist(), strict=True)
        views = [typed[owner][first : first + count] for owner, first, count in spans]
        for number in split_ranges.tolist():
            views[number] = self._join_range(int(begins[number]), int(sizes[number])).view(dtype)
        return views

    def _join_range(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Return a cached byte range, copied if it spans several intervals."""
        parts = []
        end = begin + size
        index = self.index
        while begin < end:
            row = int(index.starts.searchsorted(begin // BLOCK_BYTES, side="right")) - 1
            first = int(index.starts[row])
            stop = int(index.stops[row])
            if row < 0 or begin >= BLOCK_BYTES * stop:
                raise AssertionError("the cached blocks must cover the requested range")
            offset = BLOCK_BYTES * (int(index.block_offsets[row]) - first) + begin
            part_bytes = min(BLOCK_BYTES * stop, end) - begin
            parts.append(self.arrays[int(index.owners[row])][offset : offset + part_bytes])
            begin += part_bytes
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])
