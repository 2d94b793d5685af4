"""Registry of the source formats: one entry per format.

A new format is a module in this folder, an entry in ``READ_METHODS`` unless it shares a method, and an entry in
``FORMATS``. A format that can be declared (``data_type``) is also named in ``InputFormat``. Detection by name, reading,
cutting, positions in messages and labels derive from the entries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from batchloom.core.document import Records
from batchloom.sources.files.part_stream import PartStart, PartStream, ReadRules, Source
from batchloom.sources.formats.csv_format import find_row_cut, read_csv
from batchloom.sources.formats.json_list_format import find_list_cut, read_json
from batchloom.sources.formats.jsonl_format import read_jsonl
from batchloom.sources.formats.text_format import (
    NEWLINE,
    BlankLineDelimiter,
    Delimiter,
    FixedDelimiter,
    read_cut,
    read_delimited,
    read_text_file,
)
from batchloom.sources.formats.webdataset_format import read_samples

# Formats that an input can be declared to have (``data_type``).
InputFormat = Literal["json", "jsonl", "csv", "parquet", "arrow", "hf_dataset"]
INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)

CutRule = Literal["whole", "delimiter", "text", "ordered", "row groups"]
SPLIT_WORDS = ("auto", "file", "line", "paragraph")


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """Method that finds the records of a source.

    Attributes:
        name: name of the method.
        cut: where a file is cut into parts: ``whole``: nowhere; ``delimiter``: after the delimiter of records;
            ``text``: near the offset, where the text suggests it; ``ordered``: between records that are found only by
            reading everything before them; ``row groups``: at those of a table.
        read: reads the records of a part; None for tables, which need random access.
        delimiter: returns the delimiter for the rule ``delimiter``.
        find_cut: for the rule ``ordered``, returns the first cut at or after an offset, given the last known one.
        numbers: whether a record's number is that of its line or row; None: only its position in the file is known.
    """

    name: str
    cut: CutRule
    read: Callable[[PartStream, ReadRules], Iterator[Records]] | None
    delimiter: Callable[[ReadRules], Delimiter] | None = None
    find_cut: Callable[[Source, ReadRules, PartStart | None, int], PartStart | None] | None = None
    numbers: Literal["line", "row"] | None = None


def _make_delimited_method(
    name: str, make_delimiter: Callable[[ReadRules], Delimiter], numbers: Literal["line"] | None = None
) -> ReadMethod:
    read = partial(read_delimited, make_delimiter=make_delimiter)
    return ReadMethod(name, "delimiter", read, delimiter=make_delimiter, numbers=numbers)


READ_METHODS = {
    method.name: method
    for method in (
        ReadMethod("jsonl", "delimiter", read_jsonl, delimiter=lambda _: NEWLINE, numbers="line"),
        ReadMethod("json", "ordered", read_json, find_cut=find_list_cut, numbers="row"),
        ReadMethod("csv", "ordered", read_csv, find_cut=find_row_cut, numbers="row"),
        ReadMethod("table", "row groups", None, numbers="row"),
        ReadMethod("samples", "whole", read_samples, numbers="row"),
        ReadMethod("file", "whole", read_text_file),
        ReadMethod("cut", "text", read_cut),
        _make_delimited_method("line", lambda _: NEWLINE, "line"),
        _make_delimited_method("paragraph", lambda _: BlankLineDelimiter()),
        _make_delimited_method("marker", lambda rules: FixedDelimiter(rules.split_on.encode())),
    )
}


def parse_suffixes(words: str) -> frozenset[str]:
    """Return suffixes with their dots."""
    return frozenset(f".{word}" for word in words.split())


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """A format of input files.

    Attributes:
        kind: name in listings and manifests.
        label: name in messages.
        suffixes: suffixes of file names, with their dots.
        method: name of its read method; empty for text, where the rules of the source decide.
        data_types: declared formats that its files match.
        missing_label: name in ``JSONL file not found``; empty for "file or folder".
        magic: first bytes of its files, for columnar formats.
        sniffed: whether the content of a file is checked even if its name is conclusive.
        file_names: complete names of files, in lower case.
    """

    kind: str
    label: str
    suffixes: frozenset[str]
    method: str = ""
    data_types: tuple[InputFormat, ...] = ()
    missing_label: str = ""
    magic: tuple[bytes, ...] = ()
    sniffed: bool = False
    file_names: frozenset[str] = frozenset()


FORMATS = {
    source_format.kind: source_format
    for source_format in (
        SourceFormat(
            "jsonl",
            "JSON Lines",
            parse_suffixes("jsonl ndjson"),
            "jsonl",
            # A file declared as JSON may hold JSON Lines, which are read line by line.
            ("jsonl", "json"),
            "JSONL",
            sniffed=True,
        ),
        SourceFormat("json", "a list of JSON objects", parse_suffixes("json"), "json", ("json",), "JSON", sniffed=True),
        SourceFormat("csv", "CSV", parse_suffixes("csv"), "csv", ("csv",), "CSV"),
        SourceFormat("tsv", "TSV", parse_suffixes("tsv"), "csv", ("csv",)),
        SourceFormat(
            "parquet",
            "Parquet",
            parse_suffixes("parquet pq"),
            "table",
            ("parquet",),
            "Parquet",
            magic=(b"PAR1",),
            sniffed=True,
        ),
        SourceFormat(
            "arrow",
            "Arrow",
            parse_suffixes("arrow arrows ipc feather"),
            "table",
            ("arrow",),
            magic=(b"ARROW1", b"\xff\xff\xff\xff"),
            sniffed=True,
        ),
        # A tar holds samples if its first files do; see ``find_unread_suffixes``.
        SourceFormat("webdataset", "samples of a WebDataset", frozenset(), "samples"),
        SourceFormat("text", "plain text", parse_suffixes("txt text md markdown mdx rst log tex asc adoc org wiki")),
        SourceFormat(
            "code",
            "code",
            parse_suffixes("""
                py pyi pyx js mjs cjs jsx ts tsx vue svelte java kt kts scala groovy gradle c h cc cpp cxx hpp
                hh hxx cu cuh cl cs fs fsx vb go rs swift m mm d zig nim v vhd vhdl sv svh asm s f f90 f95 for
                pas pp adb ads rb php pl pm lua r jl hs ml mli clj cljs ex exs erl hrl el lisp scm rkt tcl awk
                sed vim sh bash zsh fish ps1 bat cmd sql html htm xhtml css scss sass less xml xsl yaml yml toml
                ini cfg conf proto thrift graphql cmake mk glsl hlsl wgsl tf nix sol dart coffee diff patch
            """),
            file_names=frozenset(["makefile", "dockerfile", "rakefile", "gemfile", "jenkinsfile"]),
        ),
    )
}
KIND_BY_SUFFIX = {suffix: kind for kind, source_format in FORMATS.items() for suffix in source_format.suffixes}
KIND_BY_MAGIC = {magic: kind for kind, source_format in FORMATS.items() for magic in source_format.magic}
KIND_BY_FILE_NAME = {name: kind for kind, source_format in FORMATS.items() for name in source_format.file_names}
COLUMNAR_KINDS = tuple(kind for kind, source_format in FORMATS.items() if source_format.method == "table")


def choose_read_method(source: Source, rules: ReadRules) -> str:
    """Return the name of the method that finds the documents of a source."""
    if method := FORMATS[source.kind].method:
        return method
    if rules.split_on == "auto":
        large = source.compression is not None or source.size > rules.limits.whole_text_bytes
        return "cut" if source.kind == "text" and large else "file"
    return rules.split_on if rules.split_on in SPLIT_WORDS else "marker"


def get_read_method(source: Source, rules: ReadRules) -> ReadMethod:
    """Return the method that finds the documents of a source."""
    return READ_METHODS[choose_read_method(source, rules)]


def is_splittable(source: Source, rules: ReadRules) -> bool:
    """Return whether parts of this source can be read independently."""
    if source.sample is not None:
        # Its records are counted from its beginning.
        return False
    cut, member = get_read_method(source, rules).cut, source.member
    is_direct = source.compression is None and (member is None or member.direct)
    # Only a complete read verifies a checksum; tables are read in ranges in any case.
    has_checksum = member is not None and member.crc is not None and cut != "row groups"
    return is_direct and not has_checksum and cut != "whole"


def is_sequential(source: Source, rules: ReadRules) -> bool:
    """Return whether record starts depend on all bytes before them."""
    return get_read_method(source, rules).cut == "ordered"
