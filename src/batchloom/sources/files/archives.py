"""Members of zip and tar archives as sources, read in place without extraction.

Members are opened by their offset. The reader of a compressed tar stays open and continues if the
next member is ahead of it, so reading all members in order decompresses the archive once.
"""

import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Literal, Self, cast, final

from batchloom.core.errors import DamagedFileError, InputError
from batchloom.core.files import RangeFile, describe_os_error, to_mid_sentence
from batchloom.sources.files.file_opening import (
    Compression,
    DecompressionError,
    Decompressor,
    ReadOnlyFile,
    make_decompressor,
    open_location,
)

ArchiveKind = Literal["zip", "tar"]
_ARCHIVE_BY_SUFFIX: dict[str, tuple[ArchiveKind, Compression | None]] = {
    ".zip": ("zip", None),
    ".tar": ("tar", None),
    ".tar.gz": ("tar", "gzip"),
    ".tgz": ("tar", "gzip"),
    ".tar.zst": ("tar", "zstd"),
    ".tar.xz": ("tar", "xz"),
    ".txz": ("tar", "xz"),
    ".tar.bz2": ("tar", "bzip2"),
    ".tbz2": ("tar", "bzip2"),
    ".tar.lz4": ("tar", "lz4"),
}
_ARCHIVE_SUFFIXES = tuple(_ARCHIVE_BY_SUFFIX)
# Zip bomb limits. Above BOMB_BYTES, a file may decompress to BOMB_RATIO times its bytes. The same holds for each
# compressed member of an archive, and for all members together. The slowest reader takes under a second for BOMB_BYTES.
BOMB_RATIO = 1000
BOMB_BYTES = 16 << 20

_STORED = zipfile.ZIP_STORED
_DEFLATED = zipfile.ZIP_DEFLATED
_LOCAL = struct.Struct("<4s22xHH")
_TAR_READ = 64 << 10
_UNKNOWN_POSITION = 1 << 62
_IGNORED_FOLDERS = "__pycache__", "__MACOSX"
# Errors of zipfile and tarfile for damaged archives.
_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,
    EOFError,
    DecompressionError,
    ValueError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """A listed archive: location, kind, size, modification time, and pinned commit."""

    name: str
    path: str
    kind: ArchiveKind
    compression: Compression | None
    size: int
    mtime_ns: int
    revision: str = ""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file inside an archive.

    Attributes:
        archive: archive that holds it.
        offset: offset of the local header in a zip, of the data in the (decompressed) tar.
        packed: compressed bytes in a zip, else equal to ``size``.
        size: uncompressed bytes.
        deflated: whether it is compressed in a zip.
        crc: CRC-32 of its data in a zip.
    """

    archive: Archive
    offset: int
    packed: int
    size: int
    deflated: bool = False
    crc: int | None = None

    @property
    def direct(self) -> bool:
        """True if it has random access, without reading earlier bytes."""
        return not self.deflated and self.archive.compression is None


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A listed member: its name, position, and a function that opens its data."""

    name: str
    member: ArchiveMember
    start: Callable[[], BinaryIO]


def detect_archive_by_name(name: str) -> tuple[ArchiveKind, Compression | None] | None:
    """Return the archive kind of a file by its name; None if it is not an archive."""
    lower = name.lower()
    if not lower.endswith(_ARCHIVE_SUFFIXES):
        return None
    return next(kind for ending, kind in _ARCHIVE_BY_SUFFIX.items() if lower.endswith(ending))


def list_archive(archive: Archive, skipped_counts: Counter[str]) -> Iterator[ArchiveEntry]:
    """Yield the usable members of an archive in order, and count skipped ones."""
    iter_entries = _walk_zip if archive.kind == "zip" else _walk_tar
    total = 0
    try:
        with open_location(archive.path, archive.size, archive.mtime_ns) as file:
            for entry in iter_entries(archive, file, skipped_counts):
                total += entry.member.size
                if total > max(BOMB_BYTES, BOMB_RATIO * archive.size):
                    raise InputError(describe_bomb(archive.name, total, archive.size))
                if not _count_if_ignored(entry.name, skipped_counts):
                    yield entry
    except _ARCHIVE_ERRORS as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error.__context__, InputError):
            # zipfile reports missing remote bytes as a file that is no zip.
            raise error.__context__ from None
        reason = "it is cut short" if isinstance(error, EOFError) else str(error) or "unknown form"
        raise DamagedFileError(
            f"{archive.name} is not a valid {archive.kind} archive ({reason}); fetch or pack it again, or leave it out."
        ) from error
    except OSError as error:
        raise InputError(f"{archive.name} cannot be read: {describe_os_error(error)}.") from error


def describe_bomb(name: str, unpacked: int, packed: int) -> str:
    """Describe data that unpacks to far more bytes than a file usually does."""
    return (
        f"{name} unpacks to more than {BOMB_RATIO:,} times its size ({unpacked:,} bytes from {packed:,}), like a "
        "zip bomb; if it is not one, unpack it yourself."
    )


def _count_if_ignored(name: str, skipped_counts: Counter[str]) -> bool:
    """Return whether a member is skipped for its name, as in a folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\x00" in name:
        skipped_counts["unsafe names"] += 1
    elif any(part in _IGNORED_FOLDERS for part in path.parts[:-1]):
        skipped_counts[next(part for part in path.parts if part in _IGNORED_FOLDERS)] += 1
    elif any(part.startswith(".") for part in path.parts):
        skipped_counts["hidden"] += 1
    elif detect_archive_by_name(name):
        skipped_counts["archives in archives"] += 1
    else:
        return False
    return True


def _walk_zip(archive: Archive, file: BinaryIO, skipped_counts: Counter[str]) -> Iterator[ArchiveEntry]:
    with zipfile.ZipFile(file) as zip_file:
        entries = zip_file.infolist()
    for entry in entries:
        if entry.is_dir():
            continue
        if entry.flag_bits & 0x1:
            skipped_counts["encrypted"] += 1
        elif (entry.external_attr >> 28) not in (0, 8):
            skipped_counts["links and special files"] += 1
        elif entry.compress_type not in (_STORED, _DEFLATED):
            skipped_counts["compressed by a method other than deflate"] += 1
        elif not entry.file_size:
            skipped_counts["empty"] += 1
        elif not 0 <= entry.header_offset < archive.size:
            raise zipfile.BadZipFile(f"{entry.filename} is outside the file")
        elif entry.compress_type == _STORED and entry.file_size != entry.compress_size:
            raise zipfile.BadZipFile(f"{entry.filename} is not compressed, but has two sizes")
        else:
            member = ArchiveMember(
                archive,
                entry.header_offset,
                entry.compress_size,
                entry.file_size,
                entry.compress_type == _DEFLATED,
                entry.CRC,
            )
            yield ArchiveEntry(entry.filename, member, lambda member=member: open_member(member))  # type: ignore[misc]


def _walk_tar(archive: Archive, file: BinaryIO, skipped_counts: Counter[str]) -> Iterator[ArchiveEntry]:
    raw = cast("BinaryIO", file if archive.compression is None else _SequentialTar(archive, file))
    try:
        tar_file = tarfile.open(fileobj=raw, mode="r|", bufsize=_TAR_READ, tarinfo=TarHeader)  # noqa: SIM115 - closed below
    except MissingEndMarkerError:
        raise DecompressionError("it is an empty file, not a tar archive") from None
    with tar_file:
        while (entry := _read_next_header(tar_file, is_compressed=archive.compression is not None)) is not None:
            # Otherwise tarfile keeps every member in memory.
            tar_file.members = []  # type: ignore[attr-defined]
            if entry.isdir():
                continue
            if not entry.isreg() or entry.issparse():
                skipped_counts["links and special files"] += 1
            elif not entry.size:
                skipped_counts["empty"] += 1
            else:
                member = ArchiveMember(archive, entry.offset_data, entry.size, entry.size)
                yield ArchiveEntry(entry.name, member, lambda entry=entry: _extract(tar_file, entry))  # type: ignore[misc]
    # The checksum of the compressed stream follows all members, so the rest is read to verify it.
    while archive.compression is not None and raw.read(_TAR_READ):
        pass


def _read_next_header(tar_file: tarfile.TarFile, *, is_compressed: bool) -> tarfile.TarInfo | None:
    """Return the next member; None at the end.

    The checksum of a compressed tar shows that it is complete without an end marker.
    """
    try:
        return tar_file.next()
    except MissingEndMarkerError:
        if tar_file.fileobj is not None and tar_file.fileobj.tell() > tar_file.offset:
            # The header of a long name or of extended attributes was read, and its file is missing.
            raise DecompressionError("it is cut short") from None
        if not is_compressed:
            raise DecompressionError(
                "it ends without an end marker, so files may be missing; if its writer omits the marker, add it: "
                "truncate -s +1024 FILE"
            ) from None
        return None


class MissingEndMarkerError(Exception):
    """A tar ends after a file, without an end marker."""


@final
class TarHeader(tarfile.TarInfo):
    """Tar header that distinguishes damage and truncation from the end of a tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; tarfile would take a damaged one for the end of the tar."""
        if not buf:
            raise MissingEndMarkerError
        if len(buf) < tarfile.BLOCKSIZE:
            raise DecompressionError("it is cut short")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError:
            if any(buf):
                raise DecompressionError("a damaged header") from None
            raise


def _extract(tar_file: tarfile.TarFile, entry: tarfile.TarInfo) -> BinaryIO:
    file = tar_file.extractfile(entry)
    if file is None:
        raise tarfile.ReadError(f"member {entry.name} cannot be read")
    return cast("BinaryIO", file)


def open_member(member: ArchiveMember) -> BinaryIO:
    """Open the bytes of a member as a file, with random access if it is ``direct``."""
    archive = member.archive
    if archive.compression is not None:
        return cast("BinaryIO", _TarMember(member))
    file = open_location(archive.path, archive.size, archive.mtime_ns)
    if archive.kind == "tar":
        return cast("BinaryIO", _FileWindow(file, member.offset, member.size))
    file.seek(member.offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size:
        file.close()
        raise EOFError
    magic, name_bytes, extra_bytes = _LOCAL.unpack(header)
    if magic != b"PK\x03\x04":
        file.close()
        raise DecompressionError("its local header is not where the directory says")
    begin = member.offset + _LOCAL.size + name_bytes + extra_bytes
    window = _FileWindow(file, begin, member.packed, None if member.deflated else member.crc)
    return cast("BinaryIO", _InflatedMember(window, member) if member.deflated else window)


@final
class _FileWindow(RangeFile):
    """A byte range of a file as a file of its own, with random access.

    A known CRC-32 is verified if the range is read front to back.
    """

    def __init__(self, file: BinaryIO, start: int, size: int, crc: int | None = None) -> None:
        super().__init__(size, self._read_window)
        self._file = file
        self._start = start
        self._expected_crc = crc
        self._crc = 0
        self._hashed_bytes = 0

    def _read_window(self, start: int, stop: int) -> bytes:
        self._file.seek(self._start + start)
        data = self._file.read(stop - start)
        if len(data) < stop - start:
            raise EOFError
        if self._expected_crc is not None and start == self._hashed_bytes:
            self._crc = zlib.crc32(data, self._crc)
            self._hashed_bytes = stop
            if stop == self._size and self._crc != self._expected_crc:
                raise DecompressionError("its checksum is wrong")
        return data

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


@final
class _InflatedMember(zipfile.ZipExtFile):
    """A deflated zip member, read front to back; its CRC-32 is verified."""

    def __init__(self, window: _FileWindow, member: ArchiveMember) -> None:
        self._window = window
        self._missing_bytes = member.size
        info = zipfile.ZipInfo()
        info.compress_type = _DEFLATED
        info.CRC = member.crc or 0
        info.compress_size = member.packed
        info.file_size = member.size
        super().__init__(cast("BinaryIO", window), "r", info, close_fileobj=True)

    def read(self, n: int | None = -1) -> bytes:
        try:
            data = super().read(n)
        except zipfile.BadZipFile:
            raise DecompressionError("its checksum is wrong") from None
        except zlib.error as error:
            raise DecompressionError(to_mid_sentence(str(error))) from error
        self._missing_bytes -= len(data)
        if not data and n and self._missing_bytes > 0:
            raise EOFError
        return data

    def fileno(self) -> int:
        return self._window.fileno()


@final
class _SequentialTar:
    """Reader of a compressed tar, front to back."""

    def __init__(self, archive: Archive, file: BinaryIO) -> None:
        if archive.compression is None:
            raise AssertionError("plain tars have random access")
        self.archive = archive
        self.file = file
        self.position = 0
        self._stream: Decompressor = make_decompressor(archive.compression, file)

    def __del__(self) -> None:
        self.file.close()

    def read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except (EOFError, DecompressionError, OSError):
            # The reader cannot continue from an unknown position.
            self.position = _UNKNOWN_POSITION
            raise
        self.position += len(data)
        if self.position > BOMB_BYTES and self.position > BOMB_RATIO * max(self.file.tell(), 1):
            raise InputError(describe_bomb(self.archive.name, self.position, self.file.tell()))
        return data


# The reader of the last compressed tar, reused for the next member.
_OPEN_TARS: dict[str, _SequentialTar] = {}


@final
class _TarMember(ReadOnlyFile):
    """A member of a compressed tar."""

    def __init__(self, member: ArchiveMember) -> None:
        self._member = member
        self._position = 0
        archive = member.archive
        reader = _OPEN_TARS.pop(archive.path, None)
        if reader is not None and (reader.archive != archive or reader.position > member.offset):
            reader.file.close()
            reader = None
        if reader is None:
            reader = _SequentialTar(archive, open_location(archive.path, archive.size, archive.mtime_ns))
        self._reader = reader
        while reader.position < member.offset:
            if not reader.read(min(1 << 20, member.offset - reader.position)):
                raise EOFError

    def read(self, size: int | None = -1) -> bytes:
        remaining = self._member.size - self._position
        read_size = remaining if size is None or size < 0 else min(size, remaining)
        data = self._reader.read(read_size) if read_size else b""
        if read_size and not data:
            raise EOFError
        self._position += len(data)
        return data

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        return self._reader.file.fileno()

    def close(self) -> None:
        if not self.closed:
            for archive_path in list(_OPEN_TARS):
                _OPEN_TARS.pop(archive_path).file.close()
            _OPEN_TARS[self._member.archive.path] = self._reader
        super().close()
