"""Status and listing of remote files through fsspec.

A remote file is described by an ``os.stat_result``, as a local one is. Its modification time is
a hash of its ETag or version, which changes when the file is rewritten. So listing, resuming and
checking work the same for local and remote files.
"""

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

from batchloom.core.addresses import get_scheme, redact_url
from batchloom.core.errors import BatchloomError
from batchloom.remote.client import extract_version, fetch_file_info, is_web_url, open_filesystem, run_with_retries

T = TypeVar("T")

# Local devices never have this number.
_REMOTE_DEVICE = -1
_MAX_CONCURRENT = 16
_END: Any = object()


def stat_remote(url: str) -> os.stat_result | None:
    """Return the status of a URL; None if nothing exists there.

    Raises:
        MissingDependencyError: no library for the URL's scheme is installed.
        AccessError: access is denied.
        DownloadError: the URL cannot be reached.
    """
    if (cached_status := _STATUS_CACHE.pop(url, None)) is not None:
        return cached_status
    try:
        return run_with_retries(url, lambda: make_stat_result(url, _fetch_info(url)))
    except FileNotFoundError:
        return None


# Recent results, each for one later call: the status, and whether ranges are supported.
_STATUS_CACHE: dict[str, os.stat_result] = {}
_RANGE_SUPPORT: dict[str, bool] = {}


def prefetch_status(url: str) -> os.stat_result | None:
    """Return :func:`stat_remote` and cache the result for the next call.

    Raises:
        InputError: as :func:`stat_remote`.
    """
    status = stat_remote(url)
    if status is not None:
        _STATUS_CACHE[url] = status
    return status


def clear_status_cache() -> None:
    """Drop the cached statuses."""
    _STATUS_CACHE.clear()
    _RANGE_SUPPORT.clear()


def glob_remote(pattern: str) -> list[tuple[str, os.stat_result]]:
    """Return the URL and status of the files that match a URL pattern, sorted.

    Raises:
        InputError: as :func:`stat_remote`.
    """
    fs, path = open_filesystem(pattern)
    return _list_with_status(fs, pattern, lambda: fs.glob(path, detail=True))


def list_remote_files(url: str) -> list[tuple[str, str, os.stat_result]]:
    """Return URL, relative path and status of all files below a URL, sorted by path.

    Raises:
        InputError: as :func:`stat_remote`.
    """
    fs, path = open_filesystem(url)
    base = len(fs.unstrip_protocol(path).rstrip("/")) + 1
    files = _list_with_status(fs, url, lambda: fs.find(path, detail=True))
    return [(file_url, redact_url(file_url)[base:], status) for file_url, status in files]


def _list_with_status(
    fs: Any, url: str, list_entries: Callable[[], dict[str, Any]]
) -> list[tuple[str, os.stat_result]]:
    files = []
    try:
        entries = run_with_retries(url, list_entries)
    except FileNotFoundError:
        return []
    is_reliable = has_reliable_listing(url)
    file_entries = [
        (fs.unstrip_protocol(name), info) for name, info in entries.items() if info.get("type") != "directory"
    ]
    # Other listings lack fields of the file's status or give them in another form.
    for file_url, info in (
        file_entries if is_reliable else prefetch_items(file_entries, lambda one: prefetch_status(one[0]))
    ):
        status = make_stat_result(file_url, info) if is_reliable else stat_remote(file_url)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            files.append((file_url, status))
    return sorted(files, key=lambda file: file[0].split("/"))


def make_stat_result(url: str, info: dict[str, Any]) -> os.stat_result:
    """Convert fsspec's info of a file to an ``os.stat_result``."""
    folder = info.get("type") == "directory"
    stamp = xxhash.xxh3_64_intdigest(extract_version(info).encode()) >> 4
    mode = stat.S_IFDIR if folder else stat.S_IFREG
    inode = xxhash.xxh3_64_intdigest(url.encode()) >> 1
    size = int(info.get("size") or 0)
    return os.stat_result((mode, inode, _REMOTE_DEVICE, 1, 0, 0, size, 0, stamp // 10**9, 0), {"st_mtime_ns": stamp})


def has_reliable_listing(url: str) -> bool:
    """Return whether a listing gives the same information as the status of each file."""
    return get_scheme(url) in _RELIABLE_LISTING_SCHEMES


_RELIABLE_LISTING_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf")


def supports_ranges(url: str) -> bool:
    """Return whether byte ranges can be read; some web servers have only full files."""
    if (cached_support := _RANGE_SUPPORT.pop(url, None)) is not None:
        return cached_support
    return not is_web_url(url) or bool(run_with_retries(url, lambda: _fetch_info(url))["ranges"])


def _fetch_info(url: str) -> dict[str, Any]:
    info = fetch_file_info(url)
    if is_web_url(url) and "ranges" in info:
        _RANGE_SUPPORT[url] = bool(info["ranges"])
    return info


def prefetch_items(items: Iterable[T], begin: Callable[[T], object]) -> Iterator[T]:
    """Yield items in order after ``begin`` has run on each, sixteen at a time.

    Errors of ``begin`` are ignored: the work on the item meets them again and reports them.
    """
    pending: deque[tuple[T, Future[None]]] = deque()
    source = iter(items)
    pool = ThreadPoolExecutor(_MAX_CONCURRENT, "ahead")
    try:
        while True:
            while len(pending) < 2 * _MAX_CONCURRENT and (next_item := next(source, _END)) is not _END:
                pending.append((next_item, pool.submit(_run_quietly, begin, next_item)))
            if not pending:
                return
            item, future = pending.popleft()
            future.result()
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _run_quietly(begin: Callable[[T], object], item: T) -> None:
    with contextlib.suppress(BatchloomError, OSError):
        begin(item)
