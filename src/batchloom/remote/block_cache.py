r"""Block cache on disk: files of remote blocks, shared by all processes of a node.

``CACHE/STORE/NAME.blocks`` holds blocks that were fetched together. Layout (little-endian): 8 bytes
``BLMBLKS\0``; u64 version 2; u64 number of intervals N; XXH3-64 of the bytes that follow up to the zeros; 16 bytes
of the boot ID of the machine at the time of writing (zeros if the system has none); the table, N rows of the
checksum that names a file of the store (16 bytes), first block u64, blocks u64; zeros up to a multiple of 4096; then
4096 bytes for each block of each interval. A file is written under a temporary name and renamed, and never changes.
A process that has it mapped keeps its bytes when another one deletes it. Any file may be deleted at any time.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, final

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
_HEADER, _VERSION = struct.Struct("<8sQQQ"), 2
_NO_BOOT_ID, _BOOT_ID_PATH = bytes(16), Path("/proc/sys/kernel/random/boot_id")
_BLOCKS_SUFFIX = ".blocks"
# struct flock of Linux: type, whence, start, length, process (0 for locks of a description).
_FLOCK_STRUCT = struct.Struct("hhqqi4x")
_SET_LOCK_COMMAND = getattr(fcntl, "F_OFD_SETLK", None)
# Scanning the cache is expensive, so it runs only after 1/100 of the limit was added.
_EVICTION_CHECK_SHARE = 100


class BlockTable(NamedTuple):
    """Table of a block file.

    Attributes:
        rows: cached intervals, of ``BLOCK_TABLE_DTYPE``.
        begin: byte offset of the first block.
        written_this_boot: False after a reboot, because a power cut may leave zeros in unsynced data.
    """

    rows: NDArray[np.void]
    begin: int
    written_this_boot: bool

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
        self._root, self.folder, self.limit = folder, folder / store, limit
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
            return {name for name in os.listdir(self.folder) if name.endswith(_BLOCKS_SUFFIX)}  # noqa: PTH208
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
            os.replace(partial_path, self.folder / name)  # noqa: PTH105 - mkstemp gives a string
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial_path)  # noqa: PTH108
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
            if self._added_bytes * _EVICTION_CHECK_SHARE < self.limit:
                return
            self._added_bytes = 0
        with contextlib.suppress(OSError), (self._root / "lock").open("ab") as lock:
            # If another process is evicting, skip it. On a file system without locks both delete the same files,
            # which is harmless.
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
            self._evict()
            with contextlib.suppress(OSError):
                fcntl.flock(lock.fileno(), fcntl.LOCK_UN)

    def _evict(self) -> None:
        candidates, total = [], 0
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
                os.unlink(path)  # noqa: PTH108
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
    boot_id, rows = (
        raw[: len(_NO_BOOT_ID)],
        np.frombuffer(raw, BLOCK_TABLE_DTYPE, offset=len(_NO_BOOT_ID)),
    )
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
