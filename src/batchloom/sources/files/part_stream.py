"""Sources, their parts, compact sequences of both, and the stream of a part."""

import os
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar, final, overload

import numpy as np
import xxhash

from batchloom.core.addresses import is_url
from batchloom.core.document import Records
from batchloom.core.errors import DamagedFileError, InputError, InputMissingError
from batchloom.core.files import describe_os_error
from batchloom.remote import stat_remote
from batchloom.sources.files.archives import BOMB_BYTES, BOMB_RATIO, ArchiveMember, describe_bomb, open_member
from batchloom.sources.files.file_opening import (
    UTF8_FIRST,
    Compression,
    DecompressionError,
    Decompressor,
    Transcoder,
    detect_compression,
    make_decompressor,
    open_location,
)

T = TypeVar("T")

_INT64 = range(-(1 << 63), 1 << 63)
BOM = b"\xef\xbb\xbf"
# Seed with which ms-swift chooses random records, and the bound of the seed that it draws from it.
_SAMPLE_SEED = 42
_MAX_DRAWN_SEED = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class RecordSample:
    """Records of a source that are read, out of those of its input.

    Attributes:
        count: number of records of the input that are read, with those before ``first``.
        total: number of records of the input, from which random ones are drawn; None to read the first ones.
        before: number of records of the input in earlier sources.
        first: number of records of the input that are left out at its beginning.
    """

    count: int
    total: int | None = None
    before: int = 0
    first: int = 0

    def choose(self) -> frozenset[int] | range:
        """Return the numbers of the chosen records, counted in the source."""
        if self.total is None:
            return range(max(0, self.first - self.before), max(0, self.count - self.before))
        return frozenset((choose_random_records(self.total, self.count) - self.before).tolist())

    def filter_batches(self, batches: Iterator[Records]) -> Iterator[Records]:
        """Yield batches with the chosen records only, up to the last one."""
        chosen = self.choose()
        stop = max(chosen, default=-1) + 1
        records_before = 0
        while records_before < stop and (batch := next(batches, None)) is not None:
            numbers = sorted((*batch.records, *(bad.record for bad in batch.bad)))
            kept = {number for n, number in enumerate(numbers, records_before) if n in chosen}
            records_before += len(numbers)
            if len(kept) < len(numbers):
                batch.left_out["not sampled"] = len(numbers) - len(kept)
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
        encoding: encoding of its text, as :class:`Transcoder` takes it; empty for UTF-8, and for formats that declare
            their own.
        subset: subset of all its documents; empty if the hash of each chooses.
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
    encoding: str = ""
    subset: str = ""

    @property
    def is_plain(self) -> bool:
        """True if its bytes are read as they are: neither decompressed nor decoded."""
        return self.compression is None and not self.encoding

    @property
    def file(self) -> str:
        """Path of the file on disk: the source itself, or its archive."""
        return self.path if self.member is None else self.member.archive.path

    @property
    def file_size(self) -> int:
        """Size of that file in bytes."""
        return self.size if self.member is None else self.member.archive.size


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Bytes [start, stop) of a source, nominal until record bounds are looked up."""

    source: Source
    start: int
    stop: int


class CompactSequence(Sequence[T]):
    """A sequence that makes its elements when they are read."""

    __slots__ = ()

    def make_element(self, number: int) -> T:
        """Return the element at an index that exists."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        numbers = range(len(self))[index]
        return self.make_element(numbers) if isinstance(numbers, int) else tuple(map(self.make_element, numbers))

    def __iter__(self) -> Iterator[T]:
        return map(self.make_element, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Callable[[Any], tuple[T, ...]], tuple[tuple[T, ...]]]:
        # A unit that is sent to a worker carries its own sources, not those of the whole listing.
        return tuple, (tuple(self),)


@final
class _TextColumn:
    """Strings as UTF-8 in one buffer, each between NUL bytes."""

    def __init__(self) -> None:
        self._data = bytearray(b"\0")
        self._starts = array("q", [1])

    def append(self, text: str) -> None:
        # As _encode_path, without a call for each of a million names.
        self._data += text.encode("utf-8", "surrogatepass") + b"\0"
        self._starts.append(len(self._data))

    def __getitem__(self, number: int) -> str:
        return self._data[self._starts[number] : self._starts[number + 1] - 1].decode("utf-8", "surrogatepass")

    def matches(self, pattern: re.Pattern[bytes], first: int, prefix: str) -> bool:
        """Return whether a pattern is in texts from ``first`` on, see ``matches_path``."""
        data = self._data[self._starts[first] - 1 :].replace(b"\0" + _encode_path(prefix), b"\0")
        return pattern.search(data.lower()) is not None


def _encode_path(path: str) -> bytes:
    # File names may hold lone surrogates.
    return path.encode("utf-8", "surrogatepass")


class SourceTraits(NamedTuple):
    """Fields of a source that many files share."""

    kind: str
    compression: Compression | None
    revision: str
    input: int
    encoding: str
    subset: str


@final
class SourceTable(CompactSequence[Source]):
    """Sources in arrays: 45 bytes for each, and its name and path in UTF-8.

    An object for each of a million files would take 400 MB.
    """

    def __init__(self) -> None:
        self._names = _TextColumn()
        self._paths = _TextColumn()
        self._sizes = array("q")
        self._times = array("q")
        self._traits = array("i")
        # Few combinations of the other fields occur, except in archives.
        self._trait_numbers: dict[SourceTraits, int] = {}
        self._trait_values: list[SourceTraits] = []
        self._others: dict[int, Source] = {}

    def append(self, source: Source) -> None:
        """Append a source."""
        traits = SourceTraits(
            source.kind, source.compression, source.revision, source.input, source.encoding, source.subset
        )
        if source.member is None and source.sample is None:
            self.append_file(source.name, source.path, source.size, source.mtime_ns, traits)
        else:
            self._others[len(self)] = source
            self.append_file("", "", source.size, 0, traits)

    def append_file(self, name: str, path: str, size: int, mtime_ns: int, traits: SourceTraits) -> None:
        """Append a file without an object for it."""
        number = self._trait_numbers.get(traits)
        if number is None:
            number = self._trait_numbers[traits] = len(self._trait_values)
            self._trait_values.append(traits)
        if mtime_ns not in _INT64:
            self._others[len(self)] = _make_source(name, path, size, mtime_ns, traits)
            mtime_ns = 0
        self._names.append(name)
        self._paths.append(path)
        self._sizes.append(size)
        self._times.append(mtime_ns)
        self._traits.append(number)

    def matches_path(self, pattern: re.Pattern[bytes], first: int, prefix: str) -> bool:
        """Return whether a pattern is in the paths from source ``first`` on.

        Args:
            pattern: a pattern of lower case.
            first: number of the first source.
            prefix: beginning of the paths, which is not searched.
        """
        others = (source.path.removeprefix(prefix) for number, source in self._others.items() if number >= first)
        return self._paths.matches(pattern, first, prefix) or any(
            pattern.search(_encode_path(one).lower()) for one in others
        )

    @property
    def kinds(self) -> set[str]:
        """Formats of the sources."""
        return {traits.kind for traits in self._trait_values}

    def leave_out(self, numbers: Collection[int]) -> "SourceTable":
        """Return a table without the sources of these numbers."""
        kept = SourceTable()
        for number in range(len(self)):
            if number not in numbers:
                kept.append(self.make_element(number))
        return kept

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def bytes(self) -> int:
        """Total size of the files on disk."""
        return sum(self._sizes)

    def make_element(self, number: int) -> Source:
        """Return a source."""
        if number in self._others:
            return self._others[number]
        traits = self._trait_values[self._traits[number]]
        return _make_source(self._names[number], self._paths[number], self._sizes[number], self._times[number], traits)


def _make_source(name: str, path: str, size: int, mtime_ns: int, traits: SourceTraits) -> Source:
    # Keywords and attributes would double the time, and doctor makes each source several times.
    kind, compression, revision, input_number, encoding, subset = traits
    return Source(name, path, kind, compression, size, mtime_ns, None, revision, input_number, None, encoding, subset)


@final
class CompactParts(CompactSequence[SourcePart]):
    """Parts of the sources of a listing, 24 bytes each.

    Args:
        sources: the sources of the listing.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._numbers = array("q")
        self._starts = array("q")
        self._stops = array("q")

    def append(self, source_number: int, start: int, stop: int) -> None:
        """Append bytes [start, stop) of a source."""
        self._numbers.append(source_number)
        self._starts.append(start)
        self._stops.append(stop)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def bytes(self) -> int:
        """Total size of the parts."""
        return sum(self._stops) - sum(self._starts)

    def make_element(self, number: int) -> SourcePart:
        """Return a part."""
        return SourcePart(self._sources[self._numbers[number]], self._starts[number], self._stops[number])


# A check for changes costs a request. Smaller remote files arrive at once, so a check at their end suffices.
_RECHECK_MIN_BYTES = 8 << 20
_MAGIC_BYTES = 8


@final
class PartStream:
    """Reader of bytes [start, stop) of a source after decompression, front to back.

    Attributes:
        source: source that is read.
        position: offset of the next byte in the (decompressed) source.

    Raises:
        InputMissingError: the file is missing.
        InputError: it cannot be read, or has changed since listing.
    """

    def __init__(self, source: Source, start: int = 0, stop: int | None = None) -> None:
        self.source = source
        self.position = start
        self._start = start
        self._stop = source.size if stop is None else stop
        self._hash = xxhash.xxh3_128()
        self._file = open_source(source)
        self._decompressor: Decompressor | None = None
        if source.compression is not None:
            self._decompressor = make_decompressor(source.compression, self._file)
        if source.encoding:
            self._decompressor = Transcoder(self._decompressor or self._file, source.encoding)
        if source.is_plain and start:
            self._file.seek(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def consumed(self) -> int:
        """Number of bytes of the listed file read so far."""
        if self.source.is_plain:
            return self.position - self._start
        return min(self._file.tell(), self.source.size)

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
        except UnicodeError as error:
            encoding = self.source.encoding.removeprefix(UTF8_FIRST)
            raise DamagedFileError(
                f"{self.source.name} cannot be read as {encoding} ({error}): give another --encoding, name its own "
                "encoding in a manifest (encoding: NAME), or leave it out."
            ) from error
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
        position = self.position + size
        packed = max(self._file.tell(), 1)
        if (member := self.source.member) is not None:
            packed = min(packed, member.packed, member.archive.size)
        if position > max(BOMB_BYTES, BOMB_RATIO * packed):
            raise InputError(describe_bomb(self.source.name, position, packed))

    def _find_compression_mismatch(self) -> InputError | None:
        """Return the error for a file whose beginning contradicts its suffix, else None."""
        expected_compression = self.source.compression
        name = self.source.name
        if self.position or self.source.member is not None or not self._file.seekable():
            return None
        position = self._file.tell()
        self._file.seek(0)
        start = self._file.read(_MAGIC_BYTES)
        self._file.seek(position)
        actual_compression = detect_compression(start)
        if actual_compression == expected_compression or len(start) < _MAGIC_BYTES:
            return None
        remedy = f"give it the suffix of {actual_compression}" if actual_compression else "fetch it again"
        return DamagedFileError(
            f"{name} does not begin like {expected_compression}: rename it to {name.rpartition('.')[0]} if it is not "
            f"compressed, else {remedy}."
        )

    def _make_data_error(self, problem: str) -> InputError:
        packing = self.source.compression or "archived"
        return DamagedFileError(
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
