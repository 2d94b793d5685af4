"""File kinds, detected by name and, if the name is inconclusive, by first bytes."""

import codecs
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgspec

from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.sources.files.decompression import Compression
from batchloom.sources.files.json_shape import detect_json_shape, starts_with_list

FileKind = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "code", "webdataset"]
ArchiveKind = Literal["zip", "tar"]

COMPRESSION_BY_SUFFIX: dict[str, Compression] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lz4": "lz4",
}
_COMPRESSION_BY_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_COMPRESSION_MAGIC = tuple(_COMPRESSION_BY_MAGIC)
_KIND_BY_MAGIC: dict[bytes, FileKind] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
}
_FEATHER_1 = b"FEA1"
# Magic bytes of other formats in files with text names: the format, and the remedy. No text begins like this.
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
COLUMNAR_KINDS: tuple[FileKind, ...] = ("parquet", "arrow")
# The content of these kinds is checked even if their names are conclusive.
_SNIFFED_KINDS: tuple[FileKind, ...] = ("jsonl", "json", *COLUMNAR_KINDS)
_ARCHIVE_BY_SUFFIX: dict[str, tuple[ArchiveKind, Compression | None]] = {
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
_ARCHIVE_SUFFIXES = tuple(_ARCHIVE_BY_SUFFIX)
SNIFF_BYTES = 8192
FIRST_LINE_BYTES = 1 << 20


def _parse_suffixes(words: str) -> frozenset[str]:
    return frozenset(f".{word}" for word in words.split())


_KIND_BY_SUFFIX: dict[str, FileKind] = {
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
_TEXT_SUFFIXES = _parse_suffixes("txt text md markdown mdx rst log tex asc adoc org wiki")
_CODE_SUFFIXES = _parse_suffixes("""
    py pyi pyx js mjs cjs jsx ts tsx vue svelte java kt kts scala groovy gradle c h cc cpp cxx hpp
    hh hxx cu cuh cl cs fs fsx vb go rs swift m mm d zig nim v vhd vhdl sv svh asm s f f90 f95 for
    pas pp adb ads rb php pl pm lua r jl hs ml mli clj cljs ex exs erl hrl el lisp scm rkt tcl awk
    sed vim sh bash zsh fish ps1 bat cmd sql html htm xhtml css scss sass less xml xsl yaml yml toml
    ini cfg conf proto thrift graphql cmake mk glsl hlsl wgsl tf nix sol dart coffee diff patch
""")
_CODE_NAMES = frozenset(["makefile", "dockerfile", "rakefile", "gemfile", "jenkinsfile"])

_FEATHER_REMEDY = "write it again with pyarrow.feather.write_feather(table, path)"
_TO_JSONL_REMEDY = "convert it to JSON Lines (one object with a text field per line) first"
_UNREADABLE_REMEDIES = {
    **dict.fromkeys(_parse_suffixes("ipynb orc avro xlsx xls db sqlite pkl pickle pt npz"), _TO_JSONL_REMEDY),
    **dict.fromkeys(_parse_suffixes("pdf docx doc odt epub rtf"), "extract its text first"),
    **dict.fromkeys(_parse_suffixes("7z rar"), "unpack it first, then name the folder"),
    ".br": "compress it with gzip or zstd instead",
}
_COMPRESSED_TABLE_REMEDY = "decompress it first: tables need random access, and are compressed internally"


@dataclass(frozen=True, slots=True)
class FileDetection:
    """Detected kind of a file.

    Attributes:
        kind: kind that decides the reader; None for an unreadable file.
        compression: compression, None for a plain file.
        label: label for counting unreadable files (``.csv``, ``binary``).
        remedy: advice for an unreadable file.
        sure: whether it seems to hold records or text; if not, it is read only if an input names it.
    """

    kind: FileKind | None
    compression: Compression | None = None
    label: str = ""
    remedy: str = ""
    sure: bool = True


def get_suffix(name: str) -> str:
    """Return the last suffix of a name with its dot, as ``pathlib`` does, or ""."""
    # A pathlib.PurePath per file would take a third of the time to list many files.
    return _split_suffix(name.rstrip("/").rpartition("/")[2])


def _split_suffix(last: str) -> str:
    dot = last.rfind(".")
    return last[dot:] if 0 < dot < len(last) - 1 else ""


def detect_kind_by_name(name: str) -> FileDetection | None:
    """Return the kind of a file by its name; None if its content must decide."""
    last = (name.rpartition("/")[2] or name.rstrip("/").rpartition("/")[2]).lower()
    ending, inner = _split_suffix(last), ""
    if ending in COMPRESSION_BY_SUFFIX:
        last = last[: -len(ending)]
        inner = _split_suffix(last)
    return _detect_kind_by_suffixes(ending, inner, last in _CODE_NAMES)


@lru_cache(maxsize=1024)
def _detect_kind_by_suffixes(ending: str, inner: str, code: bool) -> FileDetection | None:  # noqa: FBT001
    compression = COMPRESSION_BY_SUFFIX.get(ending)
    suffix = inner if compression else ending
    if suffix in _UNREADABLE_REMEDIES:
        return FileDetection(None, compression, suffix, _UNREADABLE_REMEDIES[suffix])
    kind = _KIND_BY_SUFFIX.get(suffix)
    if kind in COLUMNAR_KINDS and compression:
        return FileDetection(None, compression, suffix + ending, _COMPRESSED_TABLE_REMEDY)
    if kind:
        return FileDetection(kind, compression)
    if suffix in _TEXT_SUFFIXES:
        return FileDetection("text", compression)
    if suffix in _CODE_SUFFIXES or code:
        return FileDetection("code", compression)
    return None


def detect_compression_by_name(name: str) -> Compression | None:
    """Return the compression of a file by the last suffix of its name."""
    return COMPRESSION_BY_SUFFIX.get(get_suffix(name.lower()))


def detect_archive_by_name(name: str) -> tuple[ArchiveKind, Compression | None] | None:
    """Return the archive kind of a file by its name; None if it is not an archive."""
    lower = name.lower()
    if not lower.endswith(_ARCHIVE_SUFFIXES):
        return None
    return next(kind for ending, kind in _ARCHIVE_BY_SUFFIX.items() if lower.endswith(ending))


def needs_content(name_detection: FileDetection | None) -> bool:
    """Return whether the content of a file decides its kind regardless of the name."""
    return name_detection is None or name_detection.kind in _SNIFFED_KINDS


def describe_other_format(start: bytes) -> str | None:
    """Explain why a file with these first bytes is not text; None if it may be text."""
    format_and_remedy = next((entry for magic, entry in _NO_TEXT.items() if start.startswith(magic)), None)
    return (
        None
        if format_and_remedy is None
        else f"the file begins like {format_and_remedy[0]}, not like text; {format_and_remedy[1]}"
    )


def detect_compression(start: bytes) -> Compression | None:
    """Return the compression of a file by its first bytes."""
    if not start.startswith(_COMPRESSION_MAGIC):
        return None
    return next(compression for magic, compression in _COMPRESSION_BY_MAGIC.items() if start.startswith(magic))


def detect_kind_by_content(
    name_detection: FileDetection | None, name: str, start: bytes, compression: Compression | None
) -> FileDetection:
    """Return the kind of a file by its first bytes, decompressed.

    Args:
        name_detection: kind by the name.
        name: name of the file.
        start: first bytes: at least ``SNIFF_BYTES`` and a line, or the complete file if shorter.
        compression: compression of the file.
    """
    if name_detection is None or name_detection.kind in COLUMNAR_KINDS:
        table = _detect_columnar(start, compression) or name_detection
        if table is not None:
            return table
    if name_detection is not None:
        return _detect_json(start, compression, lines=name_detection.kind == "jsonl")
    text = _decode_text(start)
    if text is None:
        label = get_suffix(name).lower() or "without suffix"
        return FileDetection(None, compression, f"binary {label}", "only text, code, JSON, CSV and tables are read")
    if text.startswith("{") and _is_object(text.splitlines()[0]):
        return FileDetection("jsonl", compression)
    if starts_with_list(start) and text[1:].lstrip().startswith("{"):
        return _detect_json(start, compression)
    return FileDetection("text", compression)


def _detect_json(start: bytes, compression: Compression | None, *, lines: bool = False) -> FileDetection:
    """Detect one record per line or a list; ``lines`` if the name means JSON Lines."""
    shape = detect_json_shape(start, truncated=len(start) >= FIRST_LINE_BYTES)
    if lines:
        return FileDetection("json" if starts_with_list(start) and shape != "lines" else "jsonl", compression)
    if shape in ("list", "lines"):
        return FileDetection("json" if shape == "list" else "jsonl", compression)
    return FileDetection("jsonl" if shape == "line" else "json", compression, "JSON without records", sure=False)


def _detect_columnar(start: bytes, compression: Compression | None) -> FileDetection | None:
    """Return the kind of a columnar file, or None for another file."""
    if start.startswith(_FEATHER_1):
        return FileDetection(None, compression, "Feather version 1", _FEATHER_REMEDY)
    kind = next((kind for magic, kind in _KIND_BY_MAGIC.items() if start.startswith(magic)), None)
    if kind and compression:
        return FileDetection(None, compression, f"compressed {kind}", _COMPRESSED_TABLE_REMEDY)
    return FileDetection(kind) if kind else None


def _decode_text(start: bytes) -> str | None:
    if b"\x00" in start:
        return None
    try:
        # A character cut at the end of the block is valid.
        return codecs.getincrementaldecoder("utf-8")().decode(start).removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except JSON_DECODE_ERRORS:
        return False
