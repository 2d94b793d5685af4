"""Output folder behind a URL: ``s3://bucket/prefix``, or others that fsspec knows.

Every object is complete or missing, its checksum is compared with the file's, and failed requests are
retried. A listed file is identified by its size and its version in the service.
"""

import base64
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, final

import xxhash

from batchloom.core.addresses import check_url, get_scheme, has_wildcard, redact_url
from batchloom.core.errors import InputError, OutputError
from batchloom.core.files import describe_os_error, open_regular_file
from batchloom.remote.client import (
    capture_fault,
    compute_jittered_backoff,
    extract_version,
    has_reliable_listing,
    open_filesystem,
)
from batchloom.remote.remote_errors import RemoteFault, classify_error, make_write_error

T = TypeVar("T")
S3Response = dict[str, Any]

# Maximum number of tries of one request, and seconds after which it is not retried.
MAX_REQUEST_ATTEMPTS, MAX_RETRY_SECONDS = 8, 300.0
# A person waits for the first request of a run, so it is retried less often.
MAX_FIRST_ATTEMPTS = 4
# Message in threads whose result is no longer read.
_STOPPED = "Stopped."
# Maximum number of request bodies in memory; each is a part of a file.
_MAX_BODIES = 4
# Number of uploads of an object whose content differs from what was sent.
_MAX_UPLOAD_ATTEMPTS = 3
_S3_SCHEMES, _GCS_SCHEMES = ("s3", "s3a"), ("gs", "gcs")
# These schemes cannot be written to, or not file by file.
_READ_ONLY_SCHEMES = ("http", "https", "hf")
_NOT_IMPLEMENTED = 501
# Each part in flight takes this many bytes of memory.
PART_BYTES = 16 << 20
_MAX_PARTS = 10_000
_MIB = 1 << 20


class UploadPart(NamedTuple):
    """Byte range of a file; numbers begin at 1."""

    number: int
    start: int
    stop: int


class PartChecksums(NamedTuple):
    """MD5 and SHA-256 of a part's bytes."""

    md5: bytes
    sha256: bytes


class ObjectChecksums(NamedTuple):
    """ETag without quotes and base64 SHA-256 that the store reports for an object.

    The ETag is valid unless the store encrypts with its own keys.
    """

    etag: str
    sha256: str


def plan_parts(size: int, least: int = PART_BYTES) -> list[UploadPart]:
    """Split ``size`` bytes into at most 10,000 equal parts; an empty file is one part."""
    step = max(least, -(-size // _MAX_PARTS // _MIB) * _MIB)
    starts = range(0, max(size, 1), step)
    return [UploadPart(number, start, min(start + step, size)) for number, start in enumerate(starts, start=1)]


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Turn an error while reading a local file back into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {describe_os_error(error)}; then give the same command again to resume."
        ) from error


def read_part(path: Path, part: UploadPart) -> bytes:
    with wrap_read_errors(path), open_regular_file(path) as file:
        file.seek(part.start)
        data = file.read(part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise OSError("it became shorter while it was read")
    return data


def compute_part_checksums(data: bytes) -> PartChecksums:
    md5 = hashlib.md5(data, usedforsecurity=False)
    return PartChecksums(md5.digest(), hashlib.sha256(data).digest())


def combine_checksums(parts: Sequence[PartChecksums]) -> ObjectChecksums:
    """Return the checksums of an object of these parts.

    Source: the S3 API, "Checking object integrity"; an object of one part is uploaded in one request.
    """
    if len(parts) == 1:
        return ObjectChecksums(parts[0].md5.hex(), encode_base64(parts[0].sha256))
    md5 = hashlib.md5(b"".join(part.md5 for part in parts), usedforsecurity=False)
    sha256 = hashlib.sha256(b"".join(part.sha256 for part in parts)).digest()
    return ObjectChecksums(f"{md5.hexdigest()}-{len(parts)}", f"{encode_base64(sha256)}-{len(parts)}")


def compute_object_checksums(path: Path, size: int) -> ObjectChecksums:
    """Return the checksums that the file at ``path`` would have as an object."""
    return combine_checksums([compute_part_checksums(read_part(path, part)) for part in plan_parts(size)])


def confirms_content(response: Mapping[str, Any], expected: ObjectChecksums) -> bool | None:
    """Return whether a response confirms the content; None if it does not show it.

    A returned SHA-256 counts only where encryption makes the ETag useless. A store that
    merely repeats the checksum it received would prove nothing.
    """
    if str(response.get("ETag", "")).strip('"') == expected.etag:
        return True
    reported_sha256 = response.get("ChecksumSHA256")
    if reported_sha256 is not None and reported_sha256 != expected.sha256:
        return False
    own_keys = str(response.get("ServerSideEncryption", "")).startswith("aws:kms")
    if reported_sha256 is not None and (own_keys or response.get("SSECustomerAlgorithm")):
        return True
    return None


def encode_base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@final
class RequestRetrier:
    """Retry policy of the requests to one URL.

    No request or wait starts after ``ended`` is set. An unreachable address fails at once if this is the run's
    ``first`` request.
    """

    def __init__(self, url: str, ended: threading.Event, *, first: bool = False) -> None:
        self._url, self._ended, self._first = url, ended, first
        self._given_up = threading.Event()

    def __call__(self, work: Callable[[], T]) -> T:
        """Run ``work`` and retry it after transient faults.

        A missing object is a FileNotFoundError, an existing one to create a FileExistsError, other faults an
        OutputError.
        """
        start_time = time.monotonic()
        max_attempts = MAX_FIRST_ATTEMPTS if self._first else MAX_REQUEST_ATTEMPTS
        tries = 0
        while True:
            if self._ended.is_set():
                raise OutputError(_STOPPED)
            result = capture_fault(work)
            if not isinstance(result, RemoteFault):
                return result
            tries += 1
            if result.kind == "missing":
                raise FileNotFoundError
            if result.kind == "exists":
                raise FileExistsError
            is_transient = result.kind == "passing" or (result.kind == "unreachable" and not self._first)
            is_exhausted = tries == max_attempts or time.monotonic() - start_time > MAX_RETRY_SECONDS
            if not is_transient or is_exhausted or self._given_up.is_set():
                raise make_write_error(result, self._url, tries)
            self._ended.wait(compute_jittered_backoff(tries, self._url))

    def give_up(self) -> None:
        """Stop all retries."""
        self._given_up.set()


@final
class S3ObjectWriter:
    """Writer of objects to S3; the thread pool bounds the request bodies in memory."""

    def __init__(self, fs: Any, bodies: ThreadPoolExecutor) -> None:
        self._fs, self._bodies = fs, bodies

    def put(self, local: Path, path: str, retrier: RequestRetrier) -> tuple[S3Response, ObjectChecksums]:
        """Upload a file to ``path``; return the last response and the expected checksums."""
        with wrap_read_errors(local):
            parts = plan_parts(local.stat().st_size)
        if len(parts) > 1:
            return self._put_parts(local, path, parts, retrier)
        job = self._bodies.submit(self._put_body, "put_object", local, parts[0], self._locate(path), retrier)
        response, checksums = job.result()
        return response, combine_checksums([checksums])

    def head_object(self, path: str) -> S3Response:
        """Return the store's metadata of an object, with its checksums."""
        response: S3Response = self._fs.call_s3("head_object", {**self._locate(path), "ChecksumMode": "ENABLED"})
        return response

    def create(self, path: str, data: bytes) -> None:
        """Write an object if none exists, else raise an error."""
        self._fs.call_s3("put_object", {**self._locate(path), "Body": data, "IfNoneMatch": "*"})

    def end_uploads(self, path: str) -> None:
        """Abort the uploads of killed runs below ``path``."""
        location = self._locate(path)
        request = {"Bucket": location["Bucket"], "Prefix": f"{location['Key']}/".lstrip("/")}
        while True:
            response = self._fs.call_s3("list_multipart_uploads", request)
            for upload in response.get("Uploads", []):
                self._abort_upload({**location, "Key": upload["Key"], "UploadId": upload["UploadId"]})
            if not response.get("IsTruncated"):
                return
            request["KeyMarker"], request["UploadIdMarker"] = response["NextKeyMarker"], response["NextUploadIdMarker"]

    def _locate(self, path: str) -> dict[str, Any]:
        bucket, key, _ = self._fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def _put_parts(
        self, local: Path, path: str, parts: list[UploadPart], retrier: RequestRetrier
    ) -> tuple[S3Response, ObjectChecksums]:
        request = {**self._locate(path), **({"ChecksumAlgorithm": "SHA256"} if self._sends_checksums else {})}
        upload_id = retrier(lambda: self._fs.call_s3("create_multipart_upload", request))["UploadId"]
        location = {**self._locate(path), "UploadId": upload_id}
        jobs: list[Future[tuple[S3Response, PartChecksums]]] = []
        try:
            for part in parts:
                part_location = {**location, "PartNumber": part.number}
                jobs.append(self._bodies.submit(self._put_body, "upload_part", local, part, part_location, retrier))
            results = [job.result() for job in jobs]
            expected = combine_checksums([checksums for _, checksums in results])
            part_entries = [
                {"PartNumber": part.number, "ETag": response["ETag"], **self._list_checksum_arguments(checksums)}
                for part, (response, checksums) in zip(parts, results, strict=True)
            ]
            return self._complete(path, {**location, "MultipartUpload": {"Parts": part_entries}}, expected, retrier)
        except BaseException:
            retrier.give_up()
            for job in jobs:
                job.cancel()
            # A part that arrives after the abort would be orphaned.
            wait(jobs)
            # If this fails, too, the next run aborts the upload.
            capture_fault(lambda: self._abort_upload(location))
            raise

    def _put_body(
        self, method: str, local: Path, part: UploadPart, location: dict[str, Any], retrier: RequestRetrier
    ) -> tuple[S3Response, PartChecksums]:
        data = read_part(local, part)
        checksums = compute_part_checksums(data)
        request = {**location, "Body": data, **self._list_checksum_arguments(checksums)}
        return retrier(lambda: self._fs.call_s3(method, request)), checksums

    def _complete(
        self, path: str, request: dict[str, Any], expected: ObjectChecksums, retrier: RequestRetrier
    ) -> tuple[S3Response, ObjectChecksums]:
        tried = False

        def complete() -> S3Response:
            nonlocal tried
            # The response to an earlier try may be lost although the upload completed.
            if tried:
                existing_object = capture_fault(lambda: self.head_object(path))
                if not isinstance(existing_object, RemoteFault) and confirms_content(existing_object, expected):
                    return existing_object
            tried = True
            response: S3Response = self._fs.call_s3("complete_multipart_upload", request)
            return response

        return retrier(complete), expected

    def _abort_upload(self, location: dict[str, Any]) -> None:
        self._fs.call_s3("abort_multipart_upload", location)

    def _list_checksum_arguments(self, checksums: PartChecksums) -> dict[str, str]:
        return {"ChecksumSHA256": encode_base64(checksums.sha256)} if self._sends_checksums else {}

    @cached_property
    def _sends_checksums(self) -> bool:
        """True unless AWS_REQUEST_CHECKSUM_CALCULATION=when_required is set."""
        config = self._fs.s3.meta.config
        return getattr(config, "request_checksum_calculation", "") != "when_required"


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
                raise make_write_error(RemoteFault("missing", ""), self._url) from None
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
            raise make_write_error(RemoteFault("missing", ""), self._url) from None
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
        is_empty = part.start == part.stop
        return b"" if is_empty else bytes(self._fs.cat_file(self._path(name), start=part.start, end=part.stop))

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
