"""Opening of files: local, cached from the Hub, remote, read once, compressed.

Inputs that can be read only once (standard input, web files without ranges) are copied. The modification time of a
copy is derived from its content, so that the same bytes are the same input again, and a stopped job can resume. Files
are decompressed while they are read.
"""

import abc
import bz2
import codecs
import contextlib
import io
import itertools
import lzma
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from gzip import BadGzipFile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, Protocol, Self, final

import xxhash
import zstandard
from isal import igzip, isal_zlib

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import InputError
from batchloom.core.files import to_mid_sentence, wrap_os_errors
from batchloom.remote import (
    PAGE_CACHE,
    RemoteFault,
    iter_web_file,
    make_remote_error,
    open_remote_file,
    retry_transient,
)

_WORD_PATTERN = r"[A-Za-z0-9_][\w.+-]*"
_PINNED_URL_PATTERN = re.compile(rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN})@([0-9a-f]{{40}})/(.+)")


def find_local_path(location: str, size: int) -> str | None:
    """Return the local path of a file of ``size`` bytes, or None if it is remote."""
    return find_cached_copy(location, size) if is_url(location) else location


def open_location(location: str, size: int, stamp: int) -> BinaryIO:
    """Open the file at a location for reading and seeking."""
    path = find_local_path(location, size)
    # The caller closes it.
    return open_remote_file(location, size, stamp) if path is None else open(path, "rb")


def get_pinned_revision(url: str) -> str:
    """Return the commit to which a Hub URL is pinned, or "" if it is not pinned."""
    # Most locations are paths, for which the cheap test suffices.
    match = _PINNED_URL_PATTERN.fullmatch(url) if "://" in url else None
    return match[2] if match else ""


def find_cached_copy(url: str, size: int) -> str | None:
    """Return the path of the downloaded copy of a pinned file, or None."""
    if not get_pinned_revision(url):
        return None
    from huggingface_hub import try_to_load_from_cache

    repo, commit, inside = split_pinned_url(url)
    cached_path = try_to_load_from_cache(repo, inside, repo_type="dataset", revision=commit)
    if not isinstance(cached_path, str):
        return None
    with contextlib.suppress(OSError):
        if os.stat(cached_path).st_size == size:
            return cached_path
    return None


def split_pinned_url(url: str) -> tuple[str, str, str]:
    """Return repository, commit and path of a URL that is pinned to a commit."""
    match = _PINNED_URL_PATTERN.fullmatch(url)
    if match is None:
        raise AssertionError("only files that are pinned to a commit are downloaded")
    return match[1], match[2], match[3]


def get_suffix(name: str) -> str:
    """Return the last suffix of a name with its dot, as ``pathlib`` does, or ""."""
    # A pathlib.PurePath per file would take a third of the time to list many files.
    last = name.rstrip("/").rpartition("/")[2]
    dot = last.rfind(".")
    return last[dot:] if 0 < dot < len(last) - 1 else ""


Compression = Literal["gzip", "zstd", "bzip2", "xz", "lz4"]

COMPRESSION_BY_SUFFIX: dict[str, Compression] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lz4": "lz4",
}
_COMPRESSION_BY_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_COMPRESSION_MAGIC = tuple(_COMPRESSION_BY_MAGIC)
# A zstd block of 4 bytes may decompress to 128 KiB, so small reads bound the output.
_ZSTD_FEED_BYTES = 1024
_ZSTD_HEADER_BYTES = 18
# The largest that zstd knows (--long=31). zstd itself asks for consent above 128 MiB.
_MAX_ZSTD_WINDOW = 1 << 31
_FEED_BYTES = 64 << 10
# Enough for every preset of xz; only hostile files need more.
_XZ_MEMORY_LIMIT = 128 << 20


class DecompressionError(Exception):
    """The compressed data cannot be read; holds the reason as a lower-case phrase."""


class ReadOnlyFile(io.RawIOBase, abc.ABC):
    """A file whose ``read`` returns as many bytes as requested."""

    @abc.abstractmethod
    def read(self, size: int | None = -1) -> bytes:
        """Return at most ``size`` bytes, or all; empty only at the end."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Decompressor(Protocol):
    """Protocol of a decompressing reader, front to back."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, empty only at the end."""


def detect_compression(start: bytes) -> Compression | None:
    """Return the compression of a file by its first bytes."""
    if not start.startswith(_COMPRESSION_MAGIC):
        return None
    return next(compression for magic, compression in _COMPRESSION_BY_MAGIC.items() if start.startswith(magic))


def read_zstd_window(file: BinaryIO) -> int:
    """Return the bytes of memory that a zstd file may need; 0 if its header is none."""
    try:
        return int(zstandard.get_frame_parameters(file.read(_ZSTD_HEADER_BYTES)).window_size)
    except zstandard.ZstdError:
        return 0


# Byte order marks, the longer first.
ENCODING_BY_MARK = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}
# Before the encoding of a file that is read as UTF-8 if it is valid UTF-8.
UTF8_FIRST = "utf-8,"
# So many characters that are valid UTF-8 are no chance in a text of another encoding.
_LEAST_CHARACTERS = 3
_ASCII = bytes(range(128))
_SCRIPTS = "\u00e9\u042f\u0639\u05d0\u03a9\u0e01\u65e5\ud55c"


@final
class Transcoder:
    """Reader of a text in another encoding as UTF-8.

    A byte order mark decides, else the first characters beyond ASCII: if they are valid UTF-8, the text is UTF-8, but
    few of them may be chance in a file that is named with its encoding. Bytes that the encoding lacks pass unchanged:
    the record around them is refused unless they form valid UTF-8.

    Args:
        file: the text.
        encoding: its encoding, as Python names it, after ``UTF8_FIRST`` if few characters suffice for UTF-8: a folder
            may hold texts of several encodings.
        is_cut: whether the text may end inside a character.
    """

    def __init__(self, file: Decompressor, encoding: str, *, is_cut: bool = False) -> None:
        self._file = file
        self._encoding = encoding.removeprefix(UTF8_FIRST)
        self._prefers_utf8 = encoding.startswith(UTF8_FIRST)
        self._is_cut = is_cut
        self._decoder: codecs.IncrementalDecoder | None = None
        self._output = b""

    def read(self, size: int) -> bytes:
        """See :class:`Decompressor`.

        Raises:
            UnicodeError: the text ends inside a character, or lacks a byte order mark.
        """
        while not self._output:
            data = self._file.read(size)
            if self._decoder is None and data.isascii() and data and _extends_ascii(self._encoding):
                self._output = data
                break
            if self._decoder is None:
                self._encoding = _choose_encoding(data, self._encoding, prefers_utf8=self._prefers_utf8)
                self._decoder = codecs.getincrementaldecoder(self._encoding)(_name_handler(self._encoding))
            text = self._decoder.decode(data, final=not data and not self._is_cut)
            self._output = text.encode("utf-8", _name_handler(self._encoding))
            if not data:
                break
        data = self._output[:size]
        self._output = self._output[size:]
        return data


def _name_handler(encoding: str) -> str:
    """Return the error handler of codecs that lets other bytes pass."""
    # Those of UTF-16 and UTF-32 are halves of characters.
    return "surrogatepass" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"


def _extends_ascii(encoding: str) -> bool:
    """Return whether bytes below 128 are always ASCII characters, and others never."""
    is_stateful = _SCRIPTS.encode(encoding, "ignore").isascii()
    return not is_stateful and _ASCII.decode(encoding, "replace") == _ASCII.decode()


def _choose_encoding(start: bytes, encoding: str, *, prefers_utf8: bool) -> str:
    """Return the encoding of a text by its first bytes, else the given one."""
    if marked := next((name for mark, name in ENCODING_BY_MARK.items() if start.startswith(mark)), None):
        return marked
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return encoding
    is_wide = encoding.startswith(("utf-16", "utf-32"))
    # In UTF-16, any two bytes are a character.
    characters = len(text) // 4 if is_wide else len(text) - len(text.encode("ascii", "ignore"))
    if "\0" in text or not (characters or is_wide) or not text:
        return encoding
    if prefers_utf8 or characters >= _LEAST_CHARACTERS:
        return "utf-8"
    try:
        start.decode(encoding)
    except UnicodeError:
        return "utf-8"
    return encoding


def make_decompressor(compression: Compression, file: BinaryIO) -> Decompressor:
    """Return a reader of the rest of ``file``, over all its streams (members, frames)."""
    if compression == "gzip":
        return _GzipDecompressor(file)
    if compression == "zstd":
        return _ZstdDecompressor(file)
    if compression == "bzip2":
        return _StreamDecompressor(file, bz2.BZ2Decompressor, b"")
    if compression == "xz":
        return _StreamDecompressor(file, partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY_LIMIT), b"\x00")
    return _StreamDecompressor(file, _make_lz4_decompressor, b"")


@final
class _GzipDecompressor:
    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = igzip.IGzipFile(fileobj=file, mode="rb")  # type: ignore[no-untyped-call]

    def read(self, size: int) -> bytes:
        """See :class:`Decompressor`."""
        try:
            data: bytes = self._file.read(size)
        except (BadGzipFile, isal_zlib.error) as error:  # type: ignore[misc]
            raise DecompressionError(to_mid_sentence(str(error))) from error
        return data


@final
class _ZstdDecompressor:
    """Reader of all frames of a zstd file, with bounded read-ahead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = b""

    def read(self, size: int) -> bytes:
        """See :class:`Decompressor`."""
        chunks = [self._output]
        available = len(self._output)
        while available < size and (chunk := self._read_next()) is not None:
            chunks.append(chunk)
            available += len(chunk)
        data = b"".join(chunks)
        self._output = data[size:]
        return data[:size]

    def _read_next(self) -> bytes | None:
        if not self._input:
            self._input = self._file.read(_ZSTD_FEED_BYTES)
        if not self._input:
            if self._frame is not None:
                raise EOFError
            return None
        if self._frame is None:
            self._frame = self._decoder.decompressobj()
        try:
            data = self._frame.decompress(self._input)
        except zstandard.ZstdError as error:
            reason = to_mid_sentence(str(error))
            for words in ("zstd decompressor error: ", "zstd decompress error: "):
                reason = reason.removeprefix(words)
            raise DecompressionError(reason) from error
        self._input = b""
        if self._frame.eof:
            self._input = self._frame.unused_data
            self._frame = None
        return data


@final
class _StreamDecompressor:
    """Reader of consecutive streams, for decompressors of the standard library's type."""

    def __init__(self, file: BinaryIO, make: Any, padding: bytes) -> None:
        self._file = file
        self._make = make
        self._padding = padding
        self._decoder: Any = None
        self._input = b""
        self._error_types = (OSError, EOFError, RuntimeError, ValueError, lzma.LZMAError)

    def read(self, size: int) -> bytes:
        """See :class:`Decompressor`."""
        while True:
            if self._decoder is None and not self._begin():
                return b""
            if not self._input and self._decoder.needs_input:
                self._input = self._file.read(_FEED_BYTES)
                if not self._input:
                    raise EOFError
            chunk = self._input
            self._input = b""
            try:
                data: bytes = self._decoder.decompress(chunk, size)
            except self._error_types as error:
                raise DecompressionError(to_mid_sentence(str(error))) from error
            if self._decoder.eof:
                self._input = self._decoder.unused_data or b""
                self._decoder = None
            if data:
                return data

    def _begin(self) -> bool:
        """Begin the next stream; return whether there is one."""
        while True:
            self._input = self._input.lstrip(self._padding) if self._padding else self._input
            if self._input:
                break
            self._input = self._file.read(_FEED_BYTES)
            if not self._input:
                return False
        self._decoder = self._make()
        return True


def _make_lz4_decompressor() -> Any:
    import lz4.frame

    return lz4.frame.LZ4FrameDecompressor()


_CHUNK_BYTES = 1 << 20
_MAX_WEB_ATTEMPTS = 3
# Archives are detected by name, and standard input has none: (offset, magic bytes) give the suffix.
_ARCHIVE_MAGIC = {(0, b"PK\x03\x04"): ".zip", (257, b"ustar"): ".tar"}


@final
class Spool:
    """Context manager with a temporary folder for the copies, removed at the end.

    Args:
        folder: parent folder; None: the system's temporary folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._spool_folder = Path()
        self._created_folders: list[Path] = []
        self._standard_input = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        PAGE_CACHE.forget()
        if self._spool_folder.name:
            shutil.rmtree(self._spool_folder, ignore_errors=True)
        for folder in self._created_folders:
            # Folders created for the spool are removed with it, unless others have put files there since.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def copy_standard_input(self) -> str:
        """Return the path of a copy of standard input, which the first call reads.

        Raises:
            InputError: standard input is closed or a terminal.
            OutputError: there is no room for the copy.
        """
        if not self._standard_input:
            if sys.stdin is None or sys.stdin.closed:
                raise InputError("Standard input is closed; name a file, or pipe data in.")
            if sys.stdin.isatty():
                raise InputError("Standard input is a terminal; name a file, or pipe data in.")
            chunks = iter(lambda: sys.stdin.buffer.read(_CHUNK_BYTES), b"")
            self._standard_input = self._store_copy("stdin", chunks)
        return self._standard_input

    def copy_web_file(self, url: str) -> str:
        """Return the path of a copy of a web file from a server without range requests.

        Raises:
            DownloadError: the download is incomplete.
            OutputError: there is no room for the copy.
        """
        name = PurePosixPath(redact_url(url)).name or "download"
        result = retry_transient(lambda: self._store_copy(name, iter_web_file(url)), _MAX_WEB_ATTEMPTS)
        if isinstance(result, RemoteFault):
            raise make_remote_error(result, url)
        return result

    def holds(self, path: str) -> bool:
        """Return whether a path is one of these copies; users do not know their paths."""
        return bool(self._spool_folder.name) and path.startswith(f"{self._spool_folder}{os.sep}")

    def sweep(self) -> None:
        """Delete leftovers of killed runs in the parent folder; only one run may use it."""
        if self._folder is not None and self._folder.is_dir():
            for leftover in self._folder.iterdir():
                # From Python 3.12 on, mkdtemp returns an absolute path for a relative folder.
                if leftover.name != self._spool_folder.name:
                    shutil.rmtree(leftover, ignore_errors=True)

    def _store_copy(self, name: str, chunks: Iterable[bytes]) -> str:
        stream = iter(chunks)
        first = next(stream, b"")
        archives = _ARCHIVE_MAGIC.items()
        ending = next((end for (at, magic), end in archives if first.startswith(magic, at)), "")
        path = self._make_path(name if PurePosixPath(name).suffix else name + ending)
        digest = xxhash.xxh3_64()
        with wrap_os_errors("write", path):
            file = path.open("wb")
        with file:
            for chunk in itertools.chain([first], stream):
                digest.update(chunk)
                with wrap_os_errors("write", path):
                    file.write(chunk)
            with wrap_os_errors("write", path):
                file.flush()
        stamp = digest.intdigest() >> 4
        os.utime(path, ns=(stamp, stamp))
        return str(path)

    def _make_path(self, name: str) -> Path:
        if not self._spool_folder.name:
            with wrap_os_errors("write", self._folder or Path(tempfile.gettempdir())):
                if self._folder is not None:
                    missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._created_folders = missing
                self._spool_folder = Path(tempfile.mkdtemp(prefix="batchloom-", dir=self._folder))
        subfolder = self._spool_folder / str(len(list(self._spool_folder.iterdir())))
        subfolder.mkdir()
        return subfolder / name
