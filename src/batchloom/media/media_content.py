"""Bytes of media, their size limits, and a hash of their first and last bytes."""

import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, final

import xxhash

from batchloom.core.errors import UnusableRecordError
from batchloom.core.files import RangeFile, open_regular_file
from batchloom.core.settings import Setting, find_problems, is_positive_number, raise_problems

# Headers are at the beginning of a file, end markers at its end.
EDGE_BYTES = 1 << 16
_MAX_VALUE = 10**12
# Streams are written before their length is known.
_UNKNOWN_LENGTH = 0xFFFFFFFF - (1 << 16)
_LimitSetting = partial(Setting, has_option=False, omit_default=True)


class MediaContent(Protocol):
    """Bytes that are read in ranges."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``, fewer at the end; may raise OSError."""
        ...


@final
class BytesContent:
    """Bytes in memory."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, start: int, stop: int) -> bytes:
        """See :class:`MediaContent`."""
        return self._data if start <= 0 and stop >= self.size else self._data[start:stop]

    def file(self) -> io.BytesIO:
        """Return the bytes as an open file, without a copy."""
        return io.BytesIO(self._data)


@final
class FileContent:
    """A local regular file or a byte range of one; use as a context manager.

    Args:
        path: path of the file.
        byte_range: offset and length of the range; None for the complete file.

    Raises:
        OSError: the file cannot be opened, or is a pipe or a device.
        EOFError: the file ends before the range does.
    """

    __slots__ = ("_file", "_start", "size")

    def __init__(self, path: Path, byte_range: tuple[int, int] | None = None) -> None:
        self._file = open_regular_file(path)
        file_size = os.fstat(self._file.fileno()).st_size
        self._start, self.size = byte_range or (0, file_size)
        if self._start + self.size > file_size:
            self._file.close()
            raise EOFError

    def __enter__(self) -> "FileContent":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> bytes:
        """See :class:`MediaContent`."""
        self._file.seek(self._start + start)
        return self._file.read(max(0, min(stop, self.size) - start))


def open_content(content: MediaContent) -> io.BufferedReader | io.BytesIO:
    if isinstance(content, BytesContent):
        return content.file()
    return io.BufferedReader(RangeFile(content.size, content.read), EDGE_BYTES)


def read_edges(content: MediaContent) -> tuple[bytes, bytes]:
    """Return the first and the last 64 KiB; shorter contents are returned twice."""
    head = content.read(0, EDGE_BYTES)
    if content.size <= EDGE_BYTES:
        return head, head
    return head, content.read(content.size - EDGE_BYTES, content.size)


def check_declared_size(declared_size: int, size: int) -> None:
    """Raise if a file is shorter than its header says: libraries read what remains."""
    if size < declared_size < _UNKNOWN_LENGTH:
        raise UnusableRecordError(
            f"has {size:,} bytes, where its header says {declared_size:,}: it is cut short; fetch it again"
        )


def hash_edges(size: int, head: bytes, tail: bytes) -> bytes:
    """Return the 16-byte identity of a medium.

    It is XXH3-128 of the size (u64) and of the first and last 64 KiB.

    Args:
        size: size of the medium in bytes.
        head: first bytes from :func:`read_edges`.
        tail: last bytes from :func:`read_edges`.
    """
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    digest.update(head)
    if size > EDGE_BYTES:
        digest.update(tail[-min(len(tail), size - EDGE_BYTES) :])
    return digest.digest()


def _find_time_problem(value: object) -> str:
    return "" if is_positive_number(value) else "is not a time above 0"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Size limits of media: a small file can decode to gigabytes.

    Attributes:
        image_pixels: maximum width x height of an image.
        audio_seconds: maximum length of a sound in seconds.
        file_bytes: maximum size of a file held in memory, because it is remote or embedded.
        fetch_seconds: timeout for the download of a remote file.
    """

    image_pixels: Annotated[
        int,
        _LimitSetting(help="Maximum width x height of an image.", minimum=1, maximum=_MAX_VALUE),
    ] = 100_000_000
    audio_seconds: Annotated[
        float, _LimitSetting(help="Maximum length of a sound in seconds.", check=_find_time_problem)
    ] = 3600.0
    file_bytes: Annotated[
        int,
        _LimitSetting(
            help="Maximum size of a file held in memory, because it is remote or embedded.",
            minimum=1,
            maximum=_MAX_VALUE,
        ),
    ] = 256 << 20
    fetch_seconds: Annotated[
        float,
        _LimitSetting(help="Timeout for the download of a remote file, in seconds.", check=_find_time_problem),
    ] = 60.0

    def __post_init__(self) -> None:
        raise_problems(find_problems(self))
