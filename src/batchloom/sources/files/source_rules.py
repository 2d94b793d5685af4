"""Read rules of sources: the settings and sizes that decide document boundaries."""

from dataclasses import dataclass
from typing import Literal

from batchloom.sources.files.archives import ArchiveMember
from batchloom.sources.files.decompression import Compression
from batchloom.sources.files.file_kinds import FileKind

ReadMethod = Literal["jsonl", "json", "csv", "table", "samples", "file", "cut", "line", "paragraph", "marker"]

BOM = b"\xef\xbb\xbf"
# Kinds with a single read method, regardless of the rules.
_METHOD_BY_KIND: dict[FileKind, ReadMethod] = {
    "jsonl": "jsonl",
    "json": "json",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "table",
    "arrow": "table",
    "webdataset": "samples",
}
# Methods that find a record only after reading everything before it.
_SEQUENTIAL_METHODS = ("json", "csv")
SPLIT_WORDS = ("auto", "file", "line", "paragraph")


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
    """

    text_field: str | None = "text"
    split_on: str = "auto"
    limits: ReadLimits = ReadLimits()


@dataclass(frozen=True, slots=True)
class Source:
    """One listed input file.

    Attributes:
        name: name under the inputs, used in the manifest and messages.
        path: path, or URL of a remote file with everything needed to read it.
        kind: kind that decides the reader.
        compression: compression of the file; None for a plain file.
        size: bytes on disk; for an archive member, its uncompressed bytes.
        mtime_ns: modification time; for a remote file a number derived from its ETag or version; for
            a member, the archive's.
        member: position inside an archive, whose path is a prefix of ``path``; else None.
        revision: pinned commit of the repository, so that the file cannot change; else empty.
        input: number of the input that listed it.
    """

    name: str
    path: str
    kind: FileKind
    compression: Compression | None
    size: int
    mtime_ns: int
    member: ArchiveMember | None = None
    revision: str = ""
    input: int = 0

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


def choose_read_method(source: Source, rules: ReadRules) -> ReadMethod:
    """Return how documents are found in this source."""
    if source.kind in _METHOD_BY_KIND:
        return _METHOD_BY_KIND[source.kind]
    if rules.split_on == "auto":
        large = source.compression is not None or source.size > rules.limits.whole_text_bytes
        return "cut" if source.kind == "text" and large else "file"
    if rules.split_on == "file":
        return "file"
    if rules.split_on == "line":
        return "line"
    return "paragraph" if rules.split_on == "paragraph" else "marker"


def is_splittable(source: Source, rules: ReadRules) -> bool:
    """Return whether parts of this source can be read independently."""
    read_method, member = choose_read_method(source, rules), source.member
    is_direct = source.compression is None and (member is None or member.direct)
    # Only a complete read verifies a checksum; tables are read in ranges in any case.
    has_checksum = member is not None and member.crc is not None and read_method != "table"
    return is_direct and not has_checksum and read_method not in ("file", "samples")


def is_sequential(source: Source, rules: ReadRules) -> bool:
    """Return whether record starts depend on all bytes before them."""
    return choose_read_method(source, rules) in _SEQUENTIAL_METHODS
