"""What a file is, told by its name and, where the name says nothing, by its first bytes."""

import codecs
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import msgspec

from batchloom.core.files import NOT_JSON

Kind = Literal["jsonl", "text", "code"]
Compression = Literal["gzip", "zstd"]

COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
SNIFF_BYTES = 8192


def _endings(words: str) -> frozenset[str]:
    return frozenset(f".{word}" for word in words.split())


_JSONL = _endings("jsonl ndjson")
_TEXT = _endings("txt text md markdown mdx rst log tex asc adoc org wiki")
_CODE = _endings("""
    py pyi pyx js mjs cjs jsx ts tsx vue svelte java kt kts scala groovy gradle c h cc cpp cxx hpp
    hh hxx cu cuh cl cs fs fsx vb go rs swift m mm d zig nim v vhd vhdl sv svh asm s f f90 f95 for
    pas pp adb ads rb php pl pm lua r jl hs ml mli clj cljs ex exs erl hrl el lisp scm rkt tcl awk
    sed vim sh bash zsh fish ps1 bat cmd sql html htm xhtml css scss sass less xml xsl yaml yml toml
    ini cfg conf proto thrift graphql cmake mk glsl hlsl wgsl tf nix sol dart coffee diff patch
""")
_CODE_NAMES = frozenset(["makefile", "dockerfile", "rakefile", "gemfile", "jenkinsfile"])

_TO_JSONL = "convert it to JSON Lines (one object with a text field a line) first"
_UNPACK = "unpack it first, then name the folder"
_REPACK = "compress it with gzip or zstd instead"
_NOT_READ = {
    ".json": "make JSON Lines of it first, an array for example with: jq -c '.[]'",
    **dict.fromkeys(_endings("ipynb parquet csv tsv arrow feather orc avro xlsx db"), _TO_JSONL),
    **dict.fromkeys(_endings("pdf docx doc odt epub rtf"), "extract its text first"),
    **dict.fromkeys(_endings("tar tgz zip 7z rar"), _UNPACK),
    **dict.fromkeys(_endings("bz2 xz lz4 br"), _REPACK),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a file is.

    Attributes:
        kind: how it is read; None where it is not read.
        compression: what it is packed with, None for a plain file.
        label: what to call a file that is not read when counting such files (``.csv``, ``binary``).
        remedy: what to do about a file that is not read.
    """

    kind: Kind | None
    compression: Compression | None = None
    label: str = ""
    remedy: str = ""


def kind_by_name(name: str) -> Verdict | None:
    """What the file is by its name alone; None where its content must be looked at."""
    path = PurePath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    if compression:
        path = path.with_suffix("")
    suffix = path.suffix
    if suffix in _NOT_READ:
        return Verdict(None, compression, suffix, _NOT_READ[suffix])
    if suffix in _JSONL:
        return Verdict("jsonl", compression)
    if suffix in _TEXT:
        return Verdict("text", compression)
    if suffix in _CODE or path.name in _CODE_NAMES:
        return Verdict("code", compression)
    return None


def compression_by_name(name: str) -> Compression | None:
    """What the file is packed with, by the last ending of its name."""
    return COMPRESSIONS.get(PurePath(name.lower()).suffix)


def kind_by_content(name: str, start: bytes) -> Verdict:
    """What the file is by its first ``SNIFF_BYTES`` bytes (decompressed): JSONL, text or binary."""
    compression = compression_by_name(name)
    text = _as_text(start)
    if text is None:
        label = PurePath(name).suffix.lower() or "no ending"
        return Verdict(
            None, compression, f"binary {label}", "only text, code and JSON Lines are read"
        )
    if text.startswith("{") and _is_object(text.splitlines()[0]):
        return Verdict("jsonl", compression)
    return Verdict("text", compression)


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
