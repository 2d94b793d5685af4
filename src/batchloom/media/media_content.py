"""The bytes of a medium, wherever they are, and what tells one from another without reading all of them."""

import io
import os
from pathlib import Path
from typing import Any, Protocol, final

import xxhash

from batchloom.core.files import open_regular_file

# Headers are at the beginning, marks of the end at the end.
EDGE_BYTES = 1 << 16


class MediaContent(Protocol):
    """Bytes that are read in stretches."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Those from ``start`` to ``stop - 1``, as far as they are there; raises OSError."""
        ...


@final
class BytesContent:
    """Bytes in memory."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, stop: int) -> bytes:
        """See :class:`MediaContent`."""
        return self._data if start <= 0 and stop >= self.size else self._data[start:stop]

    def file(self) -> io.BytesIO:
        """The same as a file that is open for reading; nothing is copied."""
        return io.BytesIO(self._data)


@final
class FileContent:
    """A regular file of this machine, or a stretch of one; use as a context manager.

    Args:
        path: of the file.
        byte_range: its first byte and how many it has; None for all of the file.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
        EOFError: the file ends before the stretch does.
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


@final
class _ContentFile(io.RawIOBase):
    """A content as libraries read files: what they do not ask for is not read."""

    def __init__(self, content: MediaContent) -> None:
        super().__init__()
        self._content, self._at = content, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See ``io.IOBase``."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._content.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """See ``io.IOBase``."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See ``io.RawIOBase``."""
        data = self._content.read(self._at, self._at + len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_content(content: MediaContent) -> io.BufferedReader | io.BytesIO:
    """A content as a file that is open for reading."""
    if isinstance(content, BytesContent):
        return content.file()
    return io.BufferedReader(_ContentFile(content), EDGE_BYTES)


def read_edges(content: MediaContent) -> tuple[bytes, bytes]:
    """The first and the last 64 KiB; of what is shorter, all of it twice."""
    head = content.read(0, EDGE_BYTES)
    if content.size <= EDGE_BYTES:
        return head, head
    return head, content.read(content.size - EDGE_BYTES, content.size)


def hash_edges(size: int, head: bytes, tail: bytes) -> bytes:
    """What tells a medium from another: XXH3-128 of its size (u64) and of its first and last 64 KiB, 16 bytes.

    Args:
        size: bytes of the whole.
        head: as :func:`read_edges` gives it.
        tail: as :func:`read_edges` gives it.
    """
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    digest.update(head)
    if size > EDGE_BYTES:
        digest.update(tail[-min(len(tail), size - EDGE_BYTES) :])
    return digest.digest()
