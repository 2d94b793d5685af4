"""What a file is, told by its name and, where the name says nothing, by its first bytes."""

import codecs
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgspec

from batchloom.core.files import NOT_JSON
from batchloom.sources.files.decompression import Compression
from batchloom.sources.files.json_shape import begins_list, shape_of

Kind = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "code", "webdataset"]
ArchiveKind = Literal["zip", "tar"]

COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lz4": "lz4",
}
_PACKED: dict[bytes, Compression] = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_PACKED_MARKS = tuple(_PACKED)
_TABLES: dict[bytes, Kind] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_FEATHER_1 = b"FEA1"
# What files of other formats begin with that are named as text: the format, and what to do. No text begins so.
_NO_TEXT = {
    b"PAR1\x15": ("Parquet", "rename it to end in .parquet"),
    b"ARROW1\0\0": ("Arrow", "rename it to end in .arrow"),
    b"\x1f\x8b\x08": ("gzip", "rename it to end in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "rename it to end in .zst"),
    b"\xfd7zXZ\0": ("xz", "rename it to end in .xz"),
    b"PK\x03\x04": (
        "zip",
        "rename it to end in .zip, or export text from the program that made it",
    ),
    b"%PDF-": ("PDF", "extract its text first"),
    b"\x89PNG\r": ("PNG", "give records that name the image"),
    b"\xff\xd8\xff": ("JPEG", "give records that name the image"),
}
COLUMNAR: tuple[Kind, ...] = ("parquet", "arrow")
# What these hold is looked at even where their names say it.
_LOOKED_AT: tuple[Kind, ...] = ("jsonl", "json", *COLUMNAR)
_ARCHIVES: dict[str, tuple[ArchiveKind, Compression | None]] = {
    ".zip": ("zip", None),
    ".tar": ("tar", None),
    ".tar.gz": ("tar", "gzip"),
    ".tgz": ("tar", "gzip"),
    ".tar.zst": ("tar", "zstd"),
    ".tar.xz": ("tar", "xz"),
    ".txz": ("tar", "xz"),
    ".tar.bz2": ("tar", "bzip2"),
    ".tbz2": ("tar", "bzip2"),
    ".tar.lz4": ("tar", "lz4"),
}
_ARCHIVE_ENDINGS = tuple(_ARCHIVES)
SNIFF_BYTES = 8192
FIRST_LINE_BYTES = 1 << 20


def _endings(words: str) -> frozenset[str]:
    return frozenset(f".{word}" for word in words.split())


_RECORDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
_TEXT = _endings("txt text md markdown mdx rst log tex asc adoc org wiki")
_CODE = _endings("""
    py pyi pyx js mjs cjs jsx ts tsx vue svelte java kt kts scala groovy gradle c h cc cpp cxx hpp
    hh hxx cu cuh cl cs fs fsx vb go rs swift m mm d zig nim v vhd vhdl sv svh asm s f f90 f95 for
    pas pp adb ads rb php pl pm lua r jl hs ml mli clj cljs ex exs erl hrl el lisp scm rkt tcl awk
    sed vim sh bash zsh fish ps1 bat cmd sql html htm xhtml css scss sass less xml xsl yaml yml toml
    ini cfg conf proto thrift graphql cmake mk glsl hlsl wgsl tf nix sol dart coffee diff patch
""")
_CODE_NAMES = frozenset(["makefile", "dockerfile", "rakefile", "gemfile", "jenkinsfile"])

_FEATHER_REMEDY = "write it anew with pyarrow.feather.write_feather(table, path)"
_TO_JSONL = "convert it to JSON Lines (one object with a text field a line) first"
_NOT_READ = {
    **dict.fromkeys(_endings("ipynb orc avro xlsx xls db sqlite pkl pickle pt npz"), _TO_JSONL),
    **dict.fromkeys(_endings("pdf docx doc odt epub rtf"), "extract its text first"),
    **dict.fromkeys(_endings("7z rar"), "unpack it first, then name the folder"),
    ".br": "compress it with gzip or zstd instead",
}
_PLAIN_TABLE = "unpack it first: tables need random access, and are compressed inside"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a file is.

    Attributes:
        kind: how it is read; None where it is not read.
        compression: what it is packed with, None for a plain file.
        label: what to call a file that is not read when counting such files (``.csv``, ``binary``).
        remedy: what to do about a file that is not read.
        sure: whether it seems to hold records or text; where not, it is read when named itself.
    """

    kind: Kind | None
    compression: Compression | None = None
    label: str = ""
    remedy: str = ""
    sure: bool = True


def ending_of(name: str) -> str:
    """The last ending of a name with its dot, as ``pathlib`` tells it; empty where it has none."""
    # A pathlib.PurePath a file would be a third of listing many.
    return _ending(name.rstrip("/").rpartition("/")[2])


def _ending(last: str) -> str:
    dot = last.rfind(".")
    return last[dot:] if 0 < dot < len(last) - 1 else ""


def kind_by_name(name: str) -> Verdict | None:
    """What the file is by its name alone; None where its content must be looked at."""
    last = (name.rpartition("/")[2] or name.rstrip("/").rpartition("/")[2]).lower()
    ending, inner = _ending(last), ""
    if ending in COMPRESSIONS:
        last = last[: -len(ending)]
        inner = _ending(last)
    return _kind_by_endings(ending, inner, last in _CODE_NAMES)


@lru_cache(maxsize=1024)
def _kind_by_endings(ending: str, inner: str, code: bool) -> Verdict | None:  # noqa: FBT001
    compression = COMPRESSIONS.get(ending)
    suffix = inner if compression else ending
    if suffix in _NOT_READ:
        return Verdict(None, compression, suffix, _NOT_READ[suffix])
    kind = _RECORDS.get(suffix)
    if kind in COLUMNAR and compression:
        return Verdict(None, compression, suffix + ending, _PLAIN_TABLE)
    if kind:
        return Verdict(kind, compression)
    if suffix in _TEXT:
        return Verdict("text", compression)
    if suffix in _CODE or code:
        return Verdict("code", compression)
    return None


def compression_by_name(name: str) -> Compression | None:
    """What the file is packed with, by the last ending of its name."""
    return COMPRESSIONS.get(ending_of(name.lower()))


def archive_by_name(name: str) -> tuple[ArchiveKind, Compression | None] | None:
    """What kind of archive a file is by its name; None where it is none."""
    lower = name.lower()
    if not lower.endswith(_ARCHIVE_ENDINGS):
        return None
    return next(kind for ending, kind in _ARCHIVES.items() if lower.endswith(ending))


def must_look(named: Verdict | None) -> bool:
    """Whether what a file holds decides, whatever its name says."""
    return named is None or named.kind in _LOOKED_AT


def describe_other_format(start: bytes) -> str | None:
    """Return why a file that begins with these bytes is no text, and what to do; None where it may be text."""
    found = next((one for magic, one in _NO_TEXT.items() if start.startswith(magic)), None)
    return None if found is None else f"the file begins as {found[0]} does, not as text; {found[1]}"


def compression_by_content(start: bytes) -> Compression | None:
    """What the file is packed with, by its first bytes."""
    if not start.startswith(_PACKED_MARKS):
        return None
    return next(one for magic, one in _PACKED.items() if start.startswith(magic))


def kind_by_content(
    named: Verdict | None, name: str, start: bytes, compression: Compression | None
) -> Verdict:
    """What the file is by its first bytes, decompressed: at least ``SNIFF_BYTES``, and a line.

    Args:
        named: what its name says.
        name: its name.
        start: the first bytes, all of them where the file is shorter.
        compression: what it is packed with.
    """
    if named is None or named.kind in COLUMNAR:
        table = _columnar(start, compression) or named
        if table is not None:
            return table
    if named is not None:
        return _json(start, compression, lines=named.kind == "jsonl")
    text = _as_text(start)
    if text is None:
        label = ending_of(name).lower() or "no ending"
        return Verdict(
            None, compression, f"binary {label}", "only text, code, JSON, CSV and tables are read"
        )
    if text.startswith("{") and _is_object(text.splitlines()[0]):
        return Verdict("jsonl", compression)
    if begins_list(start) and text[1:].lstrip().startswith("{"):
        return _json(start, compression)
    return Verdict("text", compression)


def _json(start: bytes, compression: Compression | None, *, lines: bool = False) -> Verdict:
    """Records line by line or in a list; ``lines``: the name says line by line."""
    shape = shape_of(start, cut=len(start) >= FIRST_LINE_BYTES)
    if lines:
        return Verdict("json" if begins_list(start) and shape != "lines" else "jsonl", compression)
    if shape in ("list", "lines"):
        return Verdict("json" if shape == "list" else "jsonl", compression)
    return Verdict(
        "jsonl" if shape == "line" else "json", compression, "JSON of no records", sure=False
    )


def _columnar(start: bytes, compression: Compression | None) -> Verdict | None:
    """What a columnar file is; None where it is none."""
    if start.startswith(_FEATHER_1):
        return Verdict(None, compression, "Feather of version 1", _FEATHER_REMEDY)
    kind = next((kind for magic, kind in _TABLES.items() if start.startswith(magic)), None)
    if kind and compression:
        return Verdict(None, compression, f"packed {kind}", _PLAIN_TABLE)
    return Verdict(kind) if kind else None


def _as_text(start: bytes) -> str | None:
    if b"\x00" in start:
        return None
    try:
        # A character cut by the end of the stretch is no fault of the file.
        return codecs.getincrementaldecoder("utf-8")().decode(start).removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except NOT_JSON:
        return False
