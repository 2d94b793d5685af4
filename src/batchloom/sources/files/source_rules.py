"""Sources, their parts, and the settings that decide document boundaries."""

from dataclasses import dataclass

from batchloom.sources.files.archives import ArchiveMember
from batchloom.sources.files.decompression import Compression

BOM = b"\xef\xbb\xbf"


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
        kind: format of the file, which decides the reader (``formats/format_registry.py``).
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
    kind: str
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
