"""How sources are read: the settings and sizes that decide where documents begin and end."""

from dataclasses import dataclass
from typing import Literal

from batchloom.sources.kinds import Compression, Kind

Way = Literal["jsonl", "file", "cut", "line", "paragraph", "marker"]

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
    """Which field of a JSONL record is the text, and what a document of a text file is."""

    text_field: str = "text"
    split_on: str = "auto"
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was listed.

    Attributes:
        name: its name under the inputs, as the manifest and messages give it.
        path: where it lies; of a file elsewhere its URL, with all that it takes to read it.
        kind: ``jsonl``, ``text`` or ``code``.
        compression: ``gzip``, ``zstd`` or None.
        size: bytes on disk.
        mtime_ns: its modification time; of a file elsewhere a number made of its ETag or version.
        revision: the commit of the repository it is read at, which cannot change; else empty.
    """

    name: str
    path: str
    kind: Kind
    compression: Compression | None
    size: int
    mtime_ns: int
    revision: str = ""


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
