"""``convert``: write any input as JSON Lines, JSON or Parquet, in bounded memory."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from batchloom.chat.schema import format_columns, get_column_value, match_mapping_columns
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, InputMissingError, SchemaError, StoreConflictError, UnusableRecordError
from batchloom.core.files import PARTIAL_SUFFIX, refuse_url
from batchloom.core.settings import is_bool, quote_value, raise_problems, suggest
from batchloom.preparation.conversion.row_files import JsonRowFile, Row, RowFile, coerce_row
from batchloom.preparation.conversion.row_types import (
    ColumnType,
    UntabularError,
    describe_type_changes,
    format_column_path,
)
from batchloom.preparation.documents.record_parsers import read_sample_rows
from batchloom.preparation.report.progress import JobCounters, Listener, Note, Phase
from batchloom.preparation.request.inputs import check_no_manifests
from batchloom.preparation.settings.read_recipe import ReadRecipe
from batchloom.preparation.settings.recipe import Recipe, as_recipe_inputs, is_valid_path
from batchloom.preparation.units.quarantine import encode_quarantine_line
from batchloom.sources import (
    DeclaredInput,
    PartReader,
    ReadLimits,
    ReadRules,
    SourceListing,
    SourcePart,
    detect_kind_by_name,
    list_sources,
    make_bad_record_error,
    prefetch_sources,
)
from batchloom.sources.files import Compression, Source
from batchloom.sources.formats import COLUMNAR_KINDS
from batchloom.store import AtomicFile

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
    mapped_columns = [column for column in mapping.values() if column]
    problems += [
        f"map: column {column!r} is named for several roles; name it once"
        for column in sorted(
            {mapped_column for mapped_column in mapped_columns if mapped_columns.count(mapped_column) > 1}
        )
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
    repeated_names = sorted({name for name in columns if columns.count(name) > 1})
    return problems + [f"columns: {name!r} is named twice" for name in repeated_names]


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
    split_on: str = "auto",
    max_bad: int | str = "0.1%",
    force: bool = False,
    follow_links: bool = False,
    listener: Listener | None = None,
) -> ConversionResult:
    """Write the rows of any input that ``prepare`` reads into one file, in order.

    Values stay unchanged, and texts become rows ``{"text": ...}``. The file is renamed into place, so
    an existing file is complete. For Parquet the input is read twice, first for the column types.

    Args:
        inputs: files, folders and globs.
        out: a name ending in .jsonl or .json (also .gz, .zst) or .parquet; ``-`` writes JSON
            lines to standard output.
        mapping: columns by role; each is renamed to its role.
        columns: output columns, in order, by their names in the output.
        text_field: the single column that holds the text: rows are ``{"text": ...}``.
        split_on: rule that splits a text file into documents; see ``ReadRecipe``.
        max_bad: maximum of unusable records: a number, or a share such as ``"0.1%"``, which
            allows at least 10.
        force: replace an existing file.
        follow_links: follow symbolic links that lead out of an input folder; else they are skipped.
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
    recipe = Recipe(
        inputs=input_paths,
        reading=ReadRecipe(text_field=text_field, mapping=dict(mapping or {}), split_on=split_on),
        max_bad=max_bad,
    )
    raise_problems(_check_conversion(recipe, columns, force))
    if not force:
        _refuse_existing(target)
    hear = listener or (lambda _: None)
    rules = ReadRules(text_field, split_on, ReadLimits())
    listing = _list_conversion_inputs(input_paths, target, hear, follow_links=follow_links)
    resolved_mapping = _resolve_mapping(listing, rules, recipe.reading.mapping, columns)
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


def _check_conversion(recipe: Recipe, columns: Sequence[str] | None, force: object) -> list[str]:
    problems = check_output_columns(recipe.reading.mapping, columns)
    if recipe.reading.text_field is not None and columns is not None:
        problems.append("columns: with text_field the only column is 'text'; give only one of the two")
    if not is_bool(force):
        problems.append(f"force: {quote_value(force)} is neither True nor False")
    return problems


def _refuse_existing(target: _ConversionTarget) -> None:
    for path in (target.path, target.quarantine):
        if path is not None and os.path.lexists(path):
            raise StoreConflictError(f"{path} already exists; choose another --out, or replace it with --force.")


def _list_conversion_inputs(
    inputs: Sequence[str], target: _ConversionTarget, hear: Listener, *, follow_links: bool
) -> SourceListing:
    """List the input without the output and its partial files."""
    listing = list_sources(inputs, declared_inputs=[DeclaredInput(follow_links=follow_links)] * len(inputs))
    for note in listing.notes:
        hear(Note(note))
    if target.path is None or target.quarantine is None:
        return listing
    names = (target.path, target.quarantine)
    output_paths = {os.path.realpath(f"{name}{end}") for name in names for end in ("", PARTIAL_SUFFIX)}
    remaining_sources = tuple(source for source in listing.sources if os.path.realpath(source.path) not in output_paths)
    if not remaining_sources:
        raise InputMissingError(f"{target.path} is both the output and the only input; name another output.")
    if len(remaining_sources) < len(listing.sources):
        hear(Note(f"Left out an input that is the output: {target.path}."))
    return SourceListing(remaining_sources, listing.notes)


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
            _refuse_unmapped(source, sample_rows, mapping)
    return mapping


def _refuse_unmapped(source: Source, rows: Sequence[Row], mapping: Mapping[str, str]) -> None:
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    for option, column in find_missing_columns(mapping, None, rows):
        error = unknown_column_error(option, column, names)
        raise SchemaError(f"{source.name}: {error}; or convert this file separately", names)


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
            self._hear(Note(note))
        with ExitStack() as stack:
            if target.path is None or target.quarantine is None:
                counters, _ = self._write(JsonRowFile(sys.stdout.buffer), self._make_bad_reporter())
                return ConversionResult(None, target.form, counters.documents, 0, counters.quarantined, None, ())
            out = stack.enter_context(AtomicFile(target.path))
            bad = stack.enter_context(AtomicFile(target.quarantine))
            file: RowFile = (
                JsonRowFile(out, array=target.form == "json", compression=target.compression)
                if schema is None
                else _import_row_tables().ParquetRowFile(out, schema)
            )
            counters, lines = self._write(
                file, lambda source, one: bad.write(encode_quarantine_line(source, self._rules, 0, one))
            )
            if lines:
                bad.finish()
            elif target.quarantine.exists():
                bad.remove_previous()
            size = out.finish()
            quarantine = target.quarantine if lines else None
            return ConversionResult(target.path, target.form, counters.documents, size, lines, quarantine, notes)

    def _write(self, file: RowFile, keep_bad: Callable[[Source, BadRecord], object]) -> tuple[JobCounters, int]:
        """Write all rows to ``file``; return the counters and the number of bad records."""
        counters = self._make_counters("convert")
        for source, batch in self._iter_batches(counters):
            refused = file.write(batch.values, nan=source.kind in COLUMNAR_KINDS)
            batch.bad += [_make_row_fault(batch, number, reason) for number, reason in refused]
            self._count_bad(counters, source, batch.bad)
            for bad_record in batch.bad:
                keep_bad(source, bad_record)
            counters.count_documents(len(batch.values) - len(refused), 0)
        counters.check_bad_records()
        if not counters.documents:
            raise self._empty_input_error(counters)
        file.finish()
        return counters, counters.quarantined

    def _infer_schema(self) -> tuple[Any, tuple[str, ...]]:
        """Return the Arrow schema of all rows, and notes on values that it changes."""
        shape, counters = ColumnType(), self._make_counters("look")
        for source, batch in self._iter_batches(counters):
            try:
                shape.add(batch.values)
            except UntabularError as error:
                raise self._untabular_input_error(source, batch, shape, error) from None
            self._count_bad(counters, source, batch.bad)
            counters.count_documents(len(batch.values), 0)
        counters.check_bad_records()
        if not counters.documents:
            raise self._empty_input_error(counters)
        try:
            return _import_row_tables().build_arrow_schema(shape), tuple(describe_type_changes(shape))
        except UntabularError as error:
            raise InputError(_describe_untabular(error)) from None

    def _iter_batches(self, counters: JobCounters) -> Iterator[tuple[Source, Records]]:
        """Yield all records in order, as rows of the output."""
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
                reader.finish()
            counters.count_read(source.size - done, 0)

    def _make_counters(self, phase: Phase) -> JobCounters:
        return JobCounters(self._hear, self._max_bad, self._listing.bytes, phase)

    def _count_bad(self, counters: JobCounters, source: Source, bad: list[BadRecord]) -> None:
        if bad:
            counters.count_bad(str(make_bad_record_error(source, self._rules, 0, bad[0])), len(bad))

    def _make_bad_reporter(self) -> Callable[[Source, BadRecord], None]:
        reported_count = 0

        def tell(source: Source, bad: BadRecord) -> None:
            nonlocal reported_count
            reported_count += 1
            if reported_count <= _MAX_REPORTED_BAD:
                self._hear(Note(f"Left out: {make_bad_record_error(source, self._rules, 0, bad)}"))

        return tell

    def _empty_input_error(self, counters: JobCounters) -> InputError:
        first = f" The first unusable record: {counters.first}." if counters.first else ""
        return InputMissingError(f"The input holds no records; nothing was written.{first}")

    def _untabular_input_error(
        self, source: Source, batch: Records, shape: ColumnType, error: UntabularError
    ) -> InputError:
        """Return the error for a batch that contradicts earlier rows, by its first row."""
        number = shape.find_mismatched_row(batch.values, error.path)
        if number is None:
            return InputError(f"{source.name}: {_describe_untabular(error)}")
        return make_bad_record_error(source, self._rules, 0, _make_row_fault(batch, number, _describe_untabular(error)))


def _make_row_fault(batch: Records, number: int, reason: str) -> BadRecord:
    return BadRecord(batch.records[number], batch.offsets[number], None, reason, "")


def _describe_untabular(error: UntabularError) -> str:
    column = f"column {format_column_path(error.path)!r} {error.reason}" if error.path else error.reason
    return (
        f"{column}, which a Parquet column cannot hold; use .jsonl, which keeps every row as it is, or leave the "
        "column out with --columns"
    )


def _import_row_tables() -> Any:
    """Import the Parquet writer; pyarrow loads only when needed."""
    return importlib.import_module("batchloom.preparation.conversion.row_tables")
