"""How sources are read: the settings and sizes that decide where documents begin and end."""

from dataclasses import dataclass
from typing import Literal

from batchloom.sources.files.archives import ArchiveMember
from batchloom.sources.files.decompression import Compression
from batchloom.sources.files.file_kinds import FileKind

ReadMethod = Literal["jsonl", "json", "csv", "table", "samples", "file", "cut", "line", "paragraph", "marker"]

BOM = b"\xef\xbb\xbf"
# Kinds whose records are told apart in one way, whatever the rules.
_METHOD_BY_KIND: dict[FileKind, ReadMethod] = {
    "jsonl": "jsonl",
    "json": "json",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "table",
    "arrow": "table",
    "webdataset": "samples",
}
# Ways in which a record cannot be found without all that comes before it.
_SEQUENTIAL_METHODS = ("json", "csv")
SPLIT_WORDS = ("auto", "file", "line", "paragraph")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Sizes in bytes that decide documents; constants of the format, smaller only in tests.

    Attributes:
        record_bytes: a larger record is quarantined, so that memory stays bounded.
        whole_text_bytes: a plain-text file above this is cut into documents.
        document_bytes: such documents are at least this large; at most twice as large.
        reach_bytes: how far beyond its nominal place a cut is looked for.
        chunk_bytes: read at once; decides nothing.
        medium_bytes: the media of a sample that are held have no more together.
    """

    record_bytes: int = 16 << 20
    whole_text_bytes: int = 1 << 20
    document_bytes: int = 64 << 10
    reach_bytes: int = 1 << 20
    chunk_bytes: int = 512 << 10
    medium_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class ReadRules:
    """Which field of a record is the text, and what a document of a text file is.

    Attributes:
        text_field: the field of a record (a column of a table) that is the text; None for whole
            rows.
        split_on: what a document of a text file is; see ``ReadRecipe``.
        limits: the sizes that decide documents.
    """

    text_field: str | None = "text"
    split_on: str = "auto"
    limits: ReadLimits = ReadLimits()


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was listed.

    Attributes:
        name: its name under the inputs, as the manifest and messages give it.
        path: where it lies; of a file elsewhere its URL, with all that it takes to read it.
        kind: how it is read.
        compression: what it is packed with; None for a plain file.
        size: bytes on disk; of a member of an archive, its own bytes unpacked.
        mtime_ns: its modification time; of a file elsewhere a number made of its ETag or version;
            of a member, the archive's.
        member: where it lies inside an archive, whose path ``path`` begins with; else None.
        revision: the commit of the repository it is read at, which cannot change; else empty.
        input: number of the input it was listed for.
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
        """Where the file lies that holds it: itself, or its archive."""
        return self.path if self.member is None else self.member.archive.path

    @property
    def file_size(self) -> int:
        """Bytes of that file."""
        return self.size if self.member is None else self.member.archive.size


@dataclass(frozen=True, slots=True)
class PartStart:
    """Where a part of a CSV file or JSON list begins inside of it: between two records.

    Attributes:
        offset: byte of the (decompressed) source.
        line, column: 1-based, of the character there.
        wrapper: the key of the object that holds the list; empty where none does.
    """

    offset: int
    line: int
    column: int = 1
    wrapper: str = ""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A stretch of a source: bytes [start, stop), nominal until record bounds are looked up."""

    source: Source
    start: int
    stop: int


def choose_read_method(source: Source, rules: ReadRules) -> ReadMethod:
    """How documents are found in this source."""
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
    """Whether parts of this source can be read apart from each other."""
    read_method, member = choose_read_method(source, rules), source.member
    is_direct = source.compression is None and (member is None or member.direct)
    # A checksum is verified by who reads the whole; tables are read in pieces anyway.
    has_checksum = member is not None and member.crc is not None and read_method != "table"
    return is_direct and not has_checksum and read_method not in ("file", "samples")


def is_sequential(source: Source, rules: ReadRules) -> bool:
    """Whether where a record begins is a matter of all bytes before it."""
    return choose_read_method(source, rules) in _SEQUENTIAL_METHODS
