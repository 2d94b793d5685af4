"""Remote file that can be read and sought, block by block.

A block is complete or it is an error. A short answer is requested again from the byte that was
reached, in smaller requests. So a connection that breaks every few hundred kilobytes still gives a
file, and one that breaks in the middle of a record never gives half of it.
"""

import contextlib
import io
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, final

from batchloom.core.addresses import redact_url
from batchloom.core.errors import DownloadError, InputError, MissingDependencyError
from batchloom.core.files import RangeFile
from batchloom.remote.client import fetch, wait_before_retry
from batchloom.remote.remote_errors import RemoteFault, classify_error, list_library_errors, make_remote_error

# A reader that seeks a lot gets small blocks, a sequential one gets large ones and read-ahead. At most three of
# the largest are in memory.
_FIRST_BLOCK_BYTES = 256 << 10
_MAX_BLOCK_BYTES = 8 << 20
_READ_AHEAD_BLOCKS = 2
_MIN_REQUEST_BYTES = 64 << 10
_MAX_ATTEMPTS = 6
_BUFFER_BYTES = 64 << 10

# A part of a large file is read and then hashed, and the row groups of a table are read in any order. With room
# for two of them each is transferred once.
PAGE_CACHE_BYTES = 512 << 20
PAGE_BYTES = 64 << 10

# Version of a file: its URL, its size and its version number.
FileVersion = tuple[str, int, int]


@final
class PageCache:
    """Pages of remote files, which are sampled, read and hashed in turn; thread-safe.

    The pages are in one unlinked file of the system's temporary folder, which ends with the process.
    The least recently used pages are evicted first. If there is no disk space, nothing is cached.
    """

    def __init__(self, max_bytes: int = PAGE_CACHE_BYTES) -> None:
        self._max_pages = max_bytes // PAGE_BYTES
        self._slots: OrderedDict[tuple[FileVersion, int], tuple[int, int]] = OrderedDict()
        self._free = list(range(self._max_pages))
        self._file: int | None = None
        self._fetching: set[tuple[FileVersion, int]] = set()
        self._lock = threading.Condition()

    def read_page(self, version: FileVersion, number: int) -> bytes | None:
        """Return a page of a file; None if it is not cached."""
        with self._lock:
            slot_entry = self._slots.get((version, number))
            if slot_entry is None or self._file is None:
                return None
            self._slots.move_to_end((version, number))
            slot, size = slot_entry
            with contextlib.suppress(OSError):
                data = os.pread(self._file, size, slot * PAGE_BYTES)
                if len(data) == size:
                    return data
            del self._slots[version, number]
            self._free.append(slot)
        return None

    def keep(self, version: FileVersion, first: int, data: bytes) -> None:
        """Cache pages from page ``first`` on; only a file's last page may be short."""
        with self._lock, contextlib.suppress(OSError):
            if self._file is None:
                self._file, path = tempfile.mkstemp(prefix="batchloom-")
                # The unlinked file exists until ``forget`` closes it, or the process ends.
                Path(path).unlink()
            for offset in range(0, len(data), PAGE_BYTES):
                self._keep((version, first + offset // PAGE_BYTES), data[offset : offset + PAGE_BYTES])

    def holds(self, version: FileVersion) -> bool:
        """Return whether all pages of a file are cached."""
        pages = -(-version[1] // PAGE_BYTES)
        with self._lock:
            return all((version, number) in self._slots for number in range(pages))

    def claim(self, version: FileVersion, pages: list[int]) -> list[int]:
        """Return the pages to fetch: neither cached nor being fetched by another thread.

        The caller must fetch them and call ``release``. If all pages are being fetched, wait until some are done and
        return an empty list.
        """
        with self._lock:
            missing_pages = [number for number in pages if (version, number) not in self._slots]
            claimed_pages = [number for number in missing_pages if (version, number) not in self._fetching]
            if len(missing_pages) == len(pages) and not claimed_pages:
                self._lock.wait()
            self._fetching.update((version, number) for number in claimed_pages)
        return claimed_pages

    def release(self, version: FileVersion, pages: list[int]) -> None:
        """Unmark pages as being fetched and wake the threads that wait for them."""
        with self._lock:
            self._fetching.difference_update((version, number) for number in pages)
            self._lock.notify_all()

    def forget(self) -> None:
        """Drop all pages and close the file."""
        with self._lock:
            self._slots.clear()
            self._free = list(range(self._max_pages))
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _keep(self, key: tuple[FileVersion, int], data: bytes) -> None:
        if key in self._slots or self._file is None:
            return
        if not self._free:
            _, (slot, _) = self._slots.popitem(last=False)
            self._free.append(slot)
        slot = self._free[-1]
        if os.pwrite(self._file, data, slot * PAGE_BYTES) == len(data):
            self._slots[key] = self._free.pop(), len(data)


# One cache per process: a second one would cache the same bytes twice.
PAGE_CACHE = PageCache()


def open_remote_file(url: str, size: int, stamp: int) -> BinaryIO:
    """Open the file of ``size`` bytes at a URL for reading and seeking.

    Args:
        url: URL of the file.
        size: size of the file in bytes.
        stamp: number of the file's version; the bytes read of it are cached for later readers.

    Reading raises:
        InputMissingError: the file no longer exists.
        AccessError: access to the file is denied.
        DownloadError: no bytes arrive after about half a minute of attempts.
        InputError: the file is shorter than ``size``.
    """
    return io.BufferedReader(_RemoteRawFile((url, size, stamp)), _BUFFER_BYTES)


def fetch_through_cache(version: FileVersion, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file.

    Pages that are cached, or being fetched by another thread, are not requested again.
    """
    first = start // PAGE_BYTES
    last = (stop - 1) // PAGE_BYTES
    pages: dict[int, bytes] = {}
    while len(pages) <= last - first:
        pending_numbers = [number for number in range(first, last + 1) if number not in pages]
        for number in pending_numbers:
            if (page := PAGE_CACHE.read_page(version, number)) is not None:
                pages[number] = page
        missing = [number for number in pending_numbers if number not in pages]
        claimed_numbers = PAGE_CACHE.claim(version, missing) if missing else []
        try:
            for run in _group_consecutive(claimed_numbers):
                pages.update(_fetch_pages(version, run))
        finally:
            PAGE_CACHE.release(version, claimed_numbers)
    content = b"".join(pages[number] for number in range(first, last + 1))
    return content[start - first * PAGE_BYTES : stop - first * PAGE_BYTES]


def _group_consecutive(numbers: list[int]) -> list[range]:
    """Group ascending numbers into ranges without gaps."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _fetch_pages(version: FileVersion, numbers: range) -> Iterator[tuple[int, bytes]]:
    url, size, _ = version
    start = numbers.start * PAGE_BYTES
    stop = min(numbers.stop * PAGE_BYTES, size)
    data = fetch_range(url, start, stop, size)
    PAGE_CACHE.keep(version, numbers.start, data)
    for index, number in enumerate(numbers):
        yield number, data[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]


def fetch_range(url: str, start: int, stop: int, size: int) -> bytes:
    """Return bytes [start, stop) of the file at a URL, all of them."""
    chunks: list[bytes] = []
    position = start
    step = stop - start
    failures = 0
    while position < stop:
        end = min(position + step, stop)
        try:
            data = fetch(url, position, end, size)
        except (InputError, MissingDependencyError):
            raise
        except list_library_errors() as error:
            data = b""
            fault = classify_error(error)
        else:
            fault = RemoteFault("passing", f"only {len(data):,} of {end - position:,} bytes arrived")
            data = data[: end - position]
        if data:
            chunks.append(data)
            position += len(data)
        if position == end:
            failures = 0
            continue
        if fault.kind in ("missing", "denied", "refused"):
            raise make_remote_error(fault, url) from None
        failures = 1 if data else failures + 1
        if failures == _MAX_ATTEMPTS or not wait_before_retry(failures):
            raise DownloadError(
                f"Failed to download {redact_url(url)}: no data from byte {position:,} of {size:,} in "
                f"{failures} tries ({fault.description}); give the same command again: finished work is kept."
            ) from None
        step = max(step // 2, _MIN_REQUEST_BYTES)
    return b"".join(chunks) if len(chunks) != 1 else chunks[0]


@final
class _RemoteRawFile(RangeFile):
    """Raw file below a buffer: the current block and the blocks that are read ahead."""

    def __init__(self, version: FileVersion) -> None:
        super().__init__(version[1], self._read_block)
        self._version = version
        self._block = b""
        self._start = 0
        self._step = _FIRST_BLOCK_BYTES
        self._pending_blocks: deque[Future[bytes]] = deque()
        self._next_start = 0
        self._pool: ThreadPoolExecutor | None = None

    def _read_block(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), or those that the current block holds."""
        if not self._start <= start < self._start + len(self._block):
            self._load_block(start, stop)
        return self._block[start - self._start : stop - self._start]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pending_blocks.clear()
        self._block = b""
        super().close()

    def _load_block(self, start: int, stop: int) -> None:
        """Take the block at ``start``: a prefetched one, or fetch it now."""
        is_sequential = self._start + len(self._block) == start and self._block
        self._block = b""
        self._start = start
        if is_sequential:
            self._step = min(2 * self._step, _MAX_BLOCK_BYTES)
            self._schedule_blocks()
            self._block = self._pending_blocks.popleft().result()
            self._schedule_blocks()
            return
        for future in self._pending_blocks:
            future.cancel()
        self._pending_blocks.clear()
        self._step = _FIRST_BLOCK_BYTES
        self._next_start = min(start + min(max(stop - start, self._step), _MAX_BLOCK_BYTES), self._size)
        self._block = fetch_through_cache(self._version, start, self._next_start)

    def _schedule_blocks(self) -> None:
        """Fetch the next blocks while the current one is read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READ_AHEAD_BLOCKS, "fetch")
        while len(self._pending_blocks) < _READ_AHEAD_BLOCKS and self._next_start < self._size:
            stop = min(self._next_start + self._step, self._size)
            self._pending_blocks.append(self._pool.submit(fetch_through_cache, self._version, self._next_start, stop))
            self._next_start = stop
