"""Registry of the source formats, and detection of a file's format.

A new format is a module in this folder, an entry in ``READ_METHODS`` unless it shares a method, and an entry in
``FORMATS``. A format that can be declared (``data_type``) is also named in ``InputFormat``. Detection by name, reading,
cutting, positions in messages and labels derive from the entries.

The format of a file is detected by its name, by its first bytes, or declared.
"""

import codecs
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, BinaryIO, Literal, NoReturn, final, get_args

import msgspec
import numpy as np

from batchloom.core.addresses import redact_url
from batchloom.core.document import Records
from batchloom.core.errors import AccessError, DownloadError, InputError, InputMissingError
from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.sources.files.archives import Archive, ArchiveEntry, list_archive
from batchloom.sources.files.file_choice import NOT_SELECTED, FileChoice
from batchloom.sources.files.file_opening import (
    COMPRESSION_BY_SUFFIX,
    Compression,
    DecompressionError,
    Transcoder,
    detect_compression,
    get_suffix,
    make_decompressor,
)
from batchloom.sources.files.part_stream import BOM, PartStream, ReadRules, Source
from batchloom.sources.formats.csv_format import read_csv
from batchloom.sources.formats.json_list_format import WRAPPERS, read_json, read_object, scan_brackets
from batchloom.sources.formats.jsonl_format import read_jsonl
from batchloom.sources.formats.record_faults import ARC_REMEDY, INDEX_REMEDY, find_dump
from batchloom.sources.formats.text_format import (
    NEWLINE,
    BlankLineDelimiter,
    Delimiter,
    FixedDelimiter,
    read_cut,
    read_delimited,
    read_text_file,
)
from batchloom.sources.formats.warc_format import WARC_MAGIC, read_warc
from batchloom.sources.formats.webdataset_format import read_samples
from batchloom.sources.splits import SplitRequest

# Formats that an input can be declared to have (``data_type``).
InputFormat = Literal["json", "jsonl", "csv", "parquet", "arrow", "hf_dataset"]
INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)

CutRule = Literal["whole", "delimiter", "text", "row groups"]
SPLIT_WORDS = ("auto", "file", "line", "paragraph")
# Kind of a file that is one record.
JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class ReadMethod:
    """Method that finds the records of a source.

    Attributes:
        name: name of the method.
        cut: where a file is cut into parts: ``whole``: nowhere; ``delimiter``: after the delimiter of records;
            ``text``: near the offset, where the text suggests it; ``row groups``: at those of a table.
        read: reads the records of a part; None for tables, which need random access.
        delimiter: returns the delimiter for the rule ``delimiter``.
        numbers: whether a record's number is that of its line or row; None: only its position in the file is known.
    """

    name: str
    cut: CutRule
    read: Callable[[PartStream, ReadRules], Iterator[Records]] | None
    delimiter: Callable[[ReadRules], Delimiter] | None = None
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
        ReadMethod("json", "whole", read_json, numbers="row"),
        ReadMethod("object", "whole", read_object, numbers="row"),
        ReadMethod("csv", "whole", read_csv, numbers="row"),
        ReadMethod("table", "row groups", None, numbers="row"),
        ReadMethod("samples", "whole", read_samples, numbers="row"),
        ReadMethod("warc", "whole", read_warc, numbers="row"),
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
        SourceFormat(JSON_OBJECT, "one JSON object", frozenset(), "object", ("json", "jsonl")),
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
        SourceFormat("warc", "a web archive", parse_suffixes("warc wet"), "warc"),
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
# Bytes of UTF-8 for a byte of another encoding.
_MAX_GROWTH = 3
_BINARY_METHODS = frozenset(("table", "samples", "warc"))
KIND_BY_SUFFIX = {suffix: kind for kind, source_format in FORMATS.items() for suffix in source_format.suffixes}
KIND_BY_MAGIC = {magic: kind for kind, source_format in FORMATS.items() for magic in source_format.magic}
_BINARY_MAGIC = (*KIND_BY_MAGIC, b"PK\x03\x04")
KIND_BY_FILE_NAME = {name: kind for kind, source_format in FORMATS.items() for name in source_format.file_names}
COLUMNAR_KINDS = tuple(kind for kind, source_format in FORMATS.items() if source_format.method == "table")
# A file of these is read from its beginning to its end.
WHOLE_KINDS = frozenset(
    kind
    for kind, source_format in FORMATS.items()
    if source_format.method and READ_METHODS[source_format.method].cut == "whole"
)


def choose_read_method(source: Source, rules: ReadRules) -> str:
    """Return the name of the method that finds the documents of a source."""
    if method := FORMATS[source.kind].method:
        return method
    if rules.split_on == "auto":
        large = not source.is_plain or source.size > rules.limits.whole_text_bytes
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
    cut = get_read_method(source, rules).cut
    member = source.member
    is_direct = source.is_plain and (member is None or member.direct)
    # Only a complete read verifies a checksum; tables are read in ranges in any case.
    has_checksum = member is not None and member.crc is not None and cut != "row groups"
    return is_direct and not has_checksum and cut != "whole"


_WRAPPED_LIST_PATTERN = re.compile(rb'"(?:%b)"\s*:\s*$' % "|".join(WRAPPERS).encode())
_KEY_REACH = 64
_NO_VALUE = object()

# A list of records, one record per line, a single record, or anything else.
JsonShape = Literal["list", "lines", "object", "other"]
_FEATHER_1 = b"FEA1"
SNIFF_BYTES = 8192
FIRST_LINE_BYTES = 1 << 20

_XML = ".xml"
_INDEX_LABELS = frozenset(parse_suffixes("cdx cdxj wat")) | {"index of a web archive"}
# Names of labels in the samples of WebDataset: classes, indices, ids and addresses.
_LABEL_SUFFIXES = frozenset(parse_suffixes("cls cls2 class count index inx id url"))
_NO_TABLE_REMEDY = "rename it to end in .txt if it is meant as text, else fetch it again"
_FEATHER_REMEDY = "write it again with pyarrow.feather.write_feather(table, path)"
_IMPORT_REMEDY = "it holds token ids: batchloom import reads them"
_TO_JSONL_REMEDY = "convert it to JSON Lines (one object with a text field per line) first"
_UNREADABLE_REMEDIES = {
    **dict.fromkeys(_LABEL_SUFFIXES, "labels are no documents: name the texts, or rename it to end in .txt"),
    **dict.fromkeys(parse_suffixes("ipynb orc avro xlsx xls db sqlite pkl pickle pt npz"), _TO_JSONL_REMEDY),
    **dict.fromkeys(parse_suffixes("pdf docx doc odt epub rtf"), "extract its text first"),
    **dict.fromkeys(parse_suffixes("ds npy"), _IMPORT_REMEDY),
    **dict.fromkeys(parse_suffixes("7z rar"), "unpack it first, then name the folder"),
    **dict.fromkeys(parse_suffixes("cdx cdxj wat"), INDEX_REMEDY),
    ".arc": ARC_REMEDY,
    ".br": "compress it with gzip or zstd instead",
}
_COMPRESSED_TABLE_REMEDY = "decompress it first: tables need random access, and are compressed internally"
_RELOCATED_ERRORS = (InputError, InputMissingError, AccessError, DownloadError)
_MAX_COMPRESSED_BYTES = 64 << 10


def starts_with_list(start: bytes) -> bool:
    """Return whether the text begins with a list."""
    return start.removeprefix(BOM).lstrip().startswith(b"[")


def detect_json_shape(start: bytes, *, truncated: bool) -> JsonShape:
    """Return the layout of a JSON file that begins with ``start``.

    ``start`` holds a complete line unless the line is too long. ``truncated`` states whether the file
    continues after ``start`` without a line end.
    """
    text = start.removeprefix(BOM).lstrip()
    line, newline, next_lines = text.partition(b"\n")
    value = _decode_line(line)
    if text.startswith(b"["):
        # Complete lists, one per line, count as records, though bad ones.
        if value is not _NO_VALUE and next_lines.strip():
            return "lines"
        return "list" if text[1:].lstrip()[:1] in (b"{", b"]", b"") else "other"
    if not text.startswith(b"{"):
        return "other"
    if isinstance(value, dict):
        if next_lines.strip():
            return "lines"
        wrapped = any(isinstance(value.get(key), list) for key in WRAPPERS)
        return "list" if wrapped else "object"
    if _opens_wrapped(text):
        return "list"
    if not truncated and isinstance(_decode_line(text), dict):
        return "object"
    is_long = truncated and not newline
    return "lines" if is_long or isinstance(_decode_line(next_lines.partition(b"\n")[0]), dict) else "other"


def _decode_line(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except JSON_DECODE_ERRORS:
        return _NO_VALUE


def _opens_wrapped(text: bytes) -> bool:
    """Return whether a list opens under one of the known keys."""
    scan = scan_brackets(text)
    opened_offsets = scan.offsets[np.flatnonzero((scan.depths == 2) & (scan.steps > 0))]
    return any(
        text[offset : offset + 1] == b"[" and _WRAPPED_LIST_PATTERN.search(text[max(0, offset - _KEY_REACH) : offset])
        for offset in opened_offsets.tolist()
    )


@dataclass(frozen=True, slots=True)
class FileDetection:
    """Detected kind of a file."""

    kind: str | None
    compression: Compression | None = None
    # What an unreadable file is counted as (``.csv``, ``binary``), and the advice for it.
    label: str = ""
    remedy: str = ""
    # A file that seems to hold neither records nor text is read only if an input names it.
    sure: bool = True

    @property
    def is_unread_data(self) -> bool:
        """True for a file that is not read although it holds data, by its label."""
        no_data = self.label.startswith("binary") or self.label in _INDEX_LABELS | _LABEL_SUFFIXES
        return self.kind is None and not no_data


@dataclass(frozen=True, slots=True)
class DetectedFile:
    """Earlier detection result, valid for this size and modification time."""

    size: int
    mtime_ns: int
    kind: str
    compression: Compression | None


def detect_kind_by_name(name: str) -> FileDetection | None:
    """Return the kind of a file by its name; None if its content must decide."""
    last = (name.rpartition("/")[2] or name.rstrip("/").rpartition("/")[2]).lower()
    ending = get_suffix(last)
    if ending not in COMPRESSION_BY_SUFFIX:
        return _detect_kind_by_suffixes(ending, None, KIND_BY_FILE_NAME.get(last))
    last = last[: -len(ending)]
    return _detect_kind_by_suffixes(get_suffix(last), ending, KIND_BY_FILE_NAME.get(last))


@lru_cache(maxsize=1024)
def _detect_kind_by_suffixes(suffix: str, packed: str | None, kind_by_name: str | None) -> FileDetection | None:
    """Return the kind by suffix and compression suffix, else that of the name."""
    compression = COMPRESSION_BY_SUFFIX[packed] if packed else None
    if suffix in _UNREADABLE_REMEDIES:
        return FileDetection(None, compression, suffix, _UNREADABLE_REMEDIES[suffix])
    kind = KIND_BY_SUFFIX.get(suffix, kind_by_name)
    if kind in COLUMNAR_KINDS and packed:
        return FileDetection(None, compression, suffix + packed, _COMPRESSED_TABLE_REMEDY)
    return FileDetection(kind, compression, suffix if suffix == _XML else "") if kind else None


def needs_content(name_detection: FileDetection | None) -> bool:
    """Return whether the content of a file decides its kind regardless of the name."""
    if name_detection is None or name_detection.kind is None:
        return name_detection is None
    return FORMATS[name_detection.kind].sniffed or name_detection.label == _XML


def detect_kind_by_content(
    name_detection: FileDetection | None, name: str, start: bytes, compression: Compression | None
) -> FileDetection:
    """Return the kind of a file by its first bytes, decompressed.

    ``start`` holds at least ``SNIFF_BYTES`` and a line, or the complete file if it is shorter.
    """
    if name_detection is None or name_detection.kind in COLUMNAR_KINDS:
        table = _detect_columnar(start, compression) or name_detection
        if table is not None and table is name_detection and _decode_text(start):
            return FileDetection(None, compression, f"text named {get_suffix(name).lower()}", _NO_TABLE_REMEDY)
        if table is not None:
            return table
    if name_detection is None or name_detection.label == _XML:
        archive = _detect_archive(start, compression) or name_detection
        if archive is not None:
            return archive
    if name_detection is not None:
        return _detect_json(start, compression, lines=name_detection.kind == "jsonl")
    text = _decode_text(start)
    if text is None:
        label = get_suffix(name).lower() or "without suffix"
        return FileDetection(None, compression, f"binary {label}", "only text, code, JSON, CSV and tables are read")
    if text.startswith("{") and isinstance(_decode_line(text.splitlines()[0].encode()), dict):
        return FileDetection("jsonl", compression)
    if starts_with_list(start) and text[1:].lstrip().startswith("{"):
        return _detect_json(start, compression)
    return FileDetection("text", compression)


def _detect_archive(start: bytes, compression: Compression | None) -> FileDetection | None:
    """Return the kind of a web archive or dump; None for another file."""
    text = start.removeprefix(BOM).lstrip()
    if text.startswith(WARC_MAGIC):
        return FileDetection("warc", compression)
    dump = find_dump(text)
    return FileDetection(None, compression, *dump) if dump else None


def _detect_json(start: bytes, compression: Compression | None, *, lines: bool = False) -> FileDetection:
    """Detect one record per line or a list; ``lines`` if the name means JSON Lines."""
    shape = detect_json_shape(start, truncated=len(start) >= FIRST_LINE_BYTES)
    if lines:
        return FileDetection("json" if starts_with_list(start) and shape != "lines" else "jsonl", compression)
    if shape in ("list", "lines"):
        return FileDetection("json" if shape == "list" else "jsonl", compression)
    if shape == "object":
        return FileDetection(JSON_OBJECT, compression)
    return FileDetection("json", compression, "JSON without records", sure=False)


def _detect_columnar(start: bytes, compression: Compression | None) -> FileDetection | None:
    """Return the kind of a columnar file, or None for another file."""
    if start.startswith(_FEATHER_1):
        return FileDetection(None, compression, "Feather version 1", _FEATHER_REMEDY)
    kind = next((kind for magic, kind in KIND_BY_MAGIC.items() if start.startswith(magic)), None)
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


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """Declaration of one input.

    Attributes:
        form: format of its files; None to detect it by name and content.
        location: origin of the declaration, for messages; empty if the input itself declares it.
        follow_links: whether to follow symbolic links that lead out of its folder.
        split: split of its data sets that is read; None for ``train``, or the only one.
        val_split: split of its data sets whose documents are the subset ``val``; None for none.
        encoding: encoding of its texts; empty for UTF-8.
        subset: subset of all its documents; empty if their hashes choose.
        include: patterns of the only files that are read; empty for all.
        exclude: patterns of those that are not read.
        keeps_tags: whether the tags of web pages become text.
    """

    form: InputFormat | None = None
    location: str = ""
    follow_links: bool = False
    split: SplitRequest | None = None
    val_split: SplitRequest | None = None
    encoding: str = ""
    subset: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keeps_tags: bool = True


def choose_encoding(kind: str, encoding: str) -> str:
    """Return the encoding of a file; empty for kinds that declare their own."""
    return "" if FORMATS[kind].method in _BINARY_METHODS else encoding


def matches_format(form: InputFormat | None, kind: str | None) -> bool:
    """Return whether files of this kind match the declared format."""
    return form in (None, "hf_dataset") or (kind is not None and form in FORMATS[kind].data_types)


def describe_format_mismatch(form: InputFormat, kind: str) -> str:
    """Describe a file whose kind contradicts the declared format."""
    label = FORMATS[kind].label
    if kind in INPUT_FORMATS:
        return f"holds {label} ({kind}), and data_type says {form}; write data_type: {kind}, or leave data_type out"
    return f"holds {label}, and data_type says {form}; leave data_type out, or name another file"


def reraise_with_location(error: InputError, location: str) -> NoReturn:
    """Raise the error of an input again, prefixed with the declaration's location."""
    if location and type(error) in _RELOCATED_ERRORS:
        raise type(error)(f"{location}: {error}") from error
    raise error


def detect_kind(
    name_detection: FileDetection | None,
    name: str,
    read_start: Callable[[Compression | None], bytes],
) -> FileDetection:
    """Return the kind of a file by its name, or by its first bytes if they decide.

    ``read_start`` returns the first bytes, decompressed and in UTF-8; it is called only if needed.
    """
    if name_detection is not None and not needs_content(name_detection):
        return name_detection
    compression = COMPRESSION_BY_SUFFIX.get(get_suffix(name.lower()))
    head = read_start(compression)
    if compression is None:
        compression = detect_compression(head)
        head = read_start(compression) if compression else head
    return detect_kind_by_content(name_detection, name, head, compression)


def _decode_start(start: bytes, encoding: str) -> bytes:
    """Return the first bytes of a text in UTF-8; those of any other file as they are."""
    if not encoding or detect_compression(start) or start.startswith(_BINARY_MAGIC):
        return start
    try:
        decoded = Transcoder(io.BytesIO(start), encoding, is_cut=True).read(_MAX_GROWTH * len(start))
        return decoded.decode(errors="strict").encode()
    except UnicodeError:
        return start


def detect_file_kind(source: Source, encoding: str) -> FileDetection:
    """Return the kind of a local or remote file; the kind of ``source`` is ignored."""
    name = redact_url(source.path)
    return detect_kind(detect_kind_by_name(name), name, partial(_read_start, source, encoding))


def detect_declared_kind(source: Source, verdict: FileDetection, declared: DeclaredInput) -> FileDetection:
    """Return the kind of a file with a declared format; ``verdict`` is as detected."""
    form = declared.form
    if form in (None, "hf_dataset") or verdict.kind is None or FORMATS[verdict.kind].method:
        return verdict
    # The name is that of a text, so the content decides.
    name_detection = FileDetection("json") if form in ("json", "jsonl") else None
    head = _read_start(source, declared.encoding, verdict.compression)
    content_detection = detect_kind_by_content(name_detection, redact_url(source.path), head, verdict.compression)
    if form == "csv" and content_detection.kind == "text":
        # Any text may be CSV, unless it holds records of another kind.
        return FileDetection("csv", verdict.compression)
    if matches_format(form, content_detection.kind) and (content_detection.sure or content_detection.kind == form):
        return content_detection
    return verdict


def _read_start(source: Source, encoding: str, compression: Compression | None) -> bytes:
    """Return the first bytes of a file in UTF-8, with a full line of JSON."""
    unpacked_source = source if source.compression == compression else replace(source, compression=compression)
    with PartStream(unpacked_source) as stream:
        raw = stream.read_up_to(SNIFF_BYTES)
        if _needs_line(head := _decode_start(raw, encoding)):
            head = _decode_start(raw + stream.read_up_to(FIRST_LINE_BYTES), encoding)
        return head


def _needs_line(start: bytes) -> bool:
    """Return whether the first line of JSON is still incomplete."""
    return b"\n" not in start and start.lstrip()[:1] in (b"{", b"[")


def list_archive_sources(
    archive: Archive,
    declared: DeclaredInput,
    choice: FileChoice,
    skipped_counts: Counter[str],
    note_unread: Callable[[str, FileDetection, int], None],
) -> Iterator[tuple[str, Source]]:
    """Yield the name and source, named ``archive/member``, of each readable member.

    ``note_unread`` gets the name, the verdict and the size of each other one.
    """
    names: Counter[str] = Counter()
    for entry in list_archive(archive, skipped_counts):
        if not choice.selects(f"{archive.name}/{entry.name}", declared.include, declared.exclude):
            skipped_counts[NOT_SELECTED] += 1
            continue
        verdict = _detect_member_kind(archive, entry, declared.encoding)
        if verdict.kind is None or not verdict.sure:
            skipped_counts[verdict.label] += 1
            note_unread(f"{archive.name}/{entry.name}", verdict, entry.member.size)
        else:
            # An archive may hold a name twice, and paths must identify sources.
            names[entry.name] += 1
            repeat_suffix = f"#{names[entry.name]}" if names[entry.name] > 1 else ""
            yield (
                entry.name,
                Source(
                    f"{archive.name}/{entry.name}{repeat_suffix}",
                    f"{archive.path}/{entry.name}{repeat_suffix}",
                    verdict.kind,
                    verdict.compression,
                    entry.member.size,
                    archive.mtime_ns,
                    entry.member,
                    archive.revision,
                    encoding=choose_encoding(verdict.kind, declared.encoding),
                    subset=declared.subset,
                ),
            )


def _detect_member_kind(archive: Archive, entry: ArchiveEntry, encoding: str) -> FileDetection:
    """Return the kind of a member, "broken" if it contradicts its own name."""
    if not needs_content(name_detection := detect_kind_by_name(entry.name)):
        return name_detection or FileDetection(None, None, "unknown")
    try:
        with closing(entry.start()) as file:
            head = _FileHead(file, encoding)
            try:
                return detect_kind(name_detection, entry.name, head.read_start)
            except (DecompressionError, EOFError):
                if head.damaged:
                    raise
                return FileDetection(None, None, "broken", "fetch or compress it again")
    except (DecompressionError, EOFError, tarfile.TarError) as error:
        name = f"{archive.name}/{entry.name}"
        raise InputError(
            f"{name} is broken ({str(error) or 'it is cut short'}): fetch or pack the archive again, or leave it out."
        ) from error


@final
class _FileHead:
    """First bytes of a file that can be read once, front to back."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._raw = b""
        self._encoding = encoding
        self.damaged = False

    def read_start(self, compression: Compression | None) -> bytes:
        """Return the first bytes of the file, decompressed and decoded."""
        raw = self._read_raw(_MAX_COMPRESSED_BYTES if compression else SNIFF_BYTES)
        head = _decode_start(_decompress_start(raw, compression), self._encoding)
        if _needs_line(head):
            head = _decode_start(_decompress_start(self._read_raw(FIRST_LINE_BYTES), compression), self._encoding)
        return head

    def _read_raw(self, size: int) -> bytes:
        self.damaged = True
        while len(self._raw) < size and (data := self._file.read(size - len(self._raw))):
            self._raw += data
        self.damaged = False
        return self._raw


def _decompress_start(raw: bytes, compression: Compression | None) -> bytes:
    """Decompress the beginning of a file, which may be cut anywhere."""
    if compression is None:
        return raw
    stream = make_decompressor(compression, io.BytesIO(raw))
    chunks = []
    size = 0
    try:
        while size < FIRST_LINE_BYTES and (data := stream.read(SNIFF_BYTES)):
            chunks.append(data)
            size += len(data)
    except EOFError:
        pass
    return b"".join(chunks)
