"""The bytes of a part: plain, gzip or zstd, hashed as they pass, in bounded memory."""

import os
from gzip import BadGzipFile
from typing import Any, BinaryIO, Self, final

import xxhash
import zstandard
from isal import igzip, isal_zlib

from batchloom.core.errors import InputError, InputMissingError
from batchloom.sources.blocks import open_blocks
from batchloom.sources.hub import copy_of
from batchloom.sources.places import is_url
from batchloom.sources.remote import remote_status
from batchloom.sources.rules import Source

# A zstd block of 4 bytes may unpack to 128 KiB: feeding this much at a time bounds what comes out.
_ZSTD_FEED = 1024
# Of files elsewhere a smaller one comes at once, so a look at its end is enough: it costs a request.
_LOOKED_AT_TWICE = 8 << 20


@final
class PartStream:
    """Reads bytes [start, stop) of a source after decompression, from front to back.

    Attributes:
        source: the source it reads.
        position: offset of the next byte in the (decompressed) source.

    Raises:
        InputMissingError: the file is gone.
        InputError: it cannot be read, or is not what was listed any more.
    """

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self.source, self.position = source, start
        self._start, self._stop = start, source.size if stop is None else stop
        self._hash = xxhash.xxh3_128()
        self._file = open_source(source)
        self._gzip: Any = None
        self._frames: _ZstdFrames | None = None
        if source.compression == "gzip":
            self._gzip = igzip.IGzipFile(fileobj=self._file, mode="rb")  # type: ignore[no-untyped-call]
        elif source.compression == "zstd":
            self._frames = _ZstdFrames(self._file)
        else:
            self._file.seek(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def consumed(self) -> int:
        """Bytes of the listed file that were read so far."""
        if self.source.compression is None:
            return self.position - self._start
        return min(self._file.tell(), self.source.size)

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, empty at the end only.

        Raises:
            InputError: the compressed data is broken or cut short, or the file changed.
        """
        try:
            if self._gzip is not None:
                data = self._read_gzip(size)
            elif self._frames is not None:
                data = self._read_zstd(size, self._frames)
            else:
                data = self._read_plain(size)
        except InputError:
            raise
        except OSError as error:
            raise self._fault(error.strerror or str(error), "") from error
        self._hash.update(data)
        self.position += len(data)
        return data

    def read_up_to(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or all that is left where that is less."""
        pieces = []
        while size and (data := self.read(size)):
            pieces.append(data)
            size -= len(data)
        return b"".join(pieces)

    def finish(self) -> bytes:
        """Read what is left and give the XXH3-128 of all bytes of the part, 16 bytes.

        Raises:
            InputError: the file was changed while it was read.
        """
        while self.read(1 << 20):
            pass
        if not is_url(self.source.path):
            check_unchanged(self.source, os.fstat(self._file.fileno()))
        elif not self.source.revision:
            check_unchanged(self.source, _elsewhere(self.source))
        return self._hash.digest()

    def _read_plain(self, size: int) -> bytes:
        wanted = min(size, self._stop - self.position)
        data = self._file.read(wanted) if wanted > 0 else b""
        if wanted > 0 and not data:
            raise InputError(_changed(self.source))
        return data

    def _read_gzip(self, size: int) -> bytes:
        try:
            data: bytes = self._gzip.read(size)
        except EOFError as error:
            raise self._fault("is cut short", "gzip") from error
        except (BadGzipFile, isal_zlib.error) as error:  # type: ignore[misc]
            raise self._fault(f"is broken ({_lower(error)})", "gzip") from error
        return data

    def _read_zstd(self, size: int, frames: "_ZstdFrames") -> bytes:
        try:
            return frames.read(size)
        except EOFError as error:
            raise self._fault("is cut short", "zstd") from error
        except zstandard.ZstdError as error:
            reason = (
                _lower(error)
                .removeprefix("zstd decompressor error: ")
                .removeprefix("zstd decompress error: ")
            )
            if "too much memory" in reason:
                reason += "; compress it anew without --long"
            raise self._fault(f"is broken ({reason})", "zstd") from error

    def _fault(self, what: str, packing: str) -> InputError:
        if not packing:
            return InputError(f"{self.source.name} cannot be read: {what}.")
        return InputError(
            f"{self.source.name} {what}: its {packing} data ends or fails at byte {self._file.tell():,} of "
            f"{self.source.size:,}; fetch or compress the file anew, or leave it out."
        )


@final
class _ZstdFrames:
    """All frames of a zstd file one after the other, at most a feed's worth ahead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = zstandard.ZstdDecompressor()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._fed = b""
        self._ready = b""

    def read(self, size: int) -> bytes:
        """At most ``size`` decompressed bytes; empty at the end of the last frame."""
        pieces, have = [self._ready], len(self._ready)
        while have < size and (piece := self._next()) is not None:
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces)
        self._ready = data[size:]
        return data[:size]

    def _next(self) -> bytes | None:
        if not self._fed:
            self._fed = self._file.read(_ZSTD_FEED)
        if not self._fed:
            if self._frame is not None:
                raise EOFError
            return None
        if self._frame is None:
            self._frame = self._decoder.decompressobj()
        data = self._frame.decompress(self._fed)
        self._fed = b""
        if self._frame.eof:
            self._fed = self._frame.unused_data
            self._frame = None
        return data


def open_source(source: Source) -> BinaryIO:
    """Open the file of a source, wherever it lies, and check that it is the one that was listed.

    Raises:
        InputMissingError: it is gone.
        InputError: it cannot be read, or has changed.
    """
    if is_url(source.path):
        if source.size > _LOOKED_AT_TWICE and not source.revision:
            check_unchanged(source, _elsewhere(source))
        copy = copy_of(source.path, source.size)
        return open(copy, "rb") if copy else open_blocks(source.path, source.size)  # noqa: PTH123
    try:
        file = open(source.path, "rb")  # noqa: PTH123, SIM115 - one call a small file; the caller closes it
    except FileNotFoundError as error:
        raise InputMissingError(_gone(source)) from error
    except OSError as error:
        raise InputError(
            f"{source.name} cannot be read: {(error.strerror or str(error)).lower()}."
        ) from error
    try:
        check_unchanged(source, os.fstat(file.fileno()))
    except InputError:
        file.close()
        raise
    return file


def _elsewhere(source: Source) -> os.stat_result:
    """What lies by now where a source elsewhere was listed."""
    found = remote_status(source.path)
    if found is None:
        raise InputMissingError(_gone(source))
    return found


def check_unchanged(source: Source, now: os.stat_result) -> None:
    """Raise InputError where the file is not the one that was listed any more."""
    if (now.st_size, now.st_mtime_ns) != (source.size, source.mtime_ns):
        raise InputError(_changed(source))


def _gone(source: Source) -> str:
    return f"{source.name} is gone: it was listed and cannot be found now."


def _changed(source: Source) -> str:
    return (
        f"{source.name} was changed while it was being prepared (it had {source.size:,} bytes when the job "
        "began); let its writer finish, then prepare it into a new --out."
    )


def _lower(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
