"""WebDataset tars: adjacent files whose names share a key form one sample.

The key is the path up to the first dot of the last component. A tar is read once, front to back.
Media of an uncompressed local tar are referenced by offset; those of other tars are held in memory.
"""

import re
import tarfile
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast, final

import msgspec

from batchloom.core.addresses import is_url
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError
from batchloom.core.files import JSON_DECODE_ERRORS, decode_file_name
from batchloom.core.medium import MEDIUM_KINDS, MediumKind, detect_medium_kind, format_tar_location
from batchloom.core.wording import describe_json_type
from batchloom.sources.files.archives import Archive, MissingEndMarkerError, TarHeader
from batchloom.sources.files.file_opening import DecompressionError, get_suffix, make_decompressor, open_location
from batchloom.sources.files.part_stream import PartStream, ReadLimits, ReadRules
from batchloom.sources.formats.record_faults import describe_invalid_utf8

# As in webdataset's tariterators: the key is the name, with folders, up to its first dot.
_NAME_PATTERN = re.compile(r"((?:.*/|)[^./][^/.]*)\.([^/]*)", re.DOTALL)
_TEXT_SUFFIXES = (".txt", ".caption")
_RECORD_SUFFIX = ".json"
_SNIFFED_ENTRIES = 64
_BATCH_SAMPLES = 1000
_BATCH_BYTES = 4 << 20
_BUFFER_BYTES = 64 << 10
_TRUNCATED = "it is cut short"
# Errors of a file that is no tar; listing it as another archive reports them.
_TAR_ERRORS = (tarfile.TarError, EOFError, DecompressionError, OSError, ValueError, OverflowError)


def find_unread_suffixes(archive: Archive) -> frozenset[str] | None:
    """Return the unread suffixes in the first samples of a tar; None if no samples.

    A tar holds samples if one of its first files has the name of a medium.
    """
    if archive.kind != "tar":
        return None
    unread = set()
    has_medium = False
    try:
        with (
            open_location(archive.path, archive.size, archive.mtime_ns) as file,
            _open_tar(archive, file) as tar_file,
        ):
            for _ in range(_SNIFFED_ENTRIES):
                if (entry := tar_file.next()) is None:
                    break
                if not entry.isreg() or not _NAME_PATTERN.fullmatch(entry.name):
                    continue
                is_medium = detect_medium_kind(entry.name) is not None
                suffix = get_suffix(entry.name).lower()
                has_medium = has_medium or is_medium
                if not is_medium and suffix not in (*_TEXT_SUFFIXES, _RECORD_SUFFIX):
                    unread.add(suffix)
    except _TAR_ERRORS:
        return frozenset() if has_medium else None
    return frozenset(unread) if has_medium else None


def _open_tar(archive: Archive, file: BinaryIO) -> tarfile.TarFile:
    if archive.compression is None:
        return tarfile.open(fileobj=file, mode="r:")
    stream = cast("BinaryIO", make_decompressor(archive.compression, file))
    return tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER_BYTES)


def read_samples(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the samples of a tar as rows.

    A row holds ``__key__``, the record of its ``.json``, ``text``, and lists of media.
    """
    reader = _WebDatasetReader(stream, rules.limits)
    with closing(reader.iter_samples()) as samples:
        batch = Records()
        begin = stream.position
        for number, sample in enumerate(samples):
            batch.records_read += 1
            row: Any = sample.make_row()
            if isinstance(row, str):
                row = BadRecord(number, sample.offset, None, row, ", ".join(sample.names)[:160])
            batch.add(number, sample.offset, row)
            if batch.records_read >= _BATCH_SAMPLES or stream.position - begin >= _BATCH_BYTES:
                yield batch
                batch = Records()
                begin = stream.position
        yield batch


@dataclass(slots=True)
class _WebDatasetSample:
    """The files of a sample."""

    key: str
    offset: int
    names: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    # (name, value) of each medium by kind, in tar order
    media: dict[MediumKind, list[tuple[str, Any]]] = field(default_factory=dict)
    media_bytes: int = 0
    fault: str = ""

    def refuse(self, fault: str) -> None:
        """Record a fault, unless there is one already."""
        self.fault = self.fault or f"sample {self.key!r} {fault}"

    def make_row(self) -> dict[str, Any] | str:
        """Return the sample as a row, or the description of its fault."""
        row: dict[str, Any] = {"__key__": self.key, **(self.record or {})}
        record_text = row.get("text")
        for ending, text in self.texts.items():
            if row.get("text", text) != text:
                text_source = _RECORD_SUFFIX if record_text is not None else next(iter(self.texts))
                self.refuse(f"has different texts in {text_source} and {ending}: remove one of them")
            row["text"] = text
        if self.record is None and not (self.texts and self.media):
            self._refuse_incomplete()
        for kind in MEDIUM_KINDS:
            if media := self.media.get(kind):
                row[f"{kind}s"] = self._order_media(kind, media, row)
        return self.fault or row

    def _refuse_incomplete(self) -> None:
        file_list = ", ".join(name.rpartition("/")[2] for name in self.names)
        missing_part = "image or sound" if self.texts else ".txt, .caption or .json"
        self.refuse(
            f"has {file_list:.200}, but no {missing_part}: the files of a sample must have the same name up to the "
            "first dot and be adjacent in the tar (tar --sort=name)"
        )

    def _order_media(self, kind: MediumKind, media: list[tuple[str, Any]], row: dict[str, Any]) -> list[Any]:
        """Return the media of a kind in the order of the record, else in tar order."""
        columns = [name for name in (f"{kind}s", kind) if row.get(name)]
        if self.record is None or not columns:
            return [value for _, value in media]
        values = [row.pop(name) for name in columns]
        references = [item for value in values for item in (value if isinstance(value, list) else [value])]
        if len(references) == len(media) == 1:
            return [media[0][1]]
        # A record may refer to a file by its full name, by its base name, or by what follows the key.
        values_by_alias = {
            alias: value
            for name, value in media
            for alias in (name, name.rpartition("/")[2], name[len(self.key) + 1 :])
        }
        missing = next(
            (
                reference
                for reference in references
                if not isinstance(reference, str) or reference not in values_by_alias
            ),
            None,
        )
        if missing is not None or len(references) != len(media):
            mismatch = f"{missing!r:.80}" if missing is not None else f"{len(references)} of {len(media)}"
            self.refuse(
                f"names {mismatch} in column {columns[0]!r} of its .json, but holds "
                f"{', '.join(name for name, _ in media):.200}: name each of them once, or remove the column"
            )
        return [values_by_alias.get(reference) for reference in references if isinstance(reference, str)]


@final
class _WebDatasetReader:
    """Reader of the files of a tar."""

    def __init__(self, stream: PartStream, limits: ReadLimits) -> None:
        self._stream = stream
        self._limits = limits
        source = stream.source
        self._file = source.path.rpartition("/")[2]
        self._is_local_tar = source.compression is None and not is_url(source.path)

    def iter_samples(self) -> Generator[_WebDatasetSample]:
        """Yield the samples in tar order."""
        name = self._stream.source.name
        offset = 0
        try:
            with tarfile.open(
                fileobj=cast("BinaryIO", self._stream),
                mode="r|",
                bufsize=_BUFFER_BYTES,
                tarinfo=TarHeader,
            ) as tar_file:
                sample: _WebDatasetSample | None = None
                while (entry := tar_file.next()) is not None:
                    tar_file.members = []  # type: ignore[attr-defined]
                    offset = entry.offset
                    match = _NAME_PATTERN.fullmatch(entry.name)
                    if entry.isdir() or match is None:
                        continue
                    key = decode_file_name(match[1])
                    if sample is None or sample.key != key:
                        if sample is not None:
                            yield sample
                        sample = _WebDatasetSample(key, entry.offset)
                    self._add_file(sample, entry, tar_file)
                if sample is not None:
                    yield sample
                self._refuse_trailing_bytes(tar_file)
        except InputError:
            raise
        except MissingEndMarkerError:
            raise InputError(
                f"{name} ends after the file at byte {offset:,} without an end marker, so more files may be missing. "
                "Fetch it again; if its writer omits the marker, add it: truncate -s +1024 FILE."
            ) from None
        except (DecompressionError, tarfile.TarError, ValueError, OverflowError) as error:
            # tarfile has no separate error for a file that ends inside a member.
            is_truncated = isinstance(error, tarfile.ReadError) and not self._stream.read(1)
            raise InputError(
                f"{name} is damaged after byte {offset:,} "
                f"({_TRUNCATED if is_truncated else str(error) or 'unknown form'}): "
                "fetch or pack it again, or leave it out."
            ) from error

    def _refuse_trailing_bytes(self, tar_file: tarfile.TarFile) -> None:
        """Raise if data follows the end of the tar.

        ``cat`` joins tars so that only the first would be read.
        """
        file: Any = tar_file.fileobj
        while data := file.read(_BUFFER_BYTES):
            if any(data):
                raise InputError(
                    f"{self._stream.source.name} has data after its end: it seems to be several tars in one file; "
                    "join them with tar --concatenate, or keep them separate."
                )

    def _add_file(self, sample: _WebDatasetSample, entry: tarfile.TarInfo, tar_file: tarfile.TarFile) -> None:
        """Add a file to its sample."""
        name = decode_file_name(entry.name)
        if name in sample.names:
            sample.refuse(f"holds {name!r} twice: keep one of them")
        sample.names.append(name)
        if not entry.isreg() or entry.issparse():
            sample.refuse(f"has the link or special file {name!r}: pack it with tar --dereference")
        elif (kind := detect_medium_kind(entry.name)) is not None:
            self._add_medium(sample, kind, name, entry, tar_file)
        elif (ending := get_suffix(entry.name).lower()) in (*_TEXT_SUFFIXES, _RECORD_SUFFIX):
            max_bytes = self._limits.record_bytes
            if entry.size > max_bytes:
                sample.refuse(f"has {name!r} of {entry.size:,} bytes, more than {max_bytes:,}: make it smaller")
                return
            data = _read_entry(tar_file, entry)
            if ending == _RECORD_SUFFIX:
                _add_record(sample, name, data)
            else:
                _add_text(sample, name, ending, data)

    def _add_medium(
        self,
        sample: _WebDatasetSample,
        kind: MediumKind,
        name: str,
        entry: tarfile.TarInfo,
        tar_file: tarfile.TarFile,
    ) -> None:
        media = sample.media.setdefault(kind, [])
        if self._is_local_tar:
            media.append((name, format_tar_location(self._file, entry.offset_data, entry.size)))
            return
        max_bytes = self._limits.medium_bytes
        if sample.media_bytes + entry.size > max_bytes:
            sample.refuse(
                f"has more than {max_bytes:,} bytes of media up to {name!r}, and media of compressed or remote tars "
                "are held in memory: unpack the tar on this machine, or make them smaller"
            )
            return
        sample.media_bytes += entry.size
        media.append((name, {"bytes": _read_entry(tar_file, entry), "path": name}))


def _read_entry(tar_file: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar_file.extractfile(entry)
    data = b"" if file is None else file.read()
    if len(data) < entry.size:
        raise DecompressionError(_TRUNCATED)
    return data


def _add_record(sample: _WebDatasetSample, name: str, data: bytes) -> None:
    try:
        record = msgspec.json.decode(data)
    except JSON_DECODE_ERRORS as error:
        sample.refuse(f"has {name!r}, which is not JSON: {error}; fix it or leave it out")
        return
    if not isinstance(record, dict):
        sample.refuse(f"has {describe_json_type(record)} in {name!r}, not an object with columns")
        return
    if sample.record is not None:
        sample.refuse(f"has several .json files, the last is {name!r}: keep one record per sample")
    sample.record = record


def _add_text(sample: _WebDatasetSample, name: str, ending: str, data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        sample.refuse(f"has {name!r}, in which {describe_invalid_utf8(data, error.start)}")
        return
    if ending in sample.texts:
        sample.refuse(f"has several {ending} files, the last is {name!r}: keep one text per sample")
    sample.texts[ending] = text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
