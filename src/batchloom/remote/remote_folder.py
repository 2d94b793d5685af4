"""Output folder behind a URL: ``s3://bucket/prefix``, or others that fsspec knows.

Every object is complete or missing, its checksum is compared with the file's, and failed requests are
retried. A listed file is identified by its size and its version in the service.
"""

import base64
import contextlib
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import xxhash

from batchloom.core.addresses import check_url, get_scheme, has_wildcard, redact_url
from batchloom.core.errors import InputError, OutputError
from batchloom.core.files import open_regular_file
from batchloom.remote.client import capture_fault, extract_version, open_filesystem
from batchloom.remote.multipart import (
    PART_BYTES,
    UploadPart,
    compute_object_checksums,
    confirms_content,
    plan_parts,
    read_part,
    wrap_read_errors,
)
from batchloom.remote.objects import has_reliable_listing
from batchloom.remote.remote_errors import RemoteFault, classify_error, make_write_error
from batchloom.remote.s3_upload import S3ObjectWriter
from batchloom.remote.upload_retry import RequestRetrier

# Maximum number of request bodies in memory; each is a part of a file.
_MAX_BODIES = 4
# Number of uploads of an object whose content differs from what was sent.
_MAX_UPLOAD_ATTEMPTS = 3
_S3_SCHEMES, _GCS_SCHEMES = ("s3", "s3a"), ("gs", "gcs")
# These schemes cannot be written to, or not file by file.
_READ_ONLY_SCHEMES = ("http", "https", "hf")
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Size of a remote file, and the service's mark of its version (such as its ETag)."""

    size: int
    mark: str


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
    """

    def __init__(self, url: str) -> None:
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
        self._fs, path = open_filesystem(self._url)
        self._base = path.rstrip("/")
        self._ended = threading.Event()
        self._bodies = ThreadPoolExecutor(_MAX_BODIES, "bodies")
        self._s3 = S3ObjectWriter(self._fs, self._bodies) if scheme in _S3_SCHEMES else None
        self._options = {"chunksize": PART_BYTES} if scheme in _GCS_SCHEMES else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._bodies.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Stop all retries; requests under way end, with an error if they fail."""
        self._ended.set()

    def list_files(self, *, first: bool = False) -> dict[str, RemoteFile]:
        """Return all files by their relative names, in one listing; empty if none exist.

        Args:
            first: whether this is the run's first request to the URL; see :class:`RequestRetrier`.

        Raises:
            OutputError: the listing fails: no such bucket, no permission, no network.
        """

        def list_entries() -> dict[str, Any]:
            self._fs.invalidate_cache()
            listing: dict[str, Any] = self._fs.find(self._base, detail=True)
            return listing

        try:
            entries = self._make_retrier("", first=first)(list_entries)
        except FileNotFoundError:
            if self._s3 is not None:
                raise self._make_no_bucket_error() from None
            return {}
        files = {}
        for entry_path, info in entries.items():
            name = entry_path.strip("/")[len(self._base.strip("/")) + 1 :]
            if info.get("type") != "directory" and (name or info.get("size")):
                files[name] = _make_remote_file(info)
        if not has_reliable_listing(self._url):
            for name in files:
                files[name] = _make_remote_file(self._make_retrier(name)(partial(self._fetch_info, name)))
        return files

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is missing.

        Raises:
            OutputError: the file cannot be read.
        """
        try:
            return bytes(self._make_retrier(name)(lambda: self._fs.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bytes:
        """Write a small file unless it exists; return the content of the first writer.

        Raises:
            OutputError: the file cannot be written.
        """
        # Some stores ignore the condition of a conditional write, so check first.
        if (existing := self.read(name)) is not None:
            return existing
        try:
            with contextlib.suppress(FileExistsError):
                self._make_retrier(name)(lambda: self._create(name, data))
        except FileNotFoundError:
            raise self._make_no_bucket_error() from None
        return self.read(name) or b""

    def upload(self, local: Path, name: str) -> RemoteFile:
        """Upload a file, verify its content and return its entry in later listings.

        Files above 16 MiB are uploaded in parts, at most four of them in memory at a time.

        Raises:
            OutputError: the file cannot be written, or its content differs repeatedly.
        """
        for _ in range(_MAX_UPLOAD_ATTEMPTS):
            retrier = self._make_retrier(name)
            try:
                uploaded_file = self._upload_once(local, name, retrier)
            except FileNotFoundError:
                # Another process aborted the multipart upload. If the bucket is missing, the listing reports it.
                self.list_files()
                continue
            if uploaded_file is not None:
                return uploaded_file
        raise OutputError(
            f"{self.redacted_url}/{name} differed from the sent file in all {_MAX_UPLOAD_ATTEMPTS} uploads: its "
            "checksum is wrong. Check the network and proxies between this machine and the store, then give the same "
            "command again to resume."
        )

    def holds(self, local: Path, name: str, remote_file: RemoteFile) -> bool:
        """Return whether a listed file equals a local one, by size and checksum.

        If the service reports no checksum, the bytes are read back and compared.

        Raises:
            OutputError: one of the two files cannot be read.
        """
        with wrap_read_errors(local):
            size = local.stat().st_size
        if remote_file.size != size:
            return False
        try:
            if self._s3 is None:
                return self._has_same_checksum(local, name, self._make_retrier(name))
            expected, head_object = compute_object_checksums(local, size), self._s3.head_object
            if remote_file.mark.strip('"') == expected.etag:
                return True
            return confirms_content(self._make_retrier(name)(lambda: head_object(self._path(name))), expected) is True
        except FileNotFoundError:
            return False

    def delete(self, name: str) -> None:
        """Delete a file if it exists.

        Raises:
            OutputError: the file cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError):
            self._make_retrier(name)(lambda: self._fs.rm_file(self._path(name)))

    def end_uploads(self) -> None:
        """Abort unfinished multipart uploads of killed runs, whose parts cost money."""
        if self._s3 is not None:
            ends = self._s3.end_uploads
            # Without permission to list them, the bucket's lifecycle rules remove them.
            capture_fault(lambda: ends(self._base))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _make_retrier(self, name: str, *, first: bool = False) -> RequestRetrier:
        return RequestRetrier(f"{self._url}/{name}".rstrip("/"), self._ended, first=first)

    def _make_no_bucket_error(self) -> OutputError:
        return make_write_error(RemoteFault("missing", ""), self._url)

    def _upload_once(self, local: Path, name: str, retrier: RequestRetrier) -> RemoteFile | None:
        """Upload a file once; return None if its content differs afterwards."""
        path = self._path(name)
        if self._s3 is not None:
            response, expected = self._s3.put(local, path, retrier)
            is_confirmed = confirms_content(response, expected)
            if is_confirmed or (is_confirmed is None and self._has_same_bytes(local, name, retrier)):
                return RemoteFile(local.stat().st_size, str(response.get("ETag", "")))
            return None
        with wrap_read_errors(local):
            open_regular_file(local).close()
        try:
            retrier(lambda: self._fs.put_file(os.fspath(local), path, **self._options))
        except OutputError:
            # Some file systems leave a partial file when a connection breaks.
            capture_fault(lambda: self._fs.rm_file(path))
            raise
        if not self._has_same_checksum(local, name, retrier):
            return None
        return _make_remote_file(retrier(lambda: self._fetch_info(name)))

    def _has_same_checksum(self, local: Path, name: str, retrier: RequestRetrier) -> bool:
        """Return whether a remote file has the local checksum, or bytes if it has none."""
        info = retrier(lambda: self._fetch_info(name))
        with wrap_read_errors(local):
            size = local.stat().st_size
        if int(info.get("size") or 0) != size:
            return False
        if not (reported_md5 := info.get("md5Hash")):
            return self._has_same_bytes(local, name, retrier)
        digest = hashlib.md5(usedforsecurity=False)
        for part in plan_parts(size):
            digest.update(read_part(local, part))
        return digest.digest() == base64.b64decode(reported_md5)

    def _has_same_bytes(self, local: Path, name: str, retrier: RequestRetrier) -> bool:
        """Return whether a remote file has the bytes of a local one."""
        local_hash, remote_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
        with wrap_read_errors(local):
            size = local.stat().st_size
        for part in plan_parts(size):
            local_hash.update(read_part(local, part))
            remote_hash.update(retrier(partial(self._read_range, name, part)))
        return local_hash.digest() == remote_hash.digest()

    def _read_range(self, name: str, part: UploadPart) -> bytes:
        if part.start == part.stop:
            return b""
        data: bytes = self._fs.cat_file(self._path(name), start=part.start, end=part.stop)
        return data

    def _fetch_info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        info: dict[str, Any] = self._fs.info(self._path(name))
        return info

    def _create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            if self._s3 is not None:
                self._s3.create(path, data)
            else:
                self._fs.pipe_file(path, data, mode="create")
        except (OSError, TypeError, NotImplementedError) as error:
            if isinstance(error, OSError) and classify_error(error).status != _NOT_IMPLEMENTED:
                raise
            # Reading the file back shows the last writer.
            if self._fs.exists(path):
                raise FileExistsError from None
            self._fs.pipe_file(path, data)


def _make_remote_file(info: dict[str, Any]) -> RemoteFile:
    return RemoteFile(int(info.get("size") or 0), extract_version(info))
