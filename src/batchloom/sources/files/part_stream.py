"""Sources, their parts, and the decompressed byte stream of a part."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self, final

import numpy as np
import xxhash

from batchloom.core.addresses import is_url
from batchloom.core.document import Records
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.files import describe_os_error
from batchloom.remote import stat_remote
from batchloom.sources.files.archives import BOMB_BYTES, BOMB_RATIO, ArchiveMember, open_member
from batchloom.sources.files.file_opening import (
    Compression,
    DecompressionError,
    Decompressor,
    detect_compression,
    make_decompressor,
    open_location,
)

BOM = b"\xef\xbb\xbf"
# Seed with which ms-swift chooses random records, and the bound of the seed that it draws from it.
_SAMPLE_SEED, _MAX_DRAWN_SEED = 42, np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class RecordSample:
    """Records of a source that are read, out of those of its input.

    Attributes:
        count: number of records of the input that are read.
        total: number of records of the input, from which random ones are drawn; None to read the first ones.
        before: number of records of the input in earlier sources.
    """

    count: int
    total: int | None = None
    before: int = 0

    def choose(self) -> frozenset[int] | range:
        """Return the numbers of the chosen records, counted in the source."""
        if self.total is None:
            return range(max(0, self.count - self.before))
        return frozenset((choose_random_records(self.total, self.count) - self.before).tolist())

    def filter_batches(self, batches: Iterator[Records]) -> Iterator[Records]:
        """Yield batches with the chosen records only, up to the last one."""
        chosen = self.choose()
        stop, records_before = max(chosen, default=-1) + 1, 0
        while records_before < stop and (batch := next(batches, None)) is not None:
            numbers = sorted((*batch.records, *(bad.record for bad in batch.bad)))
            kept = {number for n, number in enumerate(numbers, records_before) if n in chosen}
            records_before += len(numbers)
            batch.unsampled = len(numbers) - len(kept)
            batch.select([position for position, number in enumerate(batch.records) if number in kept])
            batch.bad = [bad for bad in batch.bad if bad.record in kept]
            yield batch


def choose_random_records(total: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return ``count`` of ``total`` record numbers, in random order.

    These are the numbers that ms-swift chooses for the first data set of a job, ``NAME#count``: it draws one seed from
    ``RandomState(42)`` and then a permutation.
    """
    state = np.random.RandomState(_SAMPLE_SEED)
    state.randint(0, _MAX_DRAWN_SEED)
    return state.permutation(total)[:count].astype(np.int64)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Sizes in bytes that decide documents: constants of the format, smaller in tests.

    Attributes:
        record_bytes: maximum size of a record; larger ones are quarantined to bound memory.
        whole_text_bytes: maximum size of a plain-text file that is one document; larger ones are cut.
        document_bytes: minimum size of such documents; the maximum is twice as large.
        reach_bytes: maximum distance between a cut and its nominal offset.
        chunk_bytes: bytes per read; does not affect documents.
        medium_bytes: maximum total size of the media of a sample in memory.
    """

    record_bytes: int = 16 << 20
    whole_text_bytes: int = 1 << 20
    document_bytes: int = 64 << 10
    reach_bytes: int = 1 << 20
    chunk_bytes: int = 512 << 10
    medium_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class ReadRules:
    """The text field of a record, and the rule that splits text files into documents.

    Attributes:
        text_field: field of a record (column of a table) that holds the text; None for complete rows.
        split_on: rule that splits a text file into documents; see ``ReadRecipe``.
        limits: sizes that decide documents.
        late_field: field that the first records lack; a JSON record with another value of it than null, "" or 1 is bad.
    """

    text_field: str | None = "text"
    split_on: str = "auto"
    limits: ReadLimits = ReadLimits()
    late_field: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One listed input file.

    Attributes:
        name: name under the inputs, used in the manifest and messages.
        path: path, or URL of a remote file with everything needed to read it.
        kind: format of the file, which decides the reader (``formats/format_registry.py``).
        compression: compression of the file; None for a plain file.
        size: bytes on disk; for an archive member, its uncompressed bytes.
        mtime_ns: modification time; for a remote file a number derived from its ETag or version; for
            a member, the archive's.
        member: position inside an archive, whose path is a prefix of ``path``; else None.
        revision: pinned commit of the repository, so that the file cannot change; else empty.
        input: number of the input that listed it.
        sample: records that are read; None for all.
    """

    name: str
    path: str
    kind: str
    compression: Compression | None
    size: int
    mtime_ns: int
    member: ArchiveMember | None = None
    revision: str = ""
    input: int = 0
    sample: RecordSample | None = None

    @property
    def file(self) -> str:
        """Path of the file on disk: the source itself, or its archive."""
        return self.path if self.member is None else self.member.archive.path

    @property
    def file_size(self) -> int:
        """Size of that file in bytes."""
        return self.size if self.member is None else self.member.archive.size


@dataclass(frozen=True, slots=True)
class PartStart:
    """Start of a part inside a CSV file or JSON list, between two records.

    Attributes:
        offset: byte offset in the (decompressed) source.
        line, column: 1-based position of the character at the offset.
        wrapper: key of the object that holds the list; empty without one.
    """

    offset: int
    line: int
    column: int = 1
    wrapper: str = ""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Bytes [start, stop) of a source, nominal until record bounds are looked up."""

    source: Source
    start: int
    stop: int


# A check for changes costs a request. Smaller remote files arrive at once, so a check at their end suffices.
_RECHECK_MIN_BYTES = 8 << 20
_MAGIC_BYTES = 8


@final
class PartStream:
    """Reader of bytes [start, stop) of a source after decompression, front to back.

    Attributes:
        source: source that is read.
        position: offset of the next byte in the (decompressed) source.
        begin: start of a part inside a CSV file or JSON list; None at the beginning of a source, and for formats
            whose records can be recognized by their beginning.

    Raises:
        InputMissingError: the file is missing.
        InputError: it cannot be read, or has changed since listing.
    """

    def __init__(self, source: Source, start: int = 0, stop: int | None = None, begin: PartStart | None = None) -> None:
        self.source, self.position, self.begin = source, start, begin
        self._start, self._stop = start, source.size if stop is None else stop
        self._hash = xxhash.xxh3_128()
        self._file = open_source(source)
        self._decompressor: Decompressor | None = None
        if source.compression is not None:
            self._decompressor = make_decompressor(source.compression, self._file)
        elif start:
            self._file.seek(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def consumed(self) -> int:
        """Number of bytes of the listed file read so far."""
        if self.source.compression is None:
            return self.position - self._start
        return min(self._file.tell(), self.source.size)

    @property
    def ends_before_source(self) -> bool:
        """True if the part ends before its source does."""
        return self.source.compression is None and self._stop < self.source.size

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, empty only at the end.

        Raises:
            InputError: the compressed data is broken or truncated, or the file changed.
        """
        try:
            if self._decompressor is not None:
                data = self._decompressor.read(size)
                self._check_ratio(len(data))
            else:
                data = self._read_plain(size)
        except EOFError as error:
            raise (self._find_compression_mismatch() or self._make_data_error("is cut short")) from error
        except DecompressionError as error:
            raise (self._find_compression_mismatch() or self._make_data_error(f"is broken ({error})")) from error
        except InputError:
            raise
        except OSError as error:
            raise InputError(f"{self.source.name} cannot be read: {describe_os_error(error)}.") from error
        self._hash.update(data)
        self.position += len(data)
        return data

    def read_up_to(self, size: int) -> bytes:
        """Return exactly ``size`` bytes, or all remaining ones if there are fewer."""
        chunks = []
        while size and (data := self.read(size)):
            chunks.append(data)
            size -= len(data)
        return b"".join(chunks)

    def finish(self) -> bytes:
        """Read the rest and return the XXH3-128 of all bytes of the part, 16 bytes.

        Raises:
            InputError: the file was changed while it was read.
        """
        while self.read(1 << 20):
            pass
        if not is_url(self.source.path):
            check_unchanged(self.source, os.fstat(self._file.fileno()))
        elif not self.source.revision:
            check_unchanged(self.source, _stat_remote_source(self.source))
        return self._hash.digest()

    def _read_plain(self, size: int) -> bytes:
        read_size = min(size, self._stop - self.position)
        data = self._file.read(read_size) if read_size > 0 else b""
        if read_size > 0 and not data:
            raise InputError(_describe_changed_source(self.source))
        return data

    def _check_ratio(self, size: int) -> None:
        position, packed = self.position + size, max(self._file.tell(), 1)
        if (member := self.source.member) is not None:
            packed = min(packed, member.packed, member.archive.size)
        if position > max(BOMB_BYTES, BOMB_RATIO * packed):
            raise InputError(
                f"{self.source.name} unpacks to more than {BOMB_RATIO:,} times its size ({position:,} bytes from "
                f"{packed:,}), like a zip bomb; if it is not one, unpack it yourself."
            )

    def _find_compression_mismatch(self) -> InputError | None:
        """Return the error for a file whose beginning contradicts its suffix, else None."""
        expected_compression, name = self.source.compression, self.source.name
        if self.position or self.source.member is not None or not self._file.seekable():
            return None
        self._file.seek(0)
        start = self._file.read(_MAGIC_BYTES)
        actual_compression = detect_compression(start)
        if actual_compression == expected_compression or len(start) < _MAGIC_BYTES:
            return None
        remedy = f"give it the suffix of {actual_compression}" if actual_compression else "fetch it again"
        return InputError(
            f"{name} does not begin like {expected_compression}: rename it to {name.rpartition('.')[0]} if it is not "
            f"compressed, else {remedy}."
        )

    def _make_data_error(self, problem: str) -> InputError:
        packing = self.source.compression or "archived"
        return InputError(
            f"{self.source.name} {problem}: its {packing} data ends or fails at byte {self._file.tell():,} of "
            f"{self.source.size:,}; fetch or compress the file again, or leave it out."
        )


def open_source(source: Source) -> BinaryIO:
    """Open the file of a source, local or remote, and check that it is unchanged.

    Raises:
        InputMissingError: it is missing.
        InputError: it cannot be read, or has changed.
    """
    is_remote = is_url(source.path)
    if is_remote and source.file_size > _RECHECK_MIN_BYTES and not source.revision:
        check_unchanged(source, _stat_remote_source(source))
    try:
        member = source.member
        file = open_member(member) if member else open_location(source.path, source.size, source.mtime_ns)
    except InputError:
        raise
    except (EOFError, DecompressionError) as error:
        raise InputError(
            f"{source.name} cannot be read: {str(error) or 'the archive is cut short'}; fetch or pack the archive "
            "again."
        ) from error
    except FileNotFoundError as error:
        raise InputMissingError(_describe_missing_source(source)) from error
    except OSError as error:
        raise InputError(f"{source.name} cannot be read: {describe_os_error(error)}.") from error
    try:
        if not is_remote:
            check_unchanged(source, os.fstat(file.fileno()))
    except InputError:
        file.close()
        raise
    return file


def _stat_remote_source(source: Source) -> os.stat_result:
    """Return the current status of a remote source."""
    status = stat_remote(source.file)
    if status is None:
        raise InputMissingError(_describe_missing_source(source))
    return status


def check_unchanged(source: Source, status: os.stat_result) -> None:
    """Raise InputError if the file has changed since listing."""
    if (status.st_size, status.st_mtime_ns) != (source.file_size, source.mtime_ns):
        raise InputError(_describe_changed_source(source))


def _describe_missing_source(source: Source) -> str:
    return (
        f"{source.name} is missing: it was listed and cannot be found now; put it back and give the same command again "
        "to resume, or leave it out and give --restart."
    )


def _describe_changed_source(source: Source) -> str:
    return (
        f"{source.name} was changed while it was being prepared (it had {source.size:,} bytes when the job "
        "began); let its writer finish, then give the command again with --restart: work on other files is kept."
    )
