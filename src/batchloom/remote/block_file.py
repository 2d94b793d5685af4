"""A file elsewhere as a file that can be read and sought, block by block.

A block is whole or it is an error: what comes short is asked for again from the byte that was
reached, in smaller pieces, so that a connection that breaks every few hundred kilobytes
still gives a file, and one that breaks in the middle of a record never gives half of it.
"""

import io
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, final

from batchloom.core.addresses import redact_url
from batchloom.core.errors import DownloadError, InputError, MissingDependencyError
from batchloom.remote.client import compute_backoff, fetch
from batchloom.remote.read_cache import PAGE_BYTES, PAGE_CACHE, FileVersion
from batchloom.remote.remote_errors import (
    RemoteFault,
    classify_error,
    list_library_errors,
    make_remote_error,
)

# A reader that jumps about gets small blocks, one that reads on gets large ones, some ahead:
# at most three of the largest are in memory.
_FIRST_BLOCK_BYTES, _MAX_BLOCK_BYTES, _READ_AHEAD_BLOCKS = 256 << 10, 8 << 20, 2
_MIN_REQUEST_BYTES = 64 << 10
_MAX_ATTEMPTS = 6
_BUFFER_BYTES = 64 << 10

RangeReader = Callable[[int, int], bytes]


def open_remote_file(url: str, size: int, stamp: int | None = None) -> BinaryIO:
    """A file of ``size`` bytes at a URL, for reading and seeking.

    Args:
        url: where it lies.
        size: its bytes.
        stamp: tells its versions apart; with it what is read is kept for the next one who asks.

    Reading raises:
        InputMissingError: it is gone.
        AccessError: it may not be read any more.
        DownloadError: its bytes do not come, after some half a minute of trying.
        InputError: it is shorter than it was.
    """
    if stamp is None:
        get: RangeReader = lambda start, stop: fetch_range(url, start, stop, size)  # noqa: E731
    else:
        get = lambda start, stop: fetch_through_cache((url, size, stamp), start, stop)  # noqa: E731
    return io.BufferedReader(_RemoteRawFile(size, get), _BUFFER_BYTES)


def fetch_through_cache(version: FileVersion, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file; what is kept of them, or on its way, is not asked for again."""
    first, last = start // PAGE_BYTES, (stop - 1) // PAGE_BYTES
    pages: dict[int, bytes] = {}
    while len(pages) <= last - first:
        wanted = [number for number in range(first, last + 1) if number not in pages]
        for number in wanted:
            if (page := PAGE_CACHE.page(version, number)) is not None:
                pages[number] = page
        missing = [number for number in wanted if number not in pages]
        mine = PAGE_CACHE.claim(version, missing) if missing else []
        try:
            for run in _group_consecutive(mine):
                pages.update(_fetch_pages(version, run))
        finally:
            PAGE_CACHE.release(version, mine)
    whole = b"".join(pages[number] for number in range(first, last + 1))
    return whole[start - first * PAGE_BYTES : stop - first * PAGE_BYTES]


def _group_consecutive(numbers: list[int]) -> list[range]:
    """Ascending numbers as stretches without gaps."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _fetch_pages(version: FileVersion, numbers: range) -> Iterator[tuple[int, bytes]]:
    url, size, _ = version
    start, stop = numbers.start * PAGE_BYTES, min(numbers.stop * PAGE_BYTES, size)
    data = fetch_range(url, start, stop, size)
    PAGE_CACHE.keep(version, numbers.start, data)
    for at, number in enumerate(numbers):
        yield number, data[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]


def fetch_range(url: str, start: int, stop: int, size: int) -> bytes:
    """Bytes [start, stop) of the file at a URL, all of them."""
    pieces: list[bytes] = []
    at, step, failures = start, stop - start, 0
    while at < stop:
        end = min(at + step, stop)
        try:
            data = fetch(url, at, end, size)
        except (InputError, MissingDependencyError):
            raise
        except list_library_errors() as error:
            data, fault = b"", classify_error(error)
        else:
            fault = RemoteFault("passing", f"only {len(data):,} of {end - at:,} bytes came")
            data = data[: end - at]
        if data:
            pieces.append(data)
            at += len(data)
        if at == end:
            failures = 0
            continue
        if fault.what in ("missing", "denied", "refused"):
            raise make_remote_error(fault, url) from None
        failures = 1 if data else failures + 1
        if failures == _MAX_ATTEMPTS:
            raise DownloadError(
                f"Failed to download {redact_url(url)}: from byte {at:,} of {size:,} on nothing came in "
                f"{_MAX_ATTEMPTS} tries "
                f"({fault.words}); give the same command again: what was finished stays."
            ) from None
        step = max(step // 2, _MIN_REQUEST_BYTES)
        time.sleep(compute_backoff(failures))
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


@final
class _RemoteRawFile(io.RawIOBase):
    """The raw file below a buffer: the block in hand, and those on their way."""

    def __init__(self, size: int, get: RangeReader) -> None:
        self._size, self._get = size, get
        self._at = 0
        self._block, self._start = b"", 0
        self._step = _FIRST_BLOCK_BYTES
        self._coming: deque[tuple[int, Future[bytes]]] = deque()
        self._next = 0
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(target), self._size - self._at)
        if wanted <= 0:
            return 0
        if not self._start <= self._at < self._start + len(self._block):
            self._turn(wanted)
        offset = self._at - self._start
        count = min(wanted, len(self._block) - offset)
        target[:count] = memoryview(self._block)[offset : offset + count]
        self._at += count
        return count

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._coming.clear()
        self._block = b""
        super().close()

    def _turn(self, wanted: int) -> None:
        """Take the block that holds the place: the one that was ordered, or another at once."""
        onward = self._start + len(self._block) == self._at and self._block
        self._block = b""
        if onward:
            self._step = min(2 * self._step, _MAX_BLOCK_BYTES)
            self._order()
            self._start, coming = self._coming.popleft()
            self._block = coming.result()
            self._order()
            return
        for _, coming in self._coming:
            coming.cancel()
        self._coming.clear()
        self._step = _FIRST_BLOCK_BYTES
        self._start = self._at
        stop = min(self._at + min(max(wanted, self._step), _MAX_BLOCK_BYTES), self._size)
        self._block = self._get(self._at, stop)
        self._next = stop

    def _order(self) -> None:
        """Have the next blocks fetched while this one is read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READ_AHEAD_BLOCKS, "fetch")
        while len(self._coming) < _READ_AHEAD_BLOCKS and self._next < self._size:
            stop = min(self._next + self._step, self._size)
            self._coming.append((self._next, self._pool.submit(self._get, self._next, stop)))
            self._next = stop
