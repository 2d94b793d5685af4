"""A file as an object store takes it: cut into parts, and the checksums that the store must find.

The size of a part follows from the size of the file alone, so that the checksums of a file here
can be compared with those of an object that was written by an earlier run, or on another machine.
"""

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchloom.core.errors import OutputError
from batchloom.core.files import describe_os_error, open_regular_file

# Held in memory for each part under way.
PART_BYTES = 16 << 20
_MAX_PARTS = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A stretch of a file; numbers begin at 1."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PartChecksums:
    """The MD5 and SHA-256 of a part's bytes."""

    md5: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ObjectChecksums:
    """What the store calls an object of this content.

    Attributes:
        etag: its ETag, without quotes, where the store does not encrypt with keys of its own.
        sha256: its checksum in base64; of several parts that of theirs, with their number.
    """

    etag: str
    sha256: str


def plan_parts(size: int, least: int = PART_BYTES) -> list[UploadPart]:
    """A file of ``size`` bytes in parts of one size, at most 10,000; a file without bytes is one."""
    step = max(least, -(-size // _MAX_PARTS // _MIB) * _MIB)
    starts = range(0, max(size, 1), step)
    return [UploadPart(number, start, min(start + step, size)) for number, start in enumerate(starts, start=1)]


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to give back what a job has written into one sentence.

    Raises:
        OutputError: in place of any OSError of the system raised inside.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {describe_os_error(error)}; then give the same command again: it goes on."
        ) from error


def read_part(path: Path, part: UploadPart) -> bytes:
    """The bytes of a part.

    Raises:
        OutputError: the file cannot be read, or is shorter than it was.
    """
    with wrap_read_errors(path), open_regular_file(path) as file:
        file.seek(part.start)
        data = file.read(part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise OSError("it became shorter while it was read")
    return data


def compute_part_checksums(data: bytes) -> PartChecksums:
    """The checksums of a part."""
    md5 = hashlib.md5(data, usedforsecurity=False)
    return PartChecksums(md5.digest(), hashlib.sha256(data).digest())


def combine_checksums(parts: Sequence[PartChecksums]) -> ObjectChecksums:
    """What an object of these parts is known by.

    Source: the S3 API, "Checking object integrity"; an object of one part is put as a whole.
    """
    if len(parts) == 1:
        return ObjectChecksums(parts[0].md5.hex(), encode_base64(parts[0].sha256))
    md5 = hashlib.md5(b"".join(part.md5 for part in parts), usedforsecurity=False)
    sha256 = hashlib.sha256(b"".join(part.sha256 for part in parts)).digest()
    return ObjectChecksums(f"{md5.hexdigest()}-{len(parts)}", f"{encode_base64(sha256)}-{len(parts)}")


def compute_object_checksums(path: Path, size: int) -> ObjectChecksums:
    """What the file at ``path`` would be known by.

    Raises:
        OutputError: it cannot be read.
    """
    return combine_checksums([compute_part_checksums(read_part(path, part)) for part in plan_parts(size)])


def confirms_content(response: Mapping[str, Any], expected: ObjectChecksums) -> bool | None:
    """Whether an answer of the store says that an object has this content; None where it does not say.

    A checksum that is given back is believed only where the ETag can be none: a store that
    merely keeps what it was told would prove nothing.
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
    """A digest as headers carry it."""
    return base64.b64encode(digest).decode()
