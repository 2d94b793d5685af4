"""Access to URLs through fsspec: byte ranges, status, listings and retries.

A remote file is described by an ``os.stat_result``, as a local one is. Its modification time is
a hash of its ETag or version, which changes when the file is rewritten. So listing, resuming and
checking work the same for local and remote files.
"""

import contextlib
import functools
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

import xxhash

from batchloom.core.addresses import get_scheme, redact_url
from batchloom.core.errors import BatchloomError, DownloadError, InputError, MissingDependencyError, NoRangesError
from batchloom.remote.remote_errors import (
    AnswerError,
    RemoteFault,
    classify_address_error,
    classify_error,
    list_library_errors,
    make_remote_error,
)

T = TypeVar("T")

# A person waits for the first byte, so an unreachable address is reported early.
MAX_CONNECT_ATTEMPTS = 4
_EXTRA_BY_SCHEME = {**dict.fromkeys(("s3", "s3a", "gs", "gcs", "http", "https"), "remote"), "hf": "hf"}
_CONNECT_TIMEOUT = 15
_READ_TIMEOUT = 60
# Local devices never have this number.
_REMOTE_DEVICE = -1
_MAX_PREFETCHES = 16
_END: Any = object()
_MAX_CONNECTIONS = 96
# Files with these suffixes are meant to be HTML pages.
_PAGE_SUFFIXES = (".html", ".htm", ".xhtml")


def compute_backoff(tries: int) -> float:
    """Return the delay in seconds after failures in a row: 0.1, 0.4, 1.6, 6.4, 20, ..."""
    return min(0.1 * 4.0 ** (tries - 1), 20.0)


# Its attribute `fetches_ahead` is set in threads that fetch ahead.
_LOCAL = threading.local()


def wait_before_retry(failures: int) -> bool:
    """Wait after failures in a row; return False if there shall be no other try.

    Fetching ahead is tried once: the work on the item meets a fault again, and the job may have ended meanwhile.
    """
    if getattr(_LOCAL, "fetches_ahead", False):
        return False
    time.sleep(compute_backoff(failures))
    return True


def compute_jittered_backoff(tries: int, name: str) -> float:
    """Return a delay of 50 to 100% of :func:`compute_backoff`, derived from ``name``.

    Many requests fail together, so their delays must differ.
    """
    share = xxhash.xxh3_64_intdigest(f"{name}\n{tries}".encode()) / 2**64
    return compute_backoff(tries) * (0.5 + share / 2)


def _extract_version(info: dict[str, Any]) -> str:
    """Return the version identifier in a file's fsspec info; empty if it has none."""
    return next((str(info[name]) for name in _VERSION_FIELDS if info.get(name)), "")


# Fields that identify a version of a file in different libraries, best first.
_VERSION_FIELDS = (
    "blob_id",
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "Content-MD5",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)


def fetch(url: str, start: int, stop: int, size: int) -> bytes:
    """Return bytes [start, stop) of a file of ``size`` bytes, possibly fewer.

    Errors of the fsspec library are passed on.
    """
    return fetch_from_filesystem(open_filesystem(url)[0], url, (start, stop), size)


def fetch_from_filesystem(fs: Any, url: str, byte_range: tuple[int, int], size: int) -> bytes:
    """Return bytes as :func:`fetch` does, from an open file system."""
    start, stop = byte_range
    if is_web_url(url):
        from fsspec.asyn import sync

        web_data: bytes = sync(fs.loop, fetch_web_range, fs, url, start, stop)
        return web_data
    path = fs._strip_protocol(url)  # noqa: SLF001 - as url_to_fs does
    if get_scheme(url) == "hf":
        # Without the size and with the default cache, it requests more bytes than needed.
        data = fs.cat_file(path, start=start, end=stop, size=size, cache_type="none")
    else:
        with translate_gcs_errors():
            data = fs.cat_file(path, start=start, end=stop)
    return bytes(data)


async def fetch_web_range(fs: Any, url: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file on the web."""
    data, info = await _request_web_range(fs, url, start, stop)
    if not info["ranges"]:
        raise make_no_ranges_error(url, info)
    return data


def make_no_ranges_error(url: str, info: dict[str, Any]) -> DownloadError:
    """Make the error for a web file whose server does not support range requests."""
    if info.get("page"):
        return make_html_page_error(url)
    return NoRangesError(
        f"{redact_url(url)} cannot be read in parts: its server does not support range requests. Use a server that "
        "does, such as nginx or an object store, name the file by itself, or download it first."
    )


def make_html_page_error(url: str) -> DownloadError:
    """Make the error for a server that answers with an HTML page."""
    return DownloadError(
        f"{redact_url(url)} is not a data file: its server answered with an HTML page, perhaps a login page or a "
        '"not found" page. Check the address, and that it can be read without a login.'
    )


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the URL's path in it."""
    try:
        import fsspec  # noqa: F401 - late: few inputs are remote
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact_url(url)} needs fsspec: pip install fsspec, or name local files."
        ) from error
    scheme = get_scheme(url)
    try:
        fs, path = url_to_fs(scheme + url[len(scheme) :], **_make_storage_options(scheme))
    except ImportError:
        extra = _EXTRA_BY_SCHEME.get(scheme)
        remedy = f"pip install 'batchloom[{extra}]'" if extra else f"the fsspec library for {scheme}"
        raise MissingDependencyError(
            f"{redact_url(url)} needs a library that is not installed: {remedy}, or name local files."
        ) from None
    # For dir:// fsspec takes the missing target file system for a string.
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{redact_url(url)} is not a readable URL: {scheme}:// is not known to fsspec, or the address is "
            "incomplete; s3, gs, https, hf and file are known."
        ) from None
    if scheme in ("s3", "s3a"):
        # Batchloom retries itself, in one module and with smaller requests.
        fs.retries = 1
    elif scheme in ("gs", "gcs"):
        _disable_gcs_retries(fs)
    return fs, path


@functools.cache
def _make_storage_options(scheme: str) -> dict[str, Any]:
    if scheme in ("s3", "s3a"):
        config = {
            "retries": {"total_max_attempts": 2, "mode": "standard"},
            "connect_timeout": _CONNECT_TIMEOUT,
            "read_timeout": _READ_TIMEOUT,
            "max_pool_connections": _MAX_CONNECTIONS,
        }
        return {
            "config_kwargs": config,
            "use_listings_cache": False,
            "anon": _lacks_s3_credentials(),
        }
    if scheme in ("http", "https"):
        import aiohttp

        seconds = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=_READ_TIMEOUT)
        client = {"timeout": seconds, "trust_env": _has_proxies(), "auto_decompress": False}
        return {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
    if scheme in ("gs", "gcs"):
        return {"use_listings_cache": False}
    return {}


def _has_proxies() -> bool:
    """Return whether the environment configures proxies or a netrc file.

    Letting aiohttp always look for them costs two threads per request.
    """
    from urllib.request import getproxies

    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    return bool(getproxies()) or os.path.isfile(netrc)


def _lacks_s3_credentials() -> bool:
    """Return whether no S3 credentials exist: then only public buckets can be read."""
    from botocore.session import Session

    return Session().get_credentials() is None


def fetch_file_info(url: str) -> dict[str, Any]:
    """Return fsspec's info of a URL; for a web file also whether ranges are supported.

    fsspec's own ``info`` of a web file takes every fault for a missing file. It uses HEAD, which
    signed URLs refuse, and reads a complete file if its server does not support ranges.
    """
    fs, path = open_filesystem(url)
    if is_web_url(url):
        if url.endswith("/"):
            return {"type": "directory", "ranges": False}
        from fsspec.asyn import sync

        info: dict[str, Any] = sync(fs.loop, _request_web_range, fs, url, 0, 1)[1]
        return info
    if get_scheme(url) in ("s3", "s3a", "gs", "gcs"):
        fs.invalidate_cache()
    file_info: dict[str, Any] = fs.info(path)
    return file_info


def is_web_url(url: str) -> bool:
    """Return whether a URL is a web address."""
    return get_scheme(url) in ("http", "https")


async def _request_web_range(fs: Any, url: str, start: int, stop: int) -> tuple[bytes, dict[str, Any]]:
    session = await fs.set_session()
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
    async with session.get(fs.encode_url(url), headers=headers) as response:
        metadata = {
            name: response.headers[name]
            for name in ("ETag", "Content-MD5", "Last-Modified")
            if name in response.headers
        }
        content_range = re.fullmatch(r"bytes (\*|\d+-\d+)/(\d+)", response.headers.get("Content-Range", ""))
        if response.status == 416 and content_range:
            return b"", {**metadata, "type": "file", "size": int(content_range[2]), "ranges": True}
        response.raise_for_status()
        if response.status == 206 and content_range and content_range[1].startswith(f"{start}-"):
            data = await response.read()
            return data, {**metadata, "type": "file", "size": int(content_range[2]), "ranges": True}
        size = response.headers.get("Content-Length")
        response.close()
        is_page = response.content_type == "text/html" and not response.url.path.endswith(_PAGE_SUFFIXES)
        metadata |= {"type": "file", "size": size and int(size), "ranges": False, "page": is_page}
        return b"", metadata


def iter_web_file(url: str, deadline: float | None = None) -> Iterator[bytes]:
    """Yield a complete web file, about 1 MiB at a time.

    Args:
        url: URL of the file, whose server need not support ranges.
        deadline: ``time.monotonic()`` at which a TimeoutError ends the download.

    Raises:
        Exception: any error of the library, also if the connection breaks before the end.
    """
    import asyncio

    fs, _ = open_filesystem(url)

    async def open_response() -> Any:
        session = await fs.set_session()
        response = await session.get(fs.encode_url(url), headers={"Accept-Encoding": "identity"})
        response.raise_for_status()
        return response

    def run(work: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, fs.loop)
        try:
            return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            future.cancel()
            raise

    response = run(open_response())
    try:
        while data := run(response.content.read(1 << 20)):
            yield data
    finally:
        response.close()


def fetch_file(url: str, *, max_bytes: int, seconds: float) -> bytes:
    """Return the contents of a file at a URL, with retries.

    Args:
        url: URL of the file.
        max_bytes: maximum size of the file in bytes.
        seconds: time limit for all attempts together.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is too large, does not arrive in time, or cannot be read.
    """
    deadline = time.monotonic() + seconds

    def read_file() -> bytes:
        if time.monotonic() >= deadline:
            raise _make_timeout_error(url, seconds)
        if is_web_url(url):
            chunks = []
            size = 0
            try:
                for chunk in iter_web_file(url, deadline):
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > max_bytes:
                        raise _make_too_large_error(url, size, max_bytes)
            except TimeoutError:
                raise _make_timeout_error(url, seconds) from None
            return b"".join(chunks)
        fs, path = open_filesystem(url)
        size = int(fs.info(path)["size"])
        if size > max_bytes:
            raise _make_too_large_error(url, size, max_bytes)
        return fetch_from_filesystem(fs, url, (0, size), size) if size else b""

    return run_with_retries(url, read_file)


def _make_too_large_error(url: str, size: int, max_bytes: int) -> InputError:
    return InputError(f"{redact_url(url)} has at least {size:,} bytes, and at most {max_bytes:,} are allowed")


def _make_timeout_error(url: str, seconds: float) -> DownloadError:
    return DownloadError(
        f"{redact_url(url)} was not downloaded within {seconds:g} s: its server hangs or is slow; try again, or "
        "download it first"
    )


def run_with_retries(url: str, operation: Callable[[], T]) -> T:
    """Run an operation on a URL; retry transient faults and raise others at once.

    Raises:
        FileNotFoundError: nothing exists at the URL.
        InputError: any other fault.
    """
    result = retry_transient(operation)
    if not isinstance(result, RemoteFault):
        return result
    if result.kind == "missing":
        raise FileNotFoundError
    raise make_remote_error(result, url)


def retry_transient(operation: Callable[[], T], max_attempts: int = MAX_CONNECT_ATTEMPTS) -> T | RemoteFault:
    """Return the result of remote work, retried, or its last fault."""
    tries = 0
    while isinstance(result := capture_fault(operation), RemoteFault):
        tries += 1
        if result.kind != "passing" or tries == max_attempts or not wait_before_retry(tries):
            break
    return result


def capture_fault(work: Callable[[], T]) -> T | RemoteFault:
    """Return the result of remote work, or the fault that it hit."""
    try:
        with translate_gcs_errors():
            return work()
    except BatchloomError:
        raise
    except list_library_errors() as error:
        return classify_error(error)
    except (ValueError, TypeError, NotImplementedError) as error:
        return classify_address_error(error)


def _disable_gcs_retries(fs: Any) -> None:
    """Disable the retries of gcsfs, six attempts within a minute.

    Batchloom retries itself.
    """
    once = getattr(type(fs)._request, "__wrapped__", None)  # noqa: SLF001 - it has no setting for it
    if once is not None:
        fs._request = functools.partial(once, fs)  # noqa: SLF001


@contextlib.contextmanager
def translate_gcs_errors() -> Iterator[None]:
    """Turn gcsfs errors that only have a text into errors with a status code."""
    try:
        yield
    except OSError as error:
        if type(error) is OSError and str(error).startswith("Forbidden"):
            raise AnswerError(403) from None
        raise
    except ValueError as error:
        if str(error).startswith("Bad Request"):
            raise AnswerError(400) from None
        raise


def check_hub_endpoint() -> None:
    """Reject an ``HF_ENDPOINT`` that is not a web address.

    The error does not repeat it, because it may contain a password.

    Raises:
        InputError: the address is invalid.
    """
    address = os.environ.get("HF_ENDPOINT")
    if address is None:
        return
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise InputError(
            "HF_ENDPOINT is not the address of a Hub: unset it, or write it as https://host or http://host:port."
        )


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
    is_reliable = _has_reliable_listing(url)
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
    stamp = xxhash.xxh3_64_intdigest(_extract_version(info).encode()) >> 4
    mode = stat.S_IFDIR if folder else stat.S_IFREG
    inode = xxhash.xxh3_64_intdigest(url.encode()) >> 1
    size = int(info.get("size") or 0)
    return os.stat_result((mode, inode, _REMOTE_DEVICE, 1, 0, 0, size, 0, stamp // 10**9, 0), {"st_mtime_ns": stamp})


def _has_reliable_listing(url: str) -> bool:
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
    pool = ThreadPoolExecutor(_MAX_PREFETCHES, "ahead")
    try:
        while True:
            while len(pending) < 2 * _MAX_PREFETCHES and (next_item := next(source, _END)) is not _END:
                pending.append((next_item, pool.submit(_run_quietly, begin, next_item)))
            if not pending:
                return
            item, future = pending.popleft()
            future.result()
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _run_quietly(begin: Callable[[T], object], item: T) -> None:
    _LOCAL.fetches_ahead = True
    with contextlib.suppress(BatchloomError, OSError):
        begin(item)


# With 50 ms latency and 128 KiB per request this gives 250 MB/s. aiohttp allows 100 connections.
MAX_CONCURRENT_REQUESTS = 96
_MAX_THREADS = 16
_MAX_ATTEMPTS = 8
# A short read is retried less often, because a truncated file stays truncated.
_MAX_SHORT_ATTEMPTS = 3


class RangeError(Exception):
    """Byte range that cannot be fetched, with the file's name and the fault."""

    def __init__(self, name: str, fault: RemoteFault) -> None:
        super().__init__(f"{name}: {fault.description}")
        self.name = name
        self.fault = fault


class _ShortReadError(OSError):
    pass


@final
class RangeFetcher:
    """Fetcher of byte ranges of files below one URL; thread-safe and fork-safe.

    Args:
        url: URL of the folder.

    Attributes:
        url: URL without a slash at its end.
        received: number of bytes received so far.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.received = 0
        self.after_fork()
        self._process = 0
        self._fs: Any = None
        self._semaphore: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def after_fork(self) -> None:
        """Replace the lock: a thread that held it does not exist in a forked child."""
        self._lock = threading.Lock()

    def submit(self, name: str, start: int, stop: int, size: int) -> "Future[bytes]":
        """Start fetching bytes [start, stop) of a file of ``size`` bytes.

        The future raises RangeError.

        Raises:
            MissingDependencyError: no library for the URL's scheme is installed.
            InputError: the scheme is unknown.
        """
        self._connect()
        import asyncio

        from fsspec.asyn import get_loop

        return asyncio.run_coroutine_threadsafe(self._fetch(name, start, stop, size), get_loop())

    def _connect(self) -> None:
        """Connect once per process: open connections do not survive a fork."""
        if self._process == os.getpid():
            return
        with self._lock:
            if self._process == os.getpid():
                return
            import asyncio

            self._fs, _ = open_filesystem(self.url)
            self._semaphore = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
            is_async = getattr(self._fs, "async_impl", False)
            self._threads = None if is_async else ThreadPoolExecutor(_MAX_THREADS, "ranges")
            self._process = os.getpid()

    async def _fetch(self, name: str, start: int, stop: int, size: int) -> bytes:
        import asyncio

        url = f"{self.url}/{name}"
        tries = 0
        while True:
            try:
                async with self._semaphore:
                    return self._check_length(await self._request_range(url, start, stop, size), stop - start)
            except BatchloomError:
                raise
            except _list_errors() as error:
                tries += 1
                await asyncio.sleep(_compute_retry_delay(name, tries, error, start))

    def _request_range(self, url: str, start: int, stop: int, size: int) -> Awaitable[bytes]:
        if self._threads is not None:
            import asyncio

            work = partial(fetch_from_filesystem, self._fs, url, (start, stop), size)
            return asyncio.get_running_loop().run_in_executor(self._threads, work)
        if is_web_url(url):
            return fetch_web_range(self._fs, url, start, stop)
        return _cat_range(self._fs, url, start, stop)

    def _check_length(self, data: bytes, expected_size: int) -> bytes:
        self.received += len(data)
        if len(data) != expected_size:
            raise _ShortReadError(f"only {len(data):,} of {expected_size:,} bytes arrived")
        return data


def _list_errors() -> tuple[type[BaseException], ...]:
    return (*list_library_errors(), ValueError, TypeError, NotImplementedError)


async def _cat_range(fs: Any, url: str, start: int, stop: int) -> bytes:
    with translate_gcs_errors():
        data = await fs._cat_file(fs._strip_protocol(url), start=start, end=stop)  # noqa: SLF001
    return bytes(data)


def _compute_retry_delay(name: str, tries: int, error: BaseException, start: int) -> float:
    """Return the seconds to wait before the next try."""
    if isinstance(error, _ShortReadError):
        fault = RemoteFault("refused", str(error))
        max_attempts = _MAX_SHORT_ATTEMPTS
    elif isinstance(error, list_library_errors()):
        fault = classify_error(error)
        max_attempts = _MAX_ATTEMPTS
    else:
        fault = classify_address_error(error)  # type: ignore[arg-type]
        max_attempts = 1
    is_permanent = fault.kind in ("missing", "denied") or (
        fault.kind == "refused" and not isinstance(error, _ShortReadError)
    )
    if is_permanent or tries >= max_attempts:
        raise RangeError(name, fault) from None
    return compute_jittered_backoff(tries, f"{name}\n{start}")
