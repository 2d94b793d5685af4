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
from batchloom.core.files import because, open_regular

# Held in memory for each part under way.
PART_BYTES = 16 << 20
_MOST_PARTS = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file; numbers begin at 1."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sums:
    """The MD5 and SHA-256 of a part's bytes."""

    md5: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """What the store calls an object of this content.

    Attributes:
        etag: its ETag, without quotes, where the store does not encrypt with keys of its own.
        sha256: its checksum in base64; of several parts that of theirs, with their number.
    """

    etag: str
    sha256: str


def parts_of(size: int, least: int = PART_BYTES) -> list[Part]:
    """A file of ``size`` bytes in parts of one size, at most 10,000; a file without bytes is one."""
    step = max(least, -(-size // _MOST_PARTS // _MIB) * _MIB)
    starts = range(0, max(size, 1), step)
    return [
        Part(number, start, min(start + step, size)) for number, start in enumerate(starts, start=1)
    ]


@contextlib.contextmanager
def reading_back(path: Path) -> Iterator[None]:
    """Turn the system's refusal to give back what a job has written into one sentence.

    Raises:
        OutputError: in place of any OSError of the system raised inside.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {because(error)}; then give the same command again: it goes on."
        ) from error


def read_part(path: Path, part: Part) -> bytes:
    """The bytes of a part.

    Raises:
        OutputError: the file cannot be read, or is shorter than it was.
    """
    with reading_back(path), open_regular(path) as file:
        file.seek(part.start)
        data = file.read(part.stop - part.start)
        if len(data) != part.stop - part.start:
            raise OSError("it became shorter while it was read")
    return data


def sums_of(data: bytes) -> Sums:
    """The checksums of a part."""
    md5 = hashlib.md5(data, usedforsecurity=False)
    return Sums(md5.digest(), hashlib.sha256(data).digest())


def known_by(parts: Sequence[Sums]) -> Known:
    """What an object of these parts is known by.

    Source: the S3 API, "Checking object integrity"; an object of one part is put as a whole.
    """
    if len(parts) == 1:
        return Known(parts[0].md5.hex(), in_base64(parts[0].sha256))
    md5 = hashlib.md5(b"".join(one.md5 for one in parts), usedforsecurity=False)
    sha256 = hashlib.sha256(b"".join(one.sha256 for one in parts)).digest()
    return Known(f"{md5.hexdigest()}-{len(parts)}", f"{in_base64(sha256)}-{len(parts)}")


def known_file(path: Path, size: int) -> Known:
    """What the file at ``path`` would be known by.

    Raises:
        OutputError: it cannot be read.
    """
    return known_by([sums_of(read_part(path, part)) for part in parts_of(size)])


def proven(answer: Mapping[str, Any], known: Known) -> bool | None:
    """Whether an answer of the store says that an object has this content; None where it does not say.

    A checksum that is given back is believed only where the ETag can be none: a store that
    merely keeps what it was told would prove nothing.
    """
    if str(answer.get("ETag", "")).strip('"') == known.etag:
        return True
    found = answer.get("ChecksumSHA256")
    if found is not None and found != known.sha256:
        return False
    own_keys = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms")
    if found is not None and (own_keys or answer.get("SSECustomerAlgorithm")):
        return True
    return None


def in_base64(digest: bytes) -> str:
    """A digest as headers carry it."""
    return base64.b64encode(digest).decode()
