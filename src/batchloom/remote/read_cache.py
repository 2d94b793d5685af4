"""Cache of pages of remote files, which are sampled, read and hashed in turn.

The pages are in one unlinked file of the system's temporary folder, which ends with the process.
The least recently used pages are evicted first. If there is no disk space, nothing is cached.
"""

import contextlib
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import final

# A part of a large file is read and then hashed, and the row groups of a table are read in any order. With room
# for two of them each is transferred once.
PAGE_CACHE_BYTES = 512 << 20
PAGE_BYTES = 64 << 10

# Version of a file: its URL, its size and its version number.
FileVersion = tuple[str, int, int]


@final
class PageCache:
    """Pages of remote files, at most ``max_bytes`` bytes in all; thread-safe."""

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
