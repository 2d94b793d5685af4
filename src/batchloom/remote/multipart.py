"""Parts and checksums of a multipart upload.

The size of a part depends on the size of the file alone. So the checksums of a local file
can be compared with those of an object from an earlier run or another machine.
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

# Each part in flight takes this many bytes of memory.
PART_BYTES = 16 << 20
_MAX_PARTS = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Byte range of a file; numbers begin at 1."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PartChecksums:
    """MD5 and SHA-256 of a part's bytes."""

    md5: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ObjectChecksums:
    """Checksums that the store reports for an object of this content.

    Attributes:
        etag: ETag without quotes, valid unless the store encrypts with its own keys.
        sha256: SHA-256 in base64; for several parts that of their checksums, followed by their number.
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
    """Turn an error while reading a local file back into an OutputError.

    Raises:
        OutputError: instead of any OSError raised inside.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {describe_os_error(error)}; then give the same command again to resume."
        ) from error


def read_part(path: Path, part: UploadPart) -> bytes:
    """Return the bytes of a part.

    Raises:
        OutputError: the file cannot be read, or became shorter.
    """
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
    """Return the checksums that the file at ``path`` would have as an object.

    Raises:
        OutputError: the file cannot be read.
    """
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
    """Encode a digest in base64 for a header."""
    return base64.b64encode(digest).decode()
