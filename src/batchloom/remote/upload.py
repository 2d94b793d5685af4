"""Output folder behind a URL: ``s3://bucket/prefix``, or others that fsspec knows.

The library of the scheme sends a file. Here requests are retried, and each content is compared with the file's:
networks alter data, and an object of equal size may be that of another job.
"""

import base64
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, final

from batchloom.core.addresses import check_url, get_scheme, has_wildcard, is_url, redact_url
from batchloom.core.errors import InputError, OutputError
from batchloom.core.files import describe_os_error, open_regular_file
from batchloom.remote.client import capture_fault, compute_jittered_backoff, open_filesystem
from batchloom.remote.remote_errors import RemoteFault, make_write_error

T = TypeVar("T")

# Maximum number of tries of one request.
MAX_REQUEST_ATTEMPTS = 8
# A person waits for the first request of a run, so it is retried less often.
_MAX_FIRST_ATTEMPTS = 4
# Number of uploads of an object whose content differs from what was sent.
_MAX_UPLOAD_ATTEMPTS = 3
# Each part in flight takes this many bytes of memory.
PART_BYTES = 16 << 20
# Parts of one file that s3fs sends at a time.
_PARALLEL_PARTS = 4
# Limit of S3 for the parts of one object.
_MAX_PARTS = 10_000
_MIB = 1 << 20
_S3_SCHEMES = ("s3", "s3a")
_GCS_SCHEMES = ("gs", "gcs")
# These schemes cannot be written to, or not file by file.
_READ_ONLY_SCHEMES = ("http", "https", "hf")


def choose_part_bytes(size: int) -> int:
    """Return the part size of a file: 16 MiB, or more to need at most 10,000."""
    return max(PART_BYTES, -(-size // _MAX_PARTS // _MIB) * _MIB)


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Turn an error while reading a local file back into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {describe_os_error(error)}; then give the same command again to resume."
        ) from error


def iter_pieces(path: Path, piece_bytes: int) -> Iterator[bytes]:
    """Yield the content of a local file in pieces of ``piece_bytes``."""
    with wrap_read_errors(path), open_regular_file(path) as file:
        while piece := file.read(piece_bytes):
            yield piece


def compute_md5(path: Path) -> bytes:
    """Return the MD5 of a local file."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in iter_pieces(path, PART_BYTES):
        digest.update(piece)
    return digest.digest()


def compute_etag(path: Path, size: int) -> str:
    """Return the ETag that S3 gives a file in parts of :func:`choose_part_bytes`.

    Source: the S3 API, "Checking object integrity". s3fs sends a file of less than two parts in one request.
    """
    part_bytes = choose_part_bytes(size)
    if size < 2 * part_bytes:
        return compute_md5(path).hex()
    digests = [hashlib.md5(part, usedforsecurity=False).digest() for part in iter_pieces(path, part_bytes)]
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Size of a remote file, and the checksum that its service reports, if any."""

    size: int
    checksum: str  # ETag of S3 without quotes, or the base64 MD5 of Google


@final
class RemoteFolder:
    """Output folder behind a URL; a context manager, thread-safe.

    Args:
        url: ``scheme://bucket/prefix``; the scheme's library finds the credentials.

    Attributes:
        redacted_url: URL without secrets.

    Raises:
        InputError: the URL is invalid, or its scheme cannot be written to.
        MissingDependencyError: no library for the URL's scheme is installed.
        OutputError: by all methods, if a request fails: no such bucket, no permission, no network.
    """

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise InputError(f"{url} is no URL; write scheme://bucket/prefix, for example s3://bucket/prefix.")
        scheme = get_scheme(url)
        if scheme in _READ_ONLY_SCHEMES:
            raise InputError(
                f"The output is a URL ({scheme}://...) that cannot be written to; choose a local path, or an object "
                "store (s3://bucket/prefix)."
            )
        check_url(url)
        address = url[len(scheme) + len("://") :].rstrip("/")
        if not address:
            raise InputError(f"The output {scheme}:// names no bucket; write {scheme}://bucket/prefix.")
        self._url = f"{scheme}://{address}"
        self.redacted_url = redact_url(self._url)
        if has_wildcard(self._url):
            raise InputError(f"The output {self.redacted_url} holds a wildcard; name one folder, without * ? and [.")
        self._scheme = scheme
        self._fs, path = open_filesystem(self._url)
        self._base = path.rstrip("/")
        self._ended = threading.Event()
        self._is_reached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all uploads after the parts under way, and all retries."""
        self._ended.set()

    def list_files(self) -> dict[str, RemoteFile]:
        """Return all files by their relative names, in one listing; empty if none exist."""

        def list_entries() -> dict[str, Any]:
            self._fs.invalidate_cache()
            listing: dict[str, Any] = self._fs.find(self._base, detail=True)
            return listing

        try:
            entries = self._retry("", list_entries)
        except FileNotFoundError:
            if self._scheme in _S3_SCHEMES:
                raise make_write_error(RemoteFault("missing", ""), self._url) from None
            return {}
        files = {}
        for entry_path, info in entries.items():
            name = entry_path.strip("/")[len(self._base.strip("/")) + 1 :]
            # Some tools mark a folder by an empty object of its name.
            if info.get("type") != "directory" and (name or info.get("size")):
                files[name] = _make_remote_file(info)
        return files

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is missing."""
        try:
            return bytes(self._retry(name, lambda: self._fs.cat_file(self._locate(name))))
        except FileNotFoundError:
            return None

    def upload(self, local: Path, name: str) -> RemoteFile:
        """Upload a file, verify its content, and return its entry in listings."""
        with wrap_read_errors(local):
            # Later, a missing file would look like a missing bucket.
            open_regular_file(local).close()
        is_missing = False
        for _ in range(_MAX_UPLOAD_ATTEMPTS):
            try:
                self._retry(name, partial(self._put, local, name))
            except FileNotFoundError:
                # There is no such bucket; or the upload was complete, and only the response to it was lost.
                is_missing = True
            remote_file = self._find_file(name)
            if remote_file is not None and self.holds(local, name, remote_file):
                return remote_file
        if is_missing:
            raise make_write_error(RemoteFault("missing", ""), self._url)
        raise OutputError(
            f"{self.redacted_url}/{name} differed from the sent file in all {_MAX_UPLOAD_ATTEMPTS} uploads. Check the "
            "network and proxies between this machine and the store, then give the same command again to resume."
        )

    def holds(self, local: Path, name: str, remote_file: RemoteFile) -> bool:
        """Return whether a listed file equals a local one, by size and content."""
        with wrap_read_errors(local):
            size = local.stat().st_size
        if remote_file.size != size:
            return False
        if remote_file.checksum:
            is_s3 = self._scheme in _S3_SCHEMES
            expected = compute_etag(local, size) if is_s3 else base64.b64encode(compute_md5(local)).decode()
            if remote_file.checksum == expected:
                return True
        # Objects that the service encrypts, or that other tools sent in other parts, have another checksum.
        return self._has_same_bytes(local, name)

    def _locate(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _put(self, local: Path, name: str) -> None:
        from fsspec.callbacks import Callback

        options = {}
        if self._scheme in _S3_SCHEMES:
            options = {"chunksize": choose_part_bytes(local.stat().st_size), "max_concurrency": _PARALLEL_PARTS}
        elif self._scheme in _GCS_SCHEMES:
            options = {"chunksize": PART_BYTES}
        # The library calls it after each part: a run that ended must not wait for large files.
        callback = Callback(hooks={"stop": lambda _size, _sent: self._check_running()})
        self._fs.put_file(os.fspath(local), self._locate(name), callback=callback, **options)

    def _check_running(self) -> None:
        """Raise an error in the threads of an upload that has ended; it is not reported."""
        if self._ended.is_set():
            raise OutputError("Stopped.")

    def _find_file(self, name: str) -> RemoteFile | None:
        def fetch_info() -> RemoteFile:
            self._fs.invalidate_cache()
            return _make_remote_file(self._fs.info(self._locate(name)))

        try:
            return self._retry(name, fetch_info)
        except FileNotFoundError:
            return None

    def _has_same_bytes(self, local: Path, name: str) -> bool:
        """Return whether a remote file of the same size has the bytes of a local one."""
        start = 0
        for piece in iter_pieces(local, PART_BYTES):
            read_range = partial(self._read_range, name, start, start + len(piece))
            try:
                if self._retry(name, read_range) != piece:
                    return False
            except FileNotFoundError:
                return False
            start += len(piece)
        return True

    def _read_range(self, name: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._locate(name), start=start, end=stop))
        except Exception as error:
            # botocore found that an object differs from the checksum which was sent with it.
            if type(error).__name__ == "FlexibleChecksumError":
                return b""
            raise

    def _retry(self, name: str, work: Callable[[], T]) -> T:
        """Run requests for a file and repeat them after transient faults.

        A missing object is a FileNotFoundError, other faults are an OutputError.
        """
        tries = 0
        while True:
            self._check_running()
            result = capture_fault(work)
            if not isinstance(result, RemoteFault):
                self._is_reached = True
                return result
            tries += 1
            if result.kind == "missing":
                self._is_reached = True
                raise FileNotFoundError
            # An address that never answered is probably wrong.
            is_transient = result.kind == "passing" or (result.kind == "unreachable" and self._is_reached)
            most_tries = MAX_REQUEST_ATTEMPTS if self._is_reached else _MAX_FIRST_ATTEMPTS
            if not is_transient or tries >= most_tries:
                raise make_write_error(result, f"{self._url}/{name}".rstrip("/"), tries)
            self._ended.wait(compute_jittered_backoff(tries, f"{self._url}/{name}"))


def _make_remote_file(info: dict[str, Any]) -> RemoteFile:
    checksum = str(info.get("ETag") or info.get("md5Hash") or "").strip('"')
    return RemoteFile(int(info.get("size") or 0), checksum)
