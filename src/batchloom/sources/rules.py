"""How sources are read: the settings and sizes that decide where documents begin and end."""

from dataclasses import dataclass
from typing import Literal

from batchloom.sources.kinds import Compression, Kind

Way = Literal["jsonl", "json", "csv", "table", "file", "cut", "line", "paragraph", "marker"]

BOM = b"\xef\xbb\xbf"
SPLIT_WORDS = ("auto", "file", "line", "paragraph")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes that decide documents; constants of the format, smaller only in tests.

    Attributes:
        record_bytes: a larger record is quarantined, so that memory stays bounded.
        whole_text_bytes: a plain-text file above this is cut into documents.
        document_bytes: such documents are at least this large; at most twice as large.
        reach_bytes: how far beyond its nominal place a cut is looked for.
        chunk_bytes: read at once; decides nothing.
    """

    record_bytes: int = 16 << 20
    whole_text_bytes: int = 1 << 20
    document_bytes: int = 64 << 10
    reach_bytes: int = 1 << 20
    chunk_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class ReadRules:
    """Which field of a record is the text, and what a document of a text file is.

    Attributes:
        text_field: the field of a record (a column of a table) that is the text; None for whole
            rows.
        split_on: what a document of a text file is; see ``Recipe``.
        limits: the sizes that decide documents.
    """

    text_field: str | None = "text"
    split_on: str = "auto"
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was listed.

    Attributes:
        name: its name under the inputs, as the manifest and messages give it.
        path: where it lies.
        kind: ``jsonl``, ``text`` or ``code``.
        compression: ``gzip``, ``zstd`` or None.
        size: bytes on disk.
        mtime_ns: its modification time.
    """

    name: str
    path: str
    kind: Kind
    compression: Compression | None
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a source: bytes [start, stop), nominal until record bounds are looked up."""

    source: Source
    start: int
    stop: int


def way_of(source: Source, rules: ReadRules) -> Way:
    """How documents are found in this source."""
    if source.kind == "jsonl":
        return "jsonl"
    if rules.split_on == "auto":
        large = source.compression is not None or source.size > rules.limits.whole_text_bytes
        return "cut" if source.kind == "text" and large else "file"
    if rules.split_on == "file":
        return "file"
    if rules.split_on == "line":
        return "line"
    return "paragraph" if rules.split_on == "paragraph" else "marker"


def splittable(source: Source, rules: ReadRules) -> bool:
    """Whether parts of this source can be read apart from each other."""
    return source.compression is None and way_of(source, rules) != "file"
