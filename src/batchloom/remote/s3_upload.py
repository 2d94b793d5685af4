"""Uploads to S3 and compatible stores: large files in parts, no orphaned parts."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any, final

from batchloom.remote.client import capture_fault
from batchloom.remote.multipart import (
    ObjectChecksums,
    PartChecksums,
    UploadPart,
    combine_checksums,
    compute_part_checksums,
    confirms_content,
    encode_base64,
    plan_parts,
    read_part,
    wrap_read_errors,
)
from batchloom.remote.remote_errors import RemoteFault
from batchloom.remote.upload_retry import (
    MAX_FIRST_ATTEMPTS,
    RequestRetrier,
    compute_jittered_backoff,
)

S3Response = Mapping[str, Any]


@final
class S3ObjectWriter:
    """Writer of objects to S3.

    Args:
        fs: s3fs file system.
        bodies: thread pool for request bodies, which bounds their number in memory.
    """

    def __init__(self, fs: Any, bodies: ThreadPoolExecutor) -> None:
        self._fs, self._bodies = fs, bodies

    def put(self, local: Path, path: str, retrier: RequestRetrier) -> tuple[S3Response, ObjectChecksums]:
        """Upload a file to ``path``; return the last response and the expected checksums.

        Raises:
            FileNotFoundError: the bucket does not exist, or the upload was aborted.
            OutputError: the object cannot be written, or the file cannot be read.
        """
        bucket, key, _ = self._fs.split_path(path)
        location = {"Bucket": bucket, "Key": key}
        with wrap_read_errors(local):
            parts = plan_parts(local.stat().st_size)
        if len(parts) > 1:
            return self._put_parts(local, location, parts, retrier)
        job = self._bodies.submit(self._put_body, "put_object", local, parts[0], location, retrier)
        response, checksums = job.result()
        return response, combine_checksums([checksums])

    def head_object(self, path: str) -> S3Response:
        """Return the store's metadata of an object, with its checksums."""
        bucket, key, _ = self._fs.split_path(path)
        return self._head_object({"Bucket": bucket, "Key": key})

    def create(self, path: str, data: bytes) -> None:
        """Write an object if none exists.

        If one exists, raise FileExistsError or the error of the library.
        """
        bucket, key, _ = self._fs.split_path(path)
        location = {"Bucket": bucket, "Key": key}
        self._call("put_object", {**location, "Body": data, "IfNoneMatch": "*"})

    def end_uploads(self, path: str) -> int:
        """Abort the uploads of killed runs below ``path`` and return their number."""
        bucket, key, _ = self._fs.split_path(path)
        markers: dict[str, Any] = {}
        ended_count = 0
        while True:
            request = {"Bucket": bucket, "Prefix": f"{key}/".lstrip("/"), **markers}
            response = self._call("list_multipart_uploads", request)
            for upload in response.get("Uploads", []):
                self._abort_upload({"Bucket": bucket, "Key": upload["Key"]}, upload["UploadId"])
                ended_count += 1
            if not response.get("IsTruncated"):
                return ended_count
            markers = {
                "KeyMarker": response["NextKeyMarker"],
                "UploadIdMarker": response["NextUploadIdMarker"],
            }

    def _put_parts(
        self, local: Path, location: dict[str, Any], parts: list[UploadPart], retrier: RequestRetrier
    ) -> tuple[S3Response, ObjectChecksums]:
        request = {**location, "ChecksumAlgorithm": "SHA256"} if self._sends_checksums else location
        upload_id = retrier(lambda: self._call("create_multipart_upload", request))["UploadId"]
        upload_location = {**location, "UploadId": upload_id}
        jobs: list[Future[tuple[S3Response, PartChecksums]]] = []
        try:
            for part in parts:
                part_location = {**upload_location, "PartNumber": part.number}
                jobs.append(self._bodies.submit(self._put_body, "upload_part", local, part, part_location, retrier))
            results = [job.result() for job in jobs]
            expected = combine_checksums([checksums for _, checksums in results])
            return self._complete(upload_location, parts, results, expected, retrier), expected
        except BaseException:
            retrier.give_up()
            for job in jobs:
                job.cancel()
            # A part that arrives after the abort would be orphaned.
            wait(jobs)
            self._abort_with_retries(location, upload_id)
            raise

    def _put_body(
        self, method: str, local: Path, part: UploadPart, location: dict[str, Any], retrier: RequestRetrier
    ) -> tuple[S3Response, PartChecksums]:
        data = read_part(local, part)
        checksums = compute_part_checksums(data)
        checksum_arguments = {"ChecksumSHA256": encode_base64(checksums.sha256)} if self._sends_checksums else {}
        return retrier(lambda: self._call(method, {**location, "Body": data, **checksum_arguments})), checksums

    def _complete(
        self,
        upload_location: dict[str, Any],
        parts: list[UploadPart],
        results: list[tuple[S3Response, PartChecksums]],
        expected: ObjectChecksums,
        retrier: RequestRetrier,
    ) -> S3Response:
        part_entries = []
        for part, (response, checksums) in zip(parts, results, strict=True):
            part_entry = {"PartNumber": part.number, "ETag": response["ETag"]}
            if self._sends_checksums:
                part_entry["ChecksumSHA256"] = encode_base64(checksums.sha256)
            part_entries.append(part_entry)
        location = {name: upload_location[name] for name in ("Bucket", "Key")}
        tried = False

        def complete() -> S3Response:
            nonlocal tried
            # The response to an earlier try may be lost although the upload completed.
            if tried:
                existing_object = capture_fault(lambda: self._head_object(location))
                if not isinstance(existing_object, RemoteFault) and confirms_content(existing_object, expected):
                    return existing_object
            tried = True
            request = {**upload_location, "MultipartUpload": {"Parts": part_entries}}
            return self._call("complete_multipart_upload", request)

        return retrier(complete)

    def _head_object(self, location: dict[str, Any]) -> S3Response:
        return self._call("head_object", {**location, "ChecksumMode": "ENABLED"})

    def _abort_upload(self, location: dict[str, Any], upload_id: str) -> None:
        self._call("abort_multipart_upload", {**location, "UploadId": upload_id})

    def _abort_with_retries(self, location: dict[str, Any], upload_id: str) -> None:
        """Abort a failed upload; if that fails too, the next run aborts it."""
        for tries in range(1, MAX_FIRST_ATTEMPTS + 1):
            result = capture_fault(lambda: self._abort_upload(location, upload_id))
            if not isinstance(result, RemoteFault) or result.kind not in ("passing", "unreachable"):
                return
            if tries < MAX_FIRST_ATTEMPTS:
                time.sleep(compute_jittered_backoff(tries, upload_id))

    @cached_property
    def _sends_checksums(self) -> bool:
        """Checksum setting; AWS_REQUEST_CHECKSUM_CALCULATION=when_required turns it off."""
        config = self._fs.s3.meta.config
        return getattr(config, "request_checksum_calculation", "") != "when_required"

    def _call(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        response: dict[str, Any] = self._fs.call_s3(method, arguments)
        return response
