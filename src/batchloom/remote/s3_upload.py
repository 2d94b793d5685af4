"""Files into S3, and into what speaks its language: large ones in parts, and no parts left behind."""

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
    """The objects of a bucket, as they are written.

    Args:
        fs: the file system of s3fs.
        bodies: the threads that hold the bodies of requests, so that there are never more of them.
    """

    def __init__(self, fs: Any, bodies: ThreadPoolExecutor) -> None:
        self._fs, self._bodies = fs, bodies

    def put(
        self, local: Path, path: str, ask: RequestRetrier
    ) -> tuple[S3Response, ObjectChecksums]:
        """Write a file as the object at ``path``; the store's last answer, and what it must say.

        Raises:
            FileNotFoundError: there is no such bucket, or somebody ended the upload.
            OutputError: it cannot be written, or the file cannot be read.
        """
        bucket, key, _ = self._fs.split_path(path)
        place = {"Bucket": bucket, "Key": key}
        with wrap_read_errors(local):
            parts = plan_parts(local.stat().st_size)
        if len(parts) > 1:
            return self._put_parts(local, place, parts, ask)
        job = self._bodies.submit(self._put_body, "put_object", local, parts[0], place, ask)
        answer, sums = job.result()
        return answer, combine_checksums([sums])

    def look(self, path: str) -> S3Response:
        """What the store says of an object, its checksums too."""
        bucket, key, _ = self._fs.split_path(path)
        return self._look({"Bucket": bucket, "Key": key})

    def create(self, path: str, data: bytes) -> None:
        """Write an object where there is none; raises FileExistsError, or what its library raises, where there is."""
        bucket, key, _ = self._fs.split_path(path)
        place = {"Bucket": bucket, "Key": key}
        self._call("put_object", {**place, "Body": data, "IfNoneMatch": "*"})

    def end_uploads(self, path: str) -> int:
        """End the uploads below ``path`` that killed runs left, whose parts cost money; how many there were."""
        bucket, key, _ = self._fs.split_path(path)
        marks: dict[str, Any] = {}
        ended = 0
        while True:
            wanted = {"Bucket": bucket, "Prefix": f"{key}/".lstrip("/"), **marks}
            found = self._call("list_multipart_uploads", wanted)
            for upload in found.get("Uploads", []):
                self._end({"Bucket": bucket, "Key": upload["Key"]}, upload["UploadId"])
                ended += 1
            if not found.get("IsTruncated"):
                return ended
            marks = {
                "KeyMarker": found["NextKeyMarker"],
                "UploadIdMarker": found["NextUploadIdMarker"],
            }

    def _put_parts(
        self, local: Path, place: dict[str, Any], parts: list[UploadPart], ask: RequestRetrier
    ) -> tuple[S3Response, ObjectChecksums]:
        wanted = {**place, "ChecksumAlgorithm": "SHA256"} if self._sends_checksums else place
        upload = ask(lambda: self._call("create_multipart_upload", wanted))["UploadId"]
        whole = {**place, "UploadId": upload}
        jobs: list[Future[tuple[S3Response, PartChecksums]]] = []
        try:
            for part in parts:
                numbered = {**whole, "PartNumber": part.number}
                jobs.append(
                    self._bodies.submit(self._put_body, "upload_part", local, part, numbered, ask)
                )
            done = [job.result() for job in jobs]
            known = combine_checksums([sums for _, sums in done])
            return self._complete(whole, parts, done, known, ask), known
        except BaseException:
            ask.give_up()
            for job in jobs:
                job.cancel()
            # A part that arrives after its upload was ended would stay.
            wait(jobs)
            self._abort_with_retries(place, upload)
            raise

    def _put_body(
        self, method: str, local: Path, part: UploadPart, place: dict[str, Any], ask: RequestRetrier
    ) -> tuple[S3Response, PartChecksums]:
        data = read_part(local, part)
        sums = compute_part_checksums(data)
        sent = {"ChecksumSHA256": encode_base64(sums.sha256)} if self._sends_checksums else {}
        return ask(lambda: self._call(method, {**place, "Body": data, **sent})), sums

    def _complete(
        self,
        whole: dict[str, Any],
        parts: list[UploadPart],
        done: list[tuple[S3Response, PartChecksums]],
        known: ObjectChecksums,
        ask: RequestRetrier,
    ) -> S3Response:
        listed = []
        for part, (answer, sums) in zip(parts, done, strict=True):
            one = {"PartNumber": part.number, "ETag": answer["ETag"]}
            if self._sends_checksums:
                one["ChecksumSHA256"] = encode_base64(sums.sha256)
            listed.append(one)
        place = {name: whole[name] for name in ("Bucket", "Key")}
        tried = False

        def complete() -> S3Response:
            nonlocal tried
            # The answer to an earlier try may have been lost on its way.
            if tried:
                found = capture_fault(lambda: self._look(place))
                if not isinstance(found, RemoteFault) and confirms_content(found, known):
                    return found
            tried = True
            made = {**whole, "MultipartUpload": {"Parts": listed}}
            return self._call("complete_multipart_upload", made)

        return ask(complete)

    def _look(self, place: dict[str, Any]) -> S3Response:
        return self._call("head_object", {**place, "ChecksumMode": "ENABLED"})

    def _end(self, place: dict[str, Any], upload: str) -> None:
        self._call("abort_multipart_upload", {**place, "UploadId": upload})

    def _abort_with_retries(self, place: dict[str, Any], upload: str) -> None:
        """End an upload that failed, whatever the fault; what fails here too is ended by the next run."""
        for tries in range(1, MAX_FIRST_ATTEMPTS + 1):
            done = capture_fault(lambda: self._end(place, upload))
            if not isinstance(done, RemoteFault) or done.what not in ("passing", "unreachable"):
                return
            if tries < MAX_FIRST_ATTEMPTS:
                time.sleep(compute_jittered_backoff(tries, upload))

    @cached_property
    def _sends_checksums(self) -> bool:
        """Whether checksums are asked for: AWS_REQUEST_CHECKSUM_CALCULATION=when_required says no, for older stores."""
        config = self._fs.s3.meta.config
        return getattr(config, "request_checksum_calculation", "") != "when_required"

    def _call(self, method: str, words: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._fs.call_s3(method, words)
        return found
