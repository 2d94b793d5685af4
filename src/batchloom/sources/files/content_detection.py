"""Content detection of files on disk and of archive members during listing."""

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, final

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError
from batchloom.sources.files.archives import Archive, ArchiveEntry, list_archive
from batchloom.sources.files.declared_formats import (
    InputFormat,
    apply_declared_format,
    make_declared_detection,
    needs_content_check,
)
from batchloom.sources.files.decompression import Compression, DecompressionError, make_decompressor
from batchloom.sources.files.file_kinds import (
    COLUMNAR_KINDS,
    FIRST_LINE_BYTES,
    SNIFF_BYTES,
    FileDetection,
    FileKind,
    detect_compression,
    detect_compression_by_name,
    detect_kind_by_content,
    detect_kind_by_name,
    needs_content,
)
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import Source

_MAX_COMPRESSED_BYTES = 64 << 10


def detect_kind(
    name_detection: FileDetection | None, name: str, read_start: Callable[[Compression | None], bytes]
) -> FileDetection:
    """Return the kind of a file by its name, or by its first bytes if they decide.

    ``read_start`` returns the first bytes, decompressed; it is called only if needed.
    """
    if name_detection is not None and not needs_content(name_detection):
        return name_detection
    compression = detect_compression_by_name(name)
    head = read_start(compression)
    if compression is None:
        compression = detect_compression(head)
        head = read_start(compression) if compression else head
    return detect_kind_by_content(name_detection, name, head, compression)


@dataclass(frozen=True, slots=True)
class DetectedFile:
    """Earlier detection result, valid for this size and modification time."""

    size: int
    mtime_ns: int
    kind: FileKind
    compression: Compression | None


def detect_file_kind(source: Source) -> FileDetection:
    """Return the kind of a local or remote file; the kind of ``source`` is ignored.

    Raises:
        InputError: it cannot be read.
    """
    name = redact_url(source.path)
    return detect_kind(detect_kind_by_name(name), name, partial(_read_start, source))


def detect_declared_kind(source: Source, verdict: FileDetection, form: InputFormat | None) -> FileDetection:
    """Return the kind of a file with a declared format; ``verdict`` is as detected.

    Raises:
        InputError: it cannot be read.
    """
    if not needs_content_check(form, verdict):
        return verdict
    name_detection, head = make_declared_detection(form), _read_start(source, verdict.compression)
    content_detection = detect_kind_by_content(name_detection, redact_url(source.path), head, verdict.compression)
    return apply_declared_format(form, verdict, content_detection)


def _read_start(source: Source, compression: Compression | None) -> bytes:
    """Return the first bytes of a file, decompressed, with a full line of JSON."""
    decoded_source = source if source.compression == compression else replace(source, compression=compression)
    with PartStream(decoded_source) as stream:
        head = stream.read_up_to(SNIFF_BYTES)
        return head + stream.read_up_to(FIRST_LINE_BYTES) if _needs_line(head) else head


def _needs_line(start: bytes) -> bool:
    """Return whether the first line of JSON is still incomplete."""
    return b"\n" not in start and start.lstrip()[:1] in (b"{", b"[")


def list_archive_sources(
    archive: Archive, skipped_counts: Counter[str], on_detected: Callable[[str, FileDetection], None]
) -> Iterator[Source]:
    """Yield the readable members of an archive as sources named ``archive/member``.

    Args:
        archive: the archive.
        skipped_counts: counter of skipped members.
        on_detected: called with the name and detection of every listed member.

    Raises:
        InputError: the archive cannot be read.
    """
    names: Counter[str] = Counter()
    for entry in list_archive(archive, skipped_counts):
        verdict = _detect_member_kind(archive, entry)
        if verdict.kind is None or not verdict.sure:
            skipped_counts[verdict.label] += 1
        elif verdict.kind in COLUMNAR_KINDS and not entry.member.direct:
            skipped_counts["tables compressed in an archive"] += 1
        else:
            # An archive may hold a name twice, and paths must identify sources.
            names[entry.name] += 1
            repeat_suffix = f"#{names[entry.name]}" if names[entry.name] > 1 else ""
            on_detected(entry.name, verdict)
            yield Source(
                f"{archive.name}/{entry.name}{repeat_suffix}",
                f"{archive.path}/{entry.name}{repeat_suffix}",
                verdict.kind,
                verdict.compression,
                entry.member.size,
                archive.mtime_ns,
                entry.member,
                archive.revision,
            )


def _detect_member_kind(archive: Archive, entry: ArchiveEntry) -> FileDetection:
    """Return the kind of a member, "broken" if it contradicts its own name.

    Raises:
        InputError: the archive itself is damaged.
    """
    if not needs_content(name_detection := detect_kind_by_name(entry.name)):
        return name_detection or FileDetection(None, None, "unknown")
    try:
        with closing(entry.start()) as file:
            head = _FileHead(file)
            try:
                return detect_kind(name_detection, entry.name, head.read_start)
            except (DecompressionError, EOFError):
                if head.damaged:
                    raise
                return FileDetection(None, None, "broken")
    except (DecompressionError, EOFError, tarfile.TarError) as error:
        raise InputError(
            f"{archive.name}/{entry.name} is broken ({str(error) or 'it is cut short'}): fetch or pack the archive "
            "again, or leave it out."
        ) from error


@final
class _FileHead:
    """First bytes of a file that can be read once, front to back.

    Attributes:
        damaged: whether reading the file failed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._raw = file, b""
        self.damaged = False

    def read_start(self, compression: Compression | None) -> bytes:
        """Return the first bytes of the file, decompressed."""
        raw = self._read_raw(_MAX_COMPRESSED_BYTES if compression else SNIFF_BYTES)
        head = _decompress_start(raw, compression)
        if _needs_line(head):
            head = _decompress_start(self._read_raw(FIRST_LINE_BYTES), compression)
        return head

    def _read_raw(self, size: int) -> bytes:
        self.damaged = True
        while len(self._raw) < size and (data := self._file.read(size - len(self._raw))):
            self._raw += data
        self.damaged = False
        return self._raw


def _decompress_start(raw: bytes, compression: Compression | None) -> bytes:
    """Decompress the beginning of a file, which may be cut anywhere."""
    if compression is None:
        return raw
    stream, chunks = make_decompressor(compression, io.BytesIO(raw)), []
    size = 0
    try:
        while size < FIRST_LINE_BYTES and (data := stream.read(SNIFF_BYTES)):
            chunks.append(data)
            size += len(data)
    except EOFError:
        pass
    return b"".join(chunks)
