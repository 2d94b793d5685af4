"""Reaching places behind URLs through fsspec: stretches of their bytes, and what is asked again."""

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from batchloom.core.addresses import get_scheme, redact_url
from batchloom.core.errors import (
    BatchloomError,
    DownloadError,
    InputError,
    MissingDependencyError,
    NoRangesError,
)
from batchloom.remote.gcs import disable_retries, translate_gcs_errors
from batchloom.remote.remote_errors import (
    RemoteFault,
    classify_address_error,
    classify_error,
    list_library_errors,
    make_remote_error,
)

T = TypeVar("T")

# Before the first byte a person waits: what cannot be reached is told at once.
MAX_CONNECT_ATTEMPTS = 4
_EXTRA_BY_SCHEME = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("http", "https"), "http"),
    "hf": "hf",
}
_CONNECT_TIMEOUT, _READ_TIMEOUT = 15, 60
_MAX_CONNECTIONS = 96
# What ends so is meant to be a page.
_PAGE_SUFFIXES = (".html", ".htm", ".xhtml")


def compute_backoff(tries: int) -> float:
    """Seconds to wait after so many failures in a row: 0.1, 0.4, 1.6, 6.4, 20, 20, ..."""
    return min(0.1 * 4.0 ** (tries - 1), 20.0)


def extract_version(info: dict[str, Any]) -> str:
    """What tells this version of a file from the next, as fsspec's description has it; empty where nothing does."""
    return next((str(info[name]) for name in _VERSION_FIELDS if info.get(name)), "")


# What tells one version of a file from the next, the best first, under the names libraries use.
_VERSION_FIELDS = (
    *("blob_id", "ETag", "etag", "md5Hash", "generation", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "updated", "created"),
)


def fetch(url: str, start: int, stop: int, size: int) -> bytes:
    """Bytes [start, stop) of a file of ``size`` bytes, perhaps fewer; raises what its library raises."""
    return fetch_from_filesystem(open_filesystem(url)[0], url, (start, stop), size)


def fetch_from_filesystem(fs: Any, url: str, byte_range: tuple[int, int], size: int) -> bytes:
    """As :func:`fetch`, of a file system that was reached before."""
    start, stop = byte_range
    if is_web_url(url):
        from fsspec.asyn import sync  # noqa: PLC0415 - late

        web_data: bytes = sync(fs.loop, fetch_web_range, fs, url, start, stop)
        return web_data
    path = fs._strip_protocol(url)  # noqa: SLF001 - as url_to_fs does
    if get_scheme(url) == "hf":
        # Without a size and a cache of its own it asks for more than it is asked for.
        data = fs.cat_file(path, start=start, end=stop, size=size, cache_type="none")
    else:
        with translate_gcs_errors():
            data = fs.cat_file(path, start=start, end=stop)
    return bytes(data)


async def fetch_web_range(fs: Any, url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file on the web; raises what its library raises.

    Raises:
        DownloadError: its server gives no stretches, or a page for people.
    """
    data, info = await _request_web_range(fs, url, start, stop)
    if not info["ranges"]:
        raise make_no_ranges_error(url, info)
    return data


def make_no_ranges_error(url: str, info: dict[str, Any]) -> DownloadError:
    """The error to raise where a server gives no stretches of a file on the web, of which ``info`` tells."""
    if info.get("page"):
        return make_html_page_error(url)
    return NoRangesError(
        f"{redact_url(url)} comes whole or not at all: its server gives no stretches of it (no ranges). Use a "
        f"server that "
        "does, such as nginx or an object store, name the file by itself, or download it first."
    )


def make_html_page_error(url: str) -> DownloadError:
    """The error to raise where a server answers with a page for people."""
    return DownloadError(
        f"{redact_url(url)} is no data: its server answered with a page of HTML, perhaps to log in or to say that "
        f"there is "
        "no such file. Check the address, and that it can be read without a login."
    )


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the URL's path in it.

    Raises:
        MissingDependencyError: no library for such URLs is installed.
        InputError: there are no such URLs, or this is none.
    """
    try:
        import fsspec  # noqa: F401, PLC0415 - late: few inputs lie elsewhere
        from fsspec.core import url_to_fs  # noqa: PLC0415
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
    # dir:// takes its missing file system for a string.
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{redact_url(url)} is no URL that can be read: {scheme}:// is not known to fsspec, or the address "
            "is not complete; s3, gs, https, hf and file are known."
        ) from None
    if scheme in ("s3", "s3a"):
        # What fails is tried again by us, in one place and in smaller pieces.
        fs.retries = 1
    elif scheme in ("gs", "gcs"):
        disable_retries(fs)
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
        import aiohttp  # noqa: PLC0415 - optional

        seconds = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=_READ_TIMEOUT)
        client = {"timeout": seconds, "trust_env": _has_proxies(), "auto_decompress": False}
        return {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
    if scheme in ("gs", "gcs"):
        return {"use_listings_cache": False}
    return {}


def _has_proxies() -> bool:
    """Whether the environment names proxies or passwords; to let aiohttp look for them costs two threads a request."""
    from urllib.request import getproxies  # noqa: PLC0415 - few inputs are on the web

    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # noqa: PTH111 - there may be no home
    return bool(getproxies()) or os.path.isfile(netrc)  # noqa: PTH113


def _lacks_s3_credentials() -> bool:
    """Whether this machine has no credentials for S3: then only public buckets can be read."""
    from botocore.session import Session  # noqa: PLC0415 - optional

    return Session().get_credentials() is None


def fetch_file_info(url: str) -> dict[str, Any]:
    """What fsspec says of what lies at a URL; of a file on the web also whether stretches of it can be had."""
    fs, path = open_filesystem(url)
    if is_web_url(url):
        if url.endswith("/"):
            return {"type": "directory", "ranges": False}
        info: dict[str, Any] = _request_web(fs, url, 0, 1)[1]
        return info
    if get_scheme(url) in ("s3", "s3a", "gs", "gcs"):
        fs.invalidate_cache()
    file_info: dict[str, Any] = fs.info(path)
    return file_info


def is_web_url(url: str) -> bool:
    """Whether a URL is an address on the web."""
    return get_scheme(url) in ("http", "https")


def _request_web(fs: Any, url: str, start: int, stop: int) -> tuple[bytes, dict[str, Any]]:
    """A stretch of a file on the web, and what the answer says of the file.

    fsspec's own look at a web file takes every fault for a missing file, asks with HEAD, which
    signed addresses refuse, and reads all of a file whose server knows no ranges.
    """
    from fsspec.asyn import sync  # noqa: PLC0415 - late

    data, info = sync(fs.loop, _request_web_range, fs, url, start, stop)
    return data, info


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


def iter_web_file(url: str) -> Iterator[bytes]:
    """All of a file whose server gives no stretches of it, a megabyte at a time.

    Raises:
        Whatever its library raises, also where the connection breaks before the end.
    """
    import asyncio  # noqa: PLC0415 - late

    fs, _ = open_filesystem(url)

    async def open_response() -> Any:
        session = await fs.set_session()
        response = await session.get(fs.encode_url(url), headers={"Accept-Encoding": "identity"})
        response.raise_for_status()
        return response

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, fs.loop).result()

    response = run(open_response())
    try:
        while data := run(response.content.read(1 << 20)):
            yield data
    finally:
        response.close()


def fetch_file(url: str, *, max_bytes: int, seconds: float) -> bytes:
    """All of a file at a URL, asked again where that may help.

    Args:
        url: where it lies.
        max_bytes: bytes it may have.
        seconds: until it has come, all attempts together.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is larger, does not come in time, or cannot be had.
    """
    deadline = time.monotonic() + seconds

    def read_file() -> bytes:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise _make_timeout_error(url, seconds)
        fs, path = open_filesystem(url)
        try:
            if is_web_url(url):
                return _fetch_web_file(fs, url, max_bytes, remaining_seconds)
            size = int(fs.info(path)["size"])
            if size > max_bytes:
                raise _make_too_large_error(url, size, max_bytes)
            return fetch_from_filesystem(fs, url, (0, size), size) if size else b""
        except TimeoutError:
            raise _make_timeout_error(url, seconds) from None

    return run_with_retries(url, read_file)


def _fetch_web_file(fs: Any, url: str, max_bytes: int, seconds: float) -> bytes:
    """A file of the web, read to its end while it is not larger than allowed."""
    from fsspec.asyn import sync  # noqa: PLC0415 - late

    async def read() -> bytes:
        session = await fs.set_session()
        chunks, size = [], 0
        headers = {"Accept-Encoding": "identity"}
        async with session.get(fs.encode_url(url), headers=headers) as response:
            response.raise_for_status()
            async for chunk in response.content.iter_chunked(1 << 20):
                size += len(chunk)
                if size > max_bytes:
                    raise _make_too_large_error(url, max(size, response.content_length or 0), max_bytes)
                chunks.append(chunk)
        return b"".join(chunks)

    content: bytes = sync(fs.loop, read, timeout=seconds)
    return content


def _make_too_large_error(url: str, size: int, max_bytes: int) -> InputError:
    return InputError(f"{redact_url(url)} has {size:,} bytes or more, where {max_bytes:,} are allowed")


def _make_timeout_error(url: str, seconds: float) -> DownloadError:
    return DownloadError(
        f"{redact_url(url)} did not come within {seconds:g} s: its server hangs or is slow; try again, or fetch it "
        f"first"
    )


def run_with_retries(url: str, operation: Callable[[], T]) -> T:
    """Look at a place; what passes is tried again, what does not is told at once."""
    tries = 0
    while isinstance(result := capture_fault(operation), RemoteFault):
        tries += 1
        if result.kind == "missing":
            raise FileNotFoundError
        if result.kind != "passing" or tries == MAX_CONNECT_ATTEMPTS:
            raise make_remote_error(result, url)
        time.sleep(compute_backoff(tries))
    return result


def capture_fault(work: Callable[[], T]) -> T | RemoteFault:
    """What comes of work at a distance, or what went wrong there.

    Raises:
        BatchloomError: what the work itself raises of ours.
    """
    try:
        with translate_gcs_errors():
            return work()
    except BatchloomError:
        raise
    except list_library_errors() as error:
        return classify_error(error)
    except (ValueError, TypeError, NotImplementedError) as error:
        return classify_address_error(error)
