"""Samples of WebDataset tars: files side by side whose names are alike up to the first dot of the last part.

A tar is read once, from front to back. Of one that lies here unpacked the media are named by their place in it;
of any other they are held.
"""

import re
import tarfile
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self, cast, final

import msgspec

from batchloom.core.addresses import is_url
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError
from batchloom.core.files import NOT_JSON, printable
from batchloom.core.medium import KINDS, Kind, kind_by_name, place_within
from batchloom.core.wording import kind_of
from batchloom.sources.files import (
    Archive,
    Broken,
    Limits,
    PartStream,
    ReadRules,
    ending_of,
    open_place,
    unpacker,
)
from batchloom.sources.formats.record_faults import no_utf8

# As in webdataset's tariterators: the key is all up to the first dot of a name, with its folders.
_NAME = re.compile(r"((?:.*/|)[^./][^/.]*)\.([^/]*)", re.DOTALL)
_TEXTS = (".txt", ".caption")
_RECORD = ".json"
_LOOKED_AT = 64
_AT_ONCE, _BYTES_AT_ONCE = 1000, 4 << 20
_BUFFER = 64 << 10
_CUT = "it is cut short"
# What a tar says that is none, of which more is said where it is listed as any other archive.
_NONE = (tarfile.TarError, EOFError, Broken, OSError, ValueError, OverflowError)


def sample_parts(archive: Archive) -> frozenset[str] | None:
    """The endings in the first samples of a tar whose files are not read; None where it holds no samples.

    It holds samples where one of its first files is a medium by its name.
    """
    if archive.kind != "tar":
        return None
    unread, found = set(), False
    try:
        with (
            open_place(archive.path, archive.size, archive.mtime_ns) as file,
            _opened(archive, file) as opened,
        ):
            for _ in range(_LOOKED_AT):
                if (entry := opened.next()) is None:
                    break
                if not entry.isreg() or not _NAME.fullmatch(entry.name):
                    continue
                found = found or kind_by_name(entry.name) is not None
                if not _is_read(entry.name):
                    unread.add(ending_of(entry.name).lower())
    except _NONE:
        return frozenset() if found else None
    return frozenset(unread) if found else None


def _opened(archive: Archive, file: BinaryIO) -> tarfile.TarFile:
    if archive.compression is None:
        return tarfile.open(fileobj=file, mode="r:")
    stream = cast("BinaryIO", unpacker(archive.compression, file))
    return tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER)


def _is_read(name: str) -> bool:
    return ending_of(name).lower() in (*_TEXTS, _RECORD) or kind_by_name(name) is not None


def read_samples(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """The samples of a tar as rows: ``__key__``, the record of its ``.json``, ``text``, and lists of media.

    Raises:
        InputError: the tar is cut short or damaged, or goes on behind its end.
    """
    reader = _Reader(stream, rules.limits)
    with closing(reader.samples()) as samples:
        found, begin = Records(), stream.position
        for number, sample in enumerate(samples):
            found.seen += 1
            row = sample.row()
            if isinstance(row, str):
                words = ", ".join(sample.names)
                found.bad.append(BadRecord(number, sample.offset, None, row, words[:160]))
            else:
                found.values.append(row)
                found.records.append(number)
                found.offsets.append(sample.offset)
            if found.seen >= _AT_ONCE or stream.position - begin >= _BYTES_AT_ONCE:
                yield found
                found, begin = Records(), stream.position
        yield found


@dataclass(slots=True)
class _Sample:
    """The files of a sample.

    Attributes:
        key: what their names have in common.
        offset: byte of the tar where the first of them begins.
        names: of all of them.
        texts: what its texts hold, by their endings.
        record: what its ``.json`` holds.
        media: by kind the name and the value of each, in the order of the tar.
        held: bytes of media in memory.
        fault: what is wrong with it, empty where nothing is.
    """

    key: str
    offset: int
    names: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    media: dict[Kind, list[tuple[str, Any]]] = field(default_factory=dict)
    held: int = 0
    fault: str = ""

    def refuse(self, fault: str) -> None:
        """Say what is wrong, unless something is already."""
        self.fault = self.fault or f"sample {self.key!r} {fault}"

    def row(self) -> dict[str, Any] | str:
        """The sample as a row, or what is wrong with it."""
        row: dict[str, Any] = {"__key__": self.key, **(self.record or {})}
        own = row.get("text")
        for ending, text in self.texts.items():
            if row.get("text", text) != text:
                other = _RECORD if own is not None else next(iter(self.texts))
                self.refuse(
                    f"has a text in {other} and another one in {ending}: leave one of them out"
                )
            row["text"] = text
        if self.record is None and not (self.texts and self.media):
            self._refuse_half()
        for kind in KINDS:
            if found := self.media.get(kind):
                row[f"{kind}s"] = self._ordered(kind, found, row)
        return self.fault or row

    def _refuse_half(self) -> None:
        have = ", ".join(name.rpartition("/")[2] for name in self.names)
        lacks = "image or sound" if self.texts else ".txt, .caption or .json"
        self.refuse(
            f"has {have:.200} and no {lacks} beside it: files of a sample are called alike up to the first dot and "
            "stand side by side in the tar (tar --sort=name)"
        )

    def _ordered(self, kind: Kind, found: list[tuple[str, Any]], row: dict[str, Any]) -> list[Any]:
        """The media of a kind in the order in which the record names them; of the tar where it names none."""
        columns = [name for name in (f"{kind}s", kind) if row.get(name)]
        if self.record is None or not columns:
            return [value for _, value in found]
        named = [one for name in columns for one in _as_list(row.pop(name))]
        if len(named) == len(found) == 1:
            return [found[0][1]]
        known = {alias: value for name, value in found for alias in self._aliases(name)}
        missing = next((one for one in named if not isinstance(one, str) or one not in known), None)
        if missing is not None or len(named) != len(found):
            what = f"{missing!r:.80}" if missing is not None else f"{len(named)} of {len(found)}"
            self.refuse(
                f"names {what} in column {columns[0]!r} of its .json, and holds "
                f"{', '.join(name for name, _ in found):.200}: name each of them once, or leave the column out"
            )
        return [known.get(one) for one in named if isinstance(one, str)]

    def _aliases(self, name: str) -> tuple[str, str, str]:
        """What a record may call a file of its own: all of its name, without folders, and without the key."""
        return name, name.rpartition("/")[2], name[len(self.key) + 1 :]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@final
class _Header(tarfile.TarInfo):
    """A header that tells a damaged one, and the end of a cut tar, from the end of a whole one."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """See ``tarfile``."""
        if not buf:
            raise EOFError
        if len(buf) < tarfile.BLOCKSIZE:
            raise Broken(_CUT)
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError:
            if any(buf):
                raise Broken("a damaged header") from None
            raise


@final
class _Reader:
    """Reads the files of a tar.

    Args:
        stream: its bytes.
        limits: what is refused for its size.
    """

    def __init__(self, stream: PartStream, limits: Limits) -> None:
        self._stream, self._limits = stream, limits
        source = stream.source
        self._file = source.path.rpartition("/")[2]
        self._named = source.compression is None and not is_url(source.path)

    def samples(self) -> Generator[_Sample]:
        """The samples in the order of the tar."""
        name, at = self._stream.source.name, 0
        try:
            with tarfile.open(
                fileobj=cast("BinaryIO", self._stream), mode="r|", bufsize=_BUFFER, tarinfo=_Header
            ) as opened:
                sample: _Sample | None = None
                while (entry := opened.next()) is not None:
                    opened.members = []  # type: ignore[attr-defined]
                    at = entry.offset
                    match = _NAME.fullmatch(entry.name)
                    if entry.isdir() or match is None:
                        continue
                    key = printable(match[1])
                    if sample is None or sample.key != key:
                        if sample is not None:
                            yield sample
                        sample = _Sample(key, entry.offset)
                    self._take(sample, entry, opened)
                if sample is not None:
                    yield sample
                self._refuse_more(opened)
        except InputError:
            raise
        except EOFError:
            raise InputError(
                f"{name} ends behind the file at byte {at:,} without the mark of its end, so that more may be missing. "
                "Fetch it anew; where its writer leaves the mark out, add it: truncate -s +1024 FILE."
            ) from None
        except (Broken, tarfile.TarError, ValueError, OverflowError) as error:
            # tarfile itself has no kind of error for a file that ends in the middle of a member.
            ended = isinstance(error, tarfile.ReadError) and not self._stream.read(1)
            raise InputError(
                f"{name} is damaged behind byte {at:,} ({_CUT if ended else str(error) or 'unknown form'}): fetch or "
                "pack it anew, or leave it out."
            ) from error

    def _refuse_more(self, opened: tarfile.TarFile) -> None:
        """Raise where bytes come behind the end of the tar: ``cat`` joins tars so that only the first is read."""
        file: Any = opened.fileobj
        while data := file.read(_BUFFER):
            if any(data):
                raise InputError(
                    f"{self._stream.source.name} goes on behind its end: it seems to be several tars in one file; join "
                    "them with tar --concatenate, or keep them apart."
                )

    def _take(self, sample: _Sample, entry: tarfile.TarInfo, opened: tarfile.TarFile) -> None:
        """Take a file into its sample."""
        name = printable(entry.name)
        if name in sample.names:
            sample.refuse(f"holds {name!r} twice: keep one of them")
        sample.names.append(name)
        if not entry.isreg() or entry.issparse():
            sample.refuse(f"has the link or special file {name!r}: pack it with tar --dereference")
        elif (kind := kind_by_name(entry.name)) is not None:
            self._take_medium(sample, kind, name, entry, opened)
        elif (ending := ending_of(entry.name).lower()) in (*_TEXTS, _RECORD):
            most = self._limits.record_bytes
            if entry.size > most:
                sample.refuse(f"has {name!r} of {entry.size:,} bytes, more than {most:,}: cut it")
                return
            data = _data(opened, entry)
            if ending == _RECORD:
                _take_record(sample, name, data)
            else:
                _take_text(sample, name, ending, data)

    def _take_medium(
        self,
        sample: _Sample,
        kind: Kind,
        name: str,
        entry: tarfile.TarInfo,
        opened: tarfile.TarFile,
    ) -> None:
        media = sample.media.setdefault(kind, [])
        if self._named:
            media.append((name, place_within(self._file, entry.offset_data, entry.size)))
            return
        most = self._limits.medium_bytes
        if sample.held + entry.size > most:
            sample.refuse(
                f"has more than {most:,} bytes of media up to {name!r}, and those of tars that are packed or lie "
                "elsewhere are held: unpack it here, or make them smaller"
            )
            return
        sample.held += entry.size
        media.append((name, {"bytes": _data(opened, entry), "path": name}))


def _data(opened: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = opened.extractfile(entry)
    data = b"" if file is None else file.read()
    if len(data) < entry.size:
        raise Broken(_CUT)
    return data


def _take_record(sample: _Sample, name: str, data: bytes) -> None:
    try:
        record = msgspec.json.decode(data)
    except NOT_JSON as error:
        sample.refuse(f"has {name!r}, which is no JSON: {error}; mend it or leave it out")
        return
    if not isinstance(record, dict):
        sample.refuse(f"has {kind_of(record)} in {name!r}, not an object with columns")
        return
    if sample.record is not None:
        sample.refuse(f"has several .json files, {name!r} the last: keep one record a sample")
    sample.record = record


def _take_text(sample: _Sample, name: str, ending: str, data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        sample.refuse(f"has {name!r}, in which {no_utf8(data[error.start])}")
        return
    if ending in sample.texts:
        sample.refuse(f"has several {ending} files, {name!r} the last: keep one text a sample")
    sample.texts[ending] = text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
