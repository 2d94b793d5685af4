"""``convert``: write any input as JSON Lines, JSON or Parquet, in bounded memory."""

import contextlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast, final

import orjson
import zstandard
from isal import igzip

from batchloom.chat.schema import format_columns, get_column_value, match_mapping_columns
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import (
    BatchloomError,
    InputError,
    InputMissingError,
    OutputError,
    SchemaError,
    StoreConflictError,
    UnusableRecordError,
)
from batchloom.core.files import PARTIAL_SUFFIX, refuse_url
from batchloom.core.settings import is_bool, quote_value, raise_problems, suggest
from batchloom.core.wording import format_list
from batchloom.preparation.documents.record_parsers import read_sample_rows
from batchloom.preparation.listing.input_listing import list_inputs
from batchloom.preparation.report.progress import JobCounters, Listener, Note, Phase
from batchloom.preparation.request.inputs import check_no_manifests, split_sample_count
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe, parse_names
from batchloom.preparation.settings.recipe import Recipe, as_recipe_inputs, is_valid_path
from batchloom.preparation.units.unit_report import encode_quarantine_line
from batchloom.sources import (
    PartReader,
    ReadLimits,
    ReadRules,
    SourceListing,
    SourcePart,
    detect_kind_by_name,
    make_bad_record_error,
    prefetch_sources,
)
from batchloom.sources.files import Compression, Source
from batchloom.sources.formats import COLUMNAR_KINDS
from batchloom.store import AtomicFile

# More columns than this, including nested fields, mean that objects are used as dictionaries.
MAX_COLUMNS = 10_000
_GROUP_BYTES = 32 << 20
# Integers up to this are exact as float64.
_MAX_EXACT_INT = 1 << 53
_MAX_DEPTH = 64
_TYPE_LABELS = {
    bool: "true or false",
    int: "whole numbers",
    float: "fractions",
    str: "text",
    bytes: "bytes",
    dict: "objects",
    list: "lists",
}


@final
class UntabularError(BatchloomError):
    """A column holds values that a table cannot hold."""

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


@dataclass(slots=True)
class ColumnType:
    """Observed type of a column, of an object field or of list items."""

    kinds: list[type] = field(default_factory=list)  # Types of its values except null, in order of appearance
    least: int = 0  # Smallest integer, at most 0
    most: int = 0  # Largest integer, at least 0
    count: int = 0
    fields: "dict[str, ColumnType]" = field(default_factory=dict)  # Type of each field of the objects
    present: dict[str, int] = field(default_factory=dict)  # Number of objects that have each field
    items: "ColumnType | None" = None  # Type of the items of the lists

    def add(self, values: Sequence[Any], path: tuple[str, ...] = ()) -> None:
        if len(path) > _MAX_DEPTH:
            raise UntabularError(path[:1], f"is nested more than {_MAX_DEPTH} levels deep")
        value_types = dict.fromkeys(map(type, values))
        value_types.pop(type(None), None)
        for kind in value_types:
            kind = list if kind is tuple else kind  # noqa: PLW2901
            if kind not in self.kinds:
                self.kinds.append(kind)
        self._check_kinds(path)
        if int in value_types:
            numbers = [value for value in values if type(value) is int]
            self.least = min(self.least, *numbers)
            self.most = max(self.most, *numbers)
        if int in self.kinds:
            self._check_numbers(path)
        if dict in value_types:
            self._add_objects([value for value in values if type(value) is dict], path)
        if list in self.kinds:
            self.items = self.items or ColumnType()
            nested_lists = [value for value in values if type(value) in (list, tuple)]
            self.items.add(list(chain.from_iterable(nested_lists)), (*path, "[]"))

    def _add_objects(self, rows: list[dict[str, Any]], path: tuple[str, ...]) -> None:
        columns: dict[str, list[Any]] = {}
        for row in rows:
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        self.count += len(rows)
        for name, values in columns.items():
            self.present[name] = self.present.get(name, 0) + len(values)
            self.fields.setdefault(name, ColumnType()).add(values, (*path, name))
        if len(self.fields) > MAX_COLUMNS:
            raise UntabularError(path, f"holds objects of more than {MAX_COLUMNS:,} different fields")

    def _check_kinds(self, path: tuple[str, ...]) -> None:
        unsupported_types = [kind.__name__ for kind in self.kinds if kind not in _TYPE_LABELS]
        if unsupported_types:
            raise UntabularError(path, f"holds values of type {unsupported_types[0]}")
        if len(self.kinds) > 1 and set(self.kinds) != {int, float}:
            type_labels = " and ".join(_TYPE_LABELS[kind] for kind in self.kinds)
            raise UntabularError(path, f"holds {type_labels}")

    def _check_numbers(self, path: tuple[str, ...]) -> None:
        if float in self.kinds:
            if max(-self.least, self.most) > _MAX_EXACT_INT:
                raise UntabularError(path, "holds fractions and whole numbers too large for float64")
        elif self.most >= 1 << (64 if self.least == 0 else 63) or self.least < -(1 << 63):
            raise UntabularError(path, "holds whole numbers of more than 64 bits")

    def find_mismatched_row(self, rows: Sequence[Any], path: tuple[str, ...]) -> int | None:
        """Return the first row whose value at ``path`` has another type, or None."""
        for number, row in enumerate(rows):
            row_type = ColumnType()
            try:
                row_type.add([row])
            except UntabularError:
                return number
            value_type, expected_type = row_type._lookup(path), self._lookup(path)
            if value_type and expected_type and value_type.kinds and value_type.kinds[0] is not expected_type.kinds[0]:
                return number
        return None

    def _lookup(self, path: tuple[str, ...]) -> "ColumnType | None":
        shape: ColumnType | None = self
        for name in path:
            if shape is not None:
                shape = shape.items if name == "[]" else shape.fields.get(name)
        return shape

    def walk(self, path: tuple[str, ...] = ()) -> "Iterator[tuple[tuple[str, ...], ColumnType]]":
        """Yield this type and all nested types, each with its path."""
        yield path, self
        for name, inner in self.fields.items():
            yield from inner.walk((*path, name))
        if self.items is not None:
            yield from self.items.walk((*path, "[]"))


def format_column_path(path: Iterable[str]) -> str:
    """Format a path: ``messages[].content``."""
    return ".".join(path).replace(".[]", "[]")


def describe_type_changes(shape: ColumnType) -> list[str]:
    """Describe where nulls and floats in the table differ from the rows."""
    mixed, absent = [], []
    for path, column_type in shape.walk():
        if len(column_type.kinds) > 1:
            mixed.append(format_column_path(path))
        absent += [
            format_column_path((*path, name))
            for name, count in column_type.present.items()
            if count < column_type.count
        ]
    notes = []
    if mixed:
        notes.append(f"Whole numbers are written as fractions of equal value in {_format_names(mixed)}.")
    if absent:
        notes.append(f"Null is written where rows lack {_format_names(absent)}; .jsonl keeps rows as they are.")
    return notes


def _format_names(names: list[str]) -> str:
    return format_list([repr(name) for name in names], 5)


Row = dict[str, Any]


def coerce_row(value: Any) -> Row:
    """Return a reader's value as a row; a text becomes a row of one column."""
    return {"text": value} if isinstance(value, str) else value


class RowFile(Protocol):
    """Protocol of a file that takes rows in order."""

    def write(self, batch: Records, *, nan: bool) -> None:
        """Append rows; those that cannot be written become bad records."""

    def finish(self) -> None:
        """Write the remaining data; the underlying file stays open."""

    def abandon(self) -> None:
        """Give the file up; the underlying file is deleted by its owner."""


def _encode_row(row: Row, *, nan: bool) -> bytes:
    """Encode a row as one line of JSON with unchanged values.

    ``nan`` states whether the source can hold NaN, which orjson would write as null.
    """
    try:
        line = orjson.dumps(row, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError:
        return _encode_row_stdlib(row)
    return _encode_row_stdlib(row) if nan and b"null" in line else line


def _encode_row_stdlib(row: Row) -> bytes:
    """Encode a row with the standard library."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError):
        raise UnusableRecordError(_describe_unencodable(row)) from None


def _describe_unencodable(row: Row) -> str:
    remedy = "leave the column out with --columns, or write .parquet"
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return f"column {name!r} holds what JSON cannot hold ({error}); {remedy}"
    return f"the row cannot be written as JSON; {remedy}"


@final
class JsonRowFile:
    """JSON Lines, or one array with one row per line (at least one row)."""

    def __init__(
        self, file: IO[bytes] | io.RawIOBase, *, array: bool = False, compression: Compression | None = None
    ) -> None:
        self._array = array
        self._before, self._after = (b"[\n", b"") if array else (b"", b"\n")
        self._out: Any = file
        self._packed = compression is not None
        if compression == "gzip":
            # The header has neither a name nor a time, so that the same rows give the same bytes.
            self._out = igzip.IGzipFile(filename="", mode="wb", fileobj=file, mtime=0)  # type: ignore[no-untyped-call]
        elif compression == "zstd":
            self._out = zstandard.ZstdCompressor().stream_writer(cast("IO[bytes]", file), closefd=False)

    def write(self, batch: Records, *, nan: bool) -> None:
        batch.convert(lambda row: _encode_row(row, nan=nan), lambda _: "")
        if batch.values:
            between = b",\n" if self._array else b"\n"
            self._out.write(self._before + between.join(batch.values) + self._after)
            self._before = between if self._array else b""

    def finish(self) -> None:
        if self._array:
            self._out.write(b"\n]\n")
        if self._packed:
            self._out.close()

    def abandon(self) -> None:
        pass


def build_arrow_schema(shape: ColumnType) -> Any:
    """Return the Arrow schema of rows of this type."""
    import pyarrow as pa  # noqa: PLC0415 - slow import that other outputs do not need

    if not shape.fields:
        raise UntabularError((), "the rows have no columns")
    scalar_types = {bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}

    def choose_type(column_type: ColumnType, path: tuple[str, ...]) -> Any:
        kinds = set(column_type.kinds)
        if not kinds:
            return pa.null()
        if float in kinds:
            return pa.float64()
        if int in kinds:
            return pa.int64() if column_type.most < 1 << 63 else pa.uint64()
        if list in kinds:
            return pa.list_(choose_type(column_type.items or ColumnType(), (*path, "[]")))
        if dict in kinds:
            if not column_type.fields:
                raise UntabularError(path, "holds objects without fields")
            return pa.struct([(name, choose_type(inner, (*path, name))) for name, inner in column_type.fields.items()])
        return scalar_types[column_type.kinds[0]]

    return pa.schema([(name, choose_type(inner, (name,))) for name, inner in shape.fields.items()])


@final
class ParquetRowFile:
    """A Parquet file with a known schema and row groups of about 32 MiB."""

    def __init__(self, file: IO[bytes] | io.RawIOBase, schema: Any) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415 - as above

        self._schema = schema
        self._writer: Any = pq.ParquetWriter(file, schema, compression="zstd")
        self._ready: list[Any] = []
        self._size = 0

    def write(self, batch: Records, *, nan: bool) -> None:  # noqa: ARG002 - Parquet holds NaN
        import pyarrow as pa  # noqa: PLC0415 - as above

        if batch.values:
            columns = [pa.array([row.get(field.name) for row in batch.values], field.type) for field in self._schema]
            self._ready.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._size += self._ready[-1].nbytes
        if self._size >= _GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        # pyarrow closes a writer that is deleted, and would write to the underlying file after that was closed.
        with contextlib.suppress(OutputError):
            self._writer.close()
        self._writer.is_open = False

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - as above

        if self._ready:
            table = pa.Table.from_batches(self._ready)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._ready, self._size = [], 0


RowMapper = Callable[[Row], Row]


def make_row_mapper(mapping: Mapping[str, str], columns: Sequence[str] | None) -> RowMapper | None:
    """Return the function from input rows to output rows; None if rows stay unchanged."""
    if not mapping and columns is None:
        return None
    roles = {column: role for role, column in mapping.items()}

    def choose(row: Row) -> Row:
        renamed_row = _rename_columns(row, roles) if roles else row
        if columns is None:
            return renamed_row
        return {name: renamed_row[name] for name in columns if name in renamed_row}

    return choose


def _rename_columns(row: Row, roles: Mapping[str, str]) -> Row:
    names = [roles.get(name, name) for name in row]
    renamed_row = dict(zip(names, row.values(), strict=True))
    if len(renamed_row) < len(names):
        raise _column_conflict_error(next(name for name in names if names.count(name) > 1))
    for column, role in roles.items():
        value = None if column in row else get_column_value(row, column)
        if value is not None:
            if role in renamed_row:
                raise _column_conflict_error(role)
            renamed_row[role] = value
    return renamed_row


def _column_conflict_error(role: str) -> UnusableRecordError:
    return UnusableRecordError(
        f"a column {role!r} already exists next to the one mapped to it; map that one to another role, or rename "
        "it first"
    )


def check_output_columns(mapping: Mapping[str, str], columns: object) -> list[str]:
    """Return the problems of the requested columns, before any row is read."""
    problems = [f"map.{role}: names no column; leave {role}= out" for role in mapping if not mapping[role]]
    problems += [
        f"map: column {column!r} is named for several roles; name it once"
        for column, count in sorted(Counter(mapping.values()).items())
        if column and count > 1
    ]
    if columns is None:
        return problems
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not columns
        or not all(isinstance(name, str) for name in columns)
    ):
        return [*problems, f"columns: {quote_value(columns)} is not a list of column names"]
    renamed = {column: role for role, column in mapping.items() if column not in mapping}
    problems += [
        f"columns: {name!r} is called {renamed[name]!r} after --map; use that name"
        for name in columns
        if name in renamed
    ]
    return problems + [f"columns: {name!r} is named twice" for name, n in sorted(Counter(columns).items()) if n > 1]


def find_missing_columns(
    mapping: Mapping[str, str], columns: Sequence[str] | None, rows: Iterable[Row]
) -> list[tuple[str, str]]:
    """Return the requested columns that no row has, as (option, column)."""
    missing_columns = {("--map", column) for column in mapping.values()}
    missing_columns |= {("--columns", name) for name in columns or () if name not in mapping}
    for row in rows:
        missing_columns -= {
            missing_column
            for missing_column in missing_columns
            if missing_column[1] in row or get_column_value(row, missing_column[1]) is not None
        }
        if not missing_columns:
            break
    return sorted(missing_columns)


def unknown_column_error(option: str, column: str, column_names: Sequence[str]) -> SchemaError:
    hint = suggest(column, column_names) or f"; name one of them with {option}"
    return SchemaError(
        f"no column {column!r} ({option}): the first records have {format_columns(column_names)}{hint}", column_names
    )


OutputFormat = Literal["jsonl", "json", "parquet"]

STANDARD_OUTPUT = "-"
_OUTPUT_SUFFIXES = ".jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet"
_MAX_REPORTED_BAD = 10


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of a conversion.

    Attributes:
        path: the file; None for standard output.
        form: ``jsonl``, ``json`` or ``parquet``.
        rows: number of written rows.
        bytes: size of the file; 0 for standard output.
        quarantined: number of unusable records.
        quarantine: the file that describes them, or None.
        notes: differences between the file and the input, one sentence each.
    """

    path: Path | None
    form: OutputFormat
    rows: int
    bytes: int
    quarantined: int
    quarantine: Path | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ConversionTarget:
    """Destination of the rows: ``path`` is None for standard output."""

    path: Path | None
    form: OutputFormat
    compression: Compression | None

    @property
    def quarantine(self) -> Path | None:
        return self.path and self.path.with_name(self.path.name + ".quarantine.jsonl")


def convert(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    mapping: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    text_field: str | None = None,
    input_split: str | None = None,
    encoding: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    split_on: str = "auto",
    max_bad: int | str = "0.1%",
    force: bool = False,
    follow_links: bool = False,
    allow_skipped: bool = False,
    listener: Listener | None = None,
) -> ConversionResult:
    """Write the rows of any input that ``prepare`` reads into one file, in order.

    Values stay unchanged, and texts become rows ``{"text": ...}``. The file is renamed into place, so
    an existing file is complete. For Parquet the input is read twice, first for the column types.

    Args:
        inputs: files, folders and globs, also with a number of random records (``INPUT#N``).
        out: a name ending in .jsonl or .json (also .gz, .zst) or .parquet; ``-`` writes JSON
            lines to standard output.
        mapping: columns by role; each is renamed to its role.
        columns: output columns, in order, by their names in the output.
        text_field: the single column that holds the text: rows are ``{"text": ...}``.
        input_split: split of the data sets in folders, archives and on the Hub; see ``ReadRecipe``.
        encoding: encoding of text, JSON and CSV files; None for UTF-8.
        include: globs of the files of folders and archives to read; see ``ReadRecipe``.
        exclude: globs of those to leave out.
        split_on: rule that splits a text file into documents; see ``ReadRecipe``.
        max_bad: maximum of unusable records: a number, or a share such as ``"0.1%"``, which
            allows at least 10.
        force: replace an existing file.
        follow_links: follow symbolic links that lead out of an input folder; else they are skipped.
        allow_skipped: go on if more than 1 % of the data files of an input are in forms that are not read.
        listener: called with notes and progress.

    Raises:
        SettingsError: options are unknown or contradict each other; lists all of them.
        InputMissingError, InputError, RecordError: an input cannot be used, or a Parquet column
            would hold values of several types.
        SchemaError: none of the first records has a requested column.
        TooManyBadRecordsError: more records are unusable than ``max_bad`` allows.
        StoreConflictError: the output exists, or another run writes it.
        OutputError: the output cannot be written.
    """
    target = _parse_target(out)
    input_paths = as_recipe_inputs(inputs)
    check_no_manifests(input_paths, "convert")
    counted_paths = [split_sample_count(path) for path in input_paths]
    recipe = Recipe(
        inputs=tuple(path for path, _ in counted_paths),
        sources=tuple(SourceRecipe(num_samples=count) for _, count in counted_paths),
        follow_links=follow_links,
        reading=ReadRecipe(
            text_field=text_field,
            mapping=dict(mapping or {}),
            input_split=input_split,
            encoding=encoding,
            include=parse_names(include),
            exclude=parse_names(exclude),
            split_on=split_on,
            allow_skipped=allow_skipped,
        ),
        max_bad=max_bad,
    )
    problems = check_output_columns(recipe.reading.mapping, columns)
    if text_field is not None and columns is not None:
        problems.append("columns: with text_field the only column is 'text'; give only one of the two")
    if not is_bool(force):
        problems.append(f"force: {quote_value(force)} is neither True nor False")
    raise_problems(problems)
    # A quarantine without its output is the remainder of a command that was killed.
    if not force and target.path is not None and os.path.lexists(target.path):
        raise StoreConflictError(f"{target.path} already exists; choose another --out, or replace it with --force.")
    hear = listener or (lambda _: None)
    field_mapping = recipe.reading.mapping
    if text_field is not None and ("." in text_field or "[]" in text_field):
        # A path into a row, as of --map.
        field_mapping, columns = {"text": text_field}, ["text"]
        text_field = None
    rules = ReadRules(text_field, split_on, ReadLimits())
    listing = _list_conversion_inputs(recipe, target, hear)
    resolved_mapping = _resolve_mapping(listing, rules, field_mapping, columns)
    job = _RowConversion(listing, rules, make_row_mapper(resolved_mapping, columns), max_bad, hear)
    return job.run(target)


def _parse_target(out: str | os.PathLike[str]) -> _ConversionTarget:
    name = os.fspath(out)
    refuse_url(name, "The output")
    if name == STANDARD_OUTPUT:
        return _ConversionTarget(None, "jsonl", None)
    if not is_valid_path(name):
        raise_problems([f"out: {quote_value(name)} is not a path; name a file"])
    verdict = detect_kind_by_name(name)
    packed = verdict.compression if verdict else None
    for form in ("jsonl", "json", "parquet"):
        if verdict and verdict.kind == form and packed in (None, "gzip", "zstd"):
            return _ConversionTarget(Path(name), form, packed)
    raise_problems([f"out: the name {Path(name).name!r} does not end in {_OUTPUT_SUFFIXES}"])
    raise AssertionError


def _list_conversion_inputs(recipe: Recipe, target: _ConversionTarget, hear: Listener) -> SourceListing:
    """List the input without the output and its partial files."""
    listing = list_inputs(recipe, any_columns=True)
    for note in listing.notes:
        hear(Note(note, is_warning=note in listing.warnings))
    if target.path is None or target.quarantine is None:
        return listing
    names = (target.path, target.quarantine)
    output_paths = {os.path.realpath(f"{name}{end}") for name in names for end in ("", PARTIAL_SUFFIX)}
    remaining_sources = tuple(source for source in listing.sources if os.path.realpath(source.path) not in output_paths)
    if not remaining_sources:
        raise InputMissingError(f"{target.path} is both the output and the only input; name another output.")
    if len(remaining_sources) < len(listing.sources):
        hear(Note(f"Left out an input that is the output: {target.path}.", is_warning=True))
    return replace(listing, sources=remaining_sources)


def _resolve_mapping(
    listing: SourceListing, rules: ReadRules, mapping: Mapping[str, str], columns: Sequence[str] | None
) -> Mapping[str, str]:
    """Match the mapping to the column names of the first records."""
    if not mapping and columns is None:
        return mapping
    samples = [(source, read_sample_rows(source, rules)[0]) for source in listing.sources]
    rows = [coerce_row(value) for _, sample_rows in samples for value in sample_rows]
    column_names = tuple(dict.fromkeys(name for row in rows for name in row))
    mapping = match_mapping_columns(mapping, column_names)
    source_prefix = f"{listing.sources[0].name}: " if len(listing.sources) == 1 else ""
    for option, column in find_missing_columns(mapping, columns, rows):
        raise SchemaError(f"{source_prefix}{unknown_column_error(option, column, list(column_names))}", column_names)
    for source, sample_rows in samples:
        # Texts have no columns to map.
        if sample_rows and source.kind not in ("text", "code"):
            names = tuple(dict.fromkeys(name for row in sample_rows for name in row))
            for option, column in find_missing_columns(mapping, None, sample_rows):
                error = unknown_column_error(option, column, names)
                raise SchemaError(f"{source.name}: {error}; or convert this file separately", names)
    return mapping


@final
class _RowConversion:
    """One conversion, read batch by batch, with the counts of bad records."""

    def __init__(
        self, listing: SourceListing, rules: ReadRules, choose: RowMapper | None, max_bad: int | str, hear: Listener
    ) -> None:
        self._listing, self._rules, self._choose = listing, rules, choose
        self._max_bad, self._hear = max_bad, hear

    def run(self, target: _ConversionTarget) -> ConversionResult:
        schema, notes = self._infer_schema() if target.form == "parquet" else (None, ())
        for note in notes:
            self._hear(Note(note, is_warning=True))
        size, quarantine = 0, None
        if target.path is None or target.quarantine is None:
            self._write(JsonRowFile(sys.stdout.buffer), None)
        else:
            with AtomicFile(target.path) as out, AtomicFile(target.quarantine) as bad:
                file: RowFile = (
                    JsonRowFile(out, array=target.form == "json", compression=target.compression)
                    if schema is None
                    else ParquetRowFile(out, schema)
                )
                self._write(file, bad)
                if self._counters.quarantined:
                    quarantine = target.quarantine
                    bad.finish()
                elif target.quarantine.exists():
                    bad.remove_previous()
                size = out.finish()
        return ConversionResult(
            path=target.path,
            form=target.form,
            rows=self._counters.documents,
            bytes=size,
            quarantined=self._counters.quarantined,
            quarantine=quarantine,
            notes=notes,
        )

    def _write(self, file: RowFile, quarantine: AtomicFile | None) -> None:
        """Write all rows; write bad records to ``quarantine``, or report the first ones."""
        reported_count = 0
        try:
            for source, batch in self._iter_batches("convert"):
                file.write(batch, nan=source.kind in COLUMNAR_KINDS)
                for bad in batch.bad:
                    if quarantine is not None:
                        quarantine.write(encode_quarantine_line(source, self._rules, 0, bad))
                    elif reported_count < _MAX_REPORTED_BAD:
                        reported_count += 1
                        error = make_bad_record_error(source, self._rules, 0, bad)
                        self._hear(Note(f"Left out: {error}", is_warning=True))
            file.finish()
        except BaseException:
            file.abandon()
            raise

    def _infer_schema(self) -> tuple[Any, tuple[str, ...]]:
        """Return the Arrow schema of all rows, and notes on values that it changes."""
        shape = ColumnType()
        for source, batch in self._iter_batches("look"):
            try:
                shape.add(batch.values)
            except UntabularError as error:
                raise self._untabular_input_error(source, batch, shape, error) from None
        try:
            return build_arrow_schema(shape), tuple(describe_type_changes(shape))
        except UntabularError as error:
            raise InputError(_describe_untabular(error)) from None

    def _iter_batches(self, phase: Phase) -> Iterator[tuple[Source, Records]]:
        """Yield and count all records as rows of the output; the caller may add bad ones."""
        counters = self._counters = JobCounters(self._hear, self._max_bad, self._listing.bytes, phase)
        for source in prefetch_sources(self._listing.sources, lambda one: one):
            done = 0
            with PartReader(SourcePart(source, 0, source.size), self._rules) as reader:
                for batch in reader:
                    batch.values = list(map(coerce_row, batch.values))
                    if self._choose is not None:
                        batch.convert(self._choose, lambda _: "")
                    counters.count_read(reader.consumed - done, batch.records_read)
                    done = reader.consumed
                    yield source, batch
                    if batch.bad:
                        counters.count_bad(
                            str(make_bad_record_error(source, self._rules, 0, batch.bad[0])), len(batch.bad)
                        )
                    counters.count_documents(len(batch.values), 0)
                reader.finish()
            counters.count_read(source.size - done, 0)
        counters.check_bad_records()
        if not counters.documents:
            first = f" The first unusable record: {counters.first}." if counters.first else ""
            raise InputMissingError(f"The input holds no records; nothing was written.{first}")

    def _untabular_input_error(
        self, source: Source, batch: Records, shape: ColumnType, error: UntabularError
    ) -> InputError:
        """Return the error for a batch that contradicts earlier rows, by its first row."""
        number = shape.find_mismatched_row(batch.values, error.path)
        if number is None:
            return InputError(f"{source.name}: {_describe_untabular(error)}")
        bad = BadRecord(batch.records[number], batch.offsets[number], None, _describe_untabular(error), "")
        return make_bad_record_error(source, self._rules, 0, bad)


def _describe_untabular(error: UntabularError) -> str:
    column = f"column {format_column_path(error.path)!r} {error.reason}" if error.path else error.reason
    return (
        f"{column}, which a Parquet column cannot hold; use .jsonl, which keeps every row as it is, or leave the "
        "column out with --columns"
    )
