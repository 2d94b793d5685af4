"""A folder behind a URL, into which a job writes: ``s3://bucket/prefix``, and what else fsspec knows.

Every object is whole or not there, its checksum is compared with the file's, and what fails is
tried again. What lies there is known by its size and by what its service calls its version.
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

# Bodies of requests in memory at the same time; each is a part of a file.
_MAX_BODIES = 4
# An object that is not what was sent is sent again so often.
_MAX_UPLOAD_ATTEMPTS = 3
_S3_SCHEMES, _GCS_SCHEMES = ("s3", "s3a"), ("gs", "gcs")
# These give files and take none, or not one by one.
_READ_ONLY_SCHEMES = ("http", "https", "hf")
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What lies under a name: its bytes, and what its service calls this version of it (its ETag, say)."""

    size: int
    mark: str


@final
class RemoteFolder:
    """A folder behind a URL; use as a context manager. Its methods may be called from several threads.

    Args:
        url: ``scheme://bucket/prefix``; credentials are those that its library finds.

    Attributes:
        redacted_url: the URL without what may be secret.

    Raises:
        InputError: nothing can be written there, or the address is none.
        MissingDependencyError: no library for such URLs is installed.
    """

    def __init__(self, url: str) -> None:
        scheme = get_scheme(url)
        if scheme in _READ_ONLY_SCHEMES:
            raise InputError(
                f"The output is a URL ({scheme}://...) where no files can be put, and must be a path of this machine "
                "or of an object store (s3://bucket/prefix)."
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
        """Try nothing again from now on; what is under way ends, with an error where it fails."""
        self._ended.set()

    def list_files(self, *, first: bool = False) -> dict[str, RemoteFile]:
        """All files of the folder by their names in it, in one listing; empty where there is none.

        Args:
            first: whether this is the job's first word there; see :class:`RequestRetrier`.

        Raises:
            OutputError: it cannot be listed: no such bucket, no permission, no network.
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
        """The content of a small file; None where there is none.

        Raises:
            OutputError: it cannot be read.
        """
        try:
            return bytes(self._make_retrier(name)(lambda: self._fs.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bytes:
        """Write a small file where there is none; what lies there afterwards, of whoever came first.

        Raises:
            OutputError: it cannot be written.
        """
        # Not every store heeds the condition under which it is written.
        if (existing := self.read(name)) is not None:
            return existing
        try:
            with contextlib.suppress(FileExistsError):
                self._make_retrier(name)(lambda: self._create(name, data))
        except FileNotFoundError:
            raise self._make_no_bucket_error() from None
        return self.read(name) or b""

    def upload(self, local: Path, name: str) -> RemoteFile:
        """Write a file, and compare what arrived with it; what is listed of it from now on.

        Files above 16 MiB go in parts, at most four of them in memory at the same time.

        Raises:
            OutputError: it cannot be written, or arrives as something else again and again.
        """
        for _ in range(_MAX_UPLOAD_ATTEMPTS):
            retrier = self._make_retrier(name)
            try:
                uploaded_file = self._upload_once(local, name, retrier)
            except FileNotFoundError:
                # Somebody ended the upload in parts; where the bucket is gone, that is told here.
                self.list_files()
                continue
            if uploaded_file is not None:
                return uploaded_file
        raise OutputError(
            f"{self.redacted_url}/{name} is not what was sent, {_MAX_UPLOAD_ATTEMPTS} times over: its checksum is "
            "another "
            f"one. Look at "
            "what lies between this machine and the store, then give the same command again: it goes on."
        )

    def holds(self, local: Path, name: str, remote_file: RemoteFile) -> bool:
        """Whether what was listed under a name is this file, by its size and its checksum.

        Where the service tells no checksum, its bytes are read back and compared.

        Raises:
            OutputError: one of the two cannot be read.
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
        """Delete a file, if it is there.

        Raises:
            OutputError: it cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError):
            self._make_retrier(name)(lambda: self._fs.rm_file(self._path(name)))

    def end_uploads(self) -> None:
        """End what killed runs left unfinished below the folder, where the service tells; its parts cost money."""
        if self._s3 is not None:
            ends = self._s3.end_uploads
            # Who may not list them leaves them to the bucket's own rules.
            capture_fault(lambda: ends(self._base))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _make_retrier(self, name: str, *, first: bool = False) -> RequestRetrier:
        return RequestRetrier(f"{self._url}/{name}".rstrip("/"), self._ended, first=first)

    def _make_no_bucket_error(self) -> OutputError:
        return make_write_error(RemoteFault("missing", ""), self._url)

    def _upload_once(self, local: Path, name: str, retrier: RequestRetrier) -> RemoteFile | None:
        """Write a file once; None where something else arrived."""
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
            # Some file systems keep what they had when a connection broke.
            capture_fault(lambda: self._fs.rm_file(path))
            raise
        if not self._has_same_checksum(local, name, retrier):
            return None
        return _make_remote_file(retrier(lambda: self._fetch_info(name)))

    def _has_same_checksum(self, local: Path, name: str, retrier: RequestRetrier) -> bool:
        """Whether a file lies under a name, by what its service says of it or, where that says little, its bytes."""
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
        """Whether the bytes under a name are those of a file."""
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
            # Whoever reads it back sees who came last.
            if self._fs.exists(path):
                raise FileExistsError from None
            self._fs.pipe_file(path, data)


def _make_remote_file(info: dict[str, Any]) -> RemoteFile:
    return RemoteFile(int(info.get("size") or 0), extract_version(info))
