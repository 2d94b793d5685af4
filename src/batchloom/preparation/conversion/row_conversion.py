"""``convert``: the rows of any input in one file of JSON lines, JSON or Parquet, in bounded memory."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from batchloom.chat.schema import match_mapping_columns
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import (
    InputError,
    InputMissingError,
    SchemaError,
    StoreConflictError,
    UnusableRecordError,
)
from batchloom.core.files import refuse_url
from batchloom.core.partial_files import PARTIAL_SUFFIX
from batchloom.core.settings import is_bool, quote_value, raise_problems
from batchloom.preparation.conversion.output_columns import (
    RowMapper,
    check_output_columns,
    coerce_row,
    find_missing_columns,
    make_row_mapper,
    unknown_column_error,
)
from batchloom.preparation.conversion.row_files import JsonRowFile, Row, RowFile
from batchloom.preparation.conversion.row_types import (
    ColumnType,
    UntabularError,
    describe_type_changes,
    format_column_path,
)
from batchloom.preparation.documents import read_sample_rows
from batchloom.preparation.report import JobCounters, Listener, Note, Phase
from batchloom.preparation.request import check_no_manifests
from batchloom.preparation.settings import ReadRecipe, Recipe, as_recipe_inputs, is_valid_path
from batchloom.preparation.units import encode_quarantine_line
from batchloom.sources import (
    DeclaredInput,
    PartReader,
    ReadLimits,
    ReadRules,
    SourceListing,
    SourcePart,
    list_sources,
    make_bad_record_error,
    prefetch_sources,
)
from batchloom.sources.files import COLUMNAR_KINDS, Compression, Source, detect_kind_by_name
from batchloom.store import AtomicFile

OutputFormat = Literal["jsonl", "json", "parquet"]

STANDARD_OUTPUT = "-"
_OUTPUT_SUFFIXES = ".jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet"
_MAX_REPORTED_BAD = 10


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What was written.

    Attributes:
        path: the file; None for standard output.
        form: ``jsonl``, ``json`` or ``parquet``.
        rows: rows in it.
        bytes: its bytes; 0 for standard output.
        quarantined: records that could not be used.
        quarantine: the file that tells of them, None where there is none.
        notes: what is not in the file as it was in the input, one sentence each.
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
    """Where the rows go: ``path`` is None for standard output."""

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
    """Write the rows of any input that ``prepare`` reads into one file, in their order, untouched.

    Texts become rows ``{"text": ...}``. The file is written aside and renamed: a name that exists
    is whole. For Parquet the input is read twice: first for the types of its columns.

    Args:
        inputs: files, folders and globs.
        out: a name ending in .jsonl or .json (also .gz, .zst) or .parquet; ``-`` writes JSON
            lines to standard output.
        mapping: columns by role; each is given its role's name.
        columns: which columns are written, by their names in the output, and in which order.
        text_field: the one column that is the text: rows are ``{"text": ...}``.
        split_on: what a document of a text file is; see ``ReadRecipe``.
        max_bad: records that may be unusable: a number, or a share such as ``"0.1%"``, which
            allows at least 10.
        force: replace a file that exists.
        follow_links: follow symbolic links that lead out of an input folder; else they are skipped.
        listener: is called with notes and progress.

    Raises:
        SettingsError: options that are unknown or contradict each other; all of them at once.
        InputMissingError, InputError, RecordError: an input cannot be used; a Parquet column
            would hold values of several types.
        SchemaError: a column asked for is in none of the first records.
        TooManyBadRecordsError: more records are unusable than ``max_bad`` allows.
        StoreConflictError: the output exists, or another run writes it.
        OutputError: the output cannot be written.
    """
    target = _parse_target(out)
    given = as_recipe_inputs(inputs)
    check_no_manifests(given, "convert")
    recipe = Recipe(
        inputs=given,
        reading=ReadRecipe(text_field=text_field, mapping=dict(mapping or {}), split_on=split_on),
        max_bad=max_bad,
    )
    raise_problems(_check_conversion(recipe, columns, force))
    if not force:
        _refuse_existing(target)
    hear = listener or (lambda _: None)
    rules = ReadRules(text_field, split_on, ReadLimits())
    listing = _list_conversion_inputs(given, target, hear, follow_links=follow_links)
    found = _resolve_mapping(listing, rules, recipe.reading.mapping, columns)
    job = _RowConversion(listing, rules, make_row_mapper(found, columns), max_bad, hear)
    return job.run(target)


def _parse_target(out: str | os.PathLike[str]) -> _ConversionTarget:
    name = os.fspath(out)
    refuse_url(name, "The output")
    if name == STANDARD_OUTPUT:
        return _ConversionTarget(None, "jsonl", None)
    if not is_valid_path(name):
        raise_problems([f"out: {quote_value(name)} is no path; name a file"])
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
        problems.append(
            "columns: with text_field the one column is 'text'; give the one or the other"
        )
    if not is_bool(force):
        problems.append(f"force: {quote_value(force)} is neither True nor False")
    return problems


def _refuse_existing(target: _ConversionTarget) -> None:
    for path in (target.path, target.quarantine):
        if path is not None and os.path.lexists(path):
            raise StoreConflictError(
                f"{path} is there already; choose another --out, or replace it with --force."
            )


def _list_conversion_inputs(
    inputs: Sequence[str], target: _ConversionTarget, hear: Listener, *, follow_links: bool
) -> SourceListing:
    """The input without the output and what an earlier run left of it."""
    listing = list_sources(inputs, asked=[DeclaredInput(follow_links=follow_links)] * len(inputs))
    for note in listing.notes:
        hear(Note(note))
    if target.path is None or target.quarantine is None:
        return listing
    names = (target.path, target.quarantine)
    own = {os.path.realpath(f"{name}{end}") for name in names for end in ("", PARTIAL_SUFFIX)}
    kept = tuple(one for one in listing.sources if os.path.realpath(one.path) not in own)
    if not kept:
        raise InputMissingError(f"{target.path} is the output and the only input; name another.")
    if len(kept) < len(listing.sources):
        hear(Note(f"Left out what is the output: {target.path}."))
    return SourceListing(kept, listing.notes)


def _resolve_mapping(
    listing: SourceListing,
    rules: ReadRules,
    mapping: Mapping[str, str],
    columns: Sequence[str] | None,
) -> Mapping[str, str]:
    """The mapping by the very names of the columns, which the first records have."""
    if not mapping and columns is None:
        return mapping
    firsts = [(source, read_sample_rows(source, rules)[0]) for source in listing.sources]
    rows = [coerce_row(value) for _, found in firsts for value in found]
    known = tuple(dict.fromkeys(name for row in rows for name in row))
    mapping = match_mapping_columns(mapping, known)
    alone = f"{listing.sources[0].name}: " if len(listing.sources) == 1 else ""
    for option, column in find_missing_columns(mapping, columns, rows):
        raise SchemaError(f"{alone}{unknown_column_error(option, column, list(known))}", known)
    for source, found in firsts:
        # Texts have no columns that could be mapped.
        if found and source.kind not in ("text", "code"):
            _refuse_unmapped(source, found, mapping)
    return mapping


def _refuse_unmapped(source: Source, rows: Sequence[Row], mapping: Mapping[str, str]) -> None:
    """Refuse a source of which no first record has a column that is to take a role's name."""
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    for option, column in find_missing_columns(mapping, None, rows):
        error = unknown_column_error(option, column, names)
        raise SchemaError(f"{source.name}: {error}; or convert this file apart", names)


@final
class _RowConversion:
    """One conversion: reads stretch by stretch, and keeps account of what is bad."""

    def __init__(
        self,
        listing: SourceListing,
        rules: ReadRules,
        choose: RowMapper | None,
        max_bad: int | str,
        hear: Listener,
    ) -> None:
        self._listing, self._rules, self._choose = listing, rules, choose
        self._max_bad, self._hear = max_bad, hear

    def run(self, target: _ConversionTarget) -> ConversionResult:
        """Write the file."""
        schema, notes = self._schema() if target.form == "parquet" else (None, ())
        for note in notes:
            self._hear(Note(note))
        with ExitStack() as stack:
            if target.path is None or target.quarantine is None:
                tally, _ = self._write(JsonRowFile(sys.stdout.buffer), self._tell_bad())
                return ConversionResult(
                    None, target.form, tally.documents, 0, tally.quarantined, None, ()
                )
            out = stack.enter_context(AtomicFile(target.path))
            bad = stack.enter_context(AtomicFile(target.quarantine))
            file: RowFile = (
                JsonRowFile(out, array=target.form == "json", compression=target.compression)
                if schema is None
                else _import_row_tables().ParquetRowFile(out, schema)
            )
            tally, lines = self._write(
                file,
                lambda source, one: bad.write(encode_quarantine_line(source, self._rules, 0, one)),
            )
            if lines:
                bad.finish()
            elif target.quarantine.exists():
                bad.remove_previous()
            size = out.finish()
            quarantine = target.quarantine if lines else None
            return ConversionResult(
                target.path, target.form, tally.documents, size, lines, quarantine, notes
            )

    def _write(
        self, file: RowFile, keep_bad: Callable[[Source, BadRecord], object]
    ) -> tuple[JobCounters, int]:
        """Every row into ``file``; the account, and how many records were bad."""
        tally = self._tally("convert")
        for source, found in self._stretches(tally):
            refused = file.write(found.values, nan=source.kind in COLUMNAR_KINDS)
            found.bad += [_make_row_fault(found, number, reason) for number, reason in refused]
            self._count_bad(tally, source, found.bad)
            for one in found.bad:
                keep_bad(source, one)
            tally.kept(len(found.values) - len(refused), 0)
        tally.verdict()
        if not tally.documents:
            raise self._nothing(tally)
        file.finish()
        return tally, tally.quarantined

    def _schema(self) -> tuple[Any, tuple[str, ...]]:
        """The Arrow schema of all rows, and what it changes in them."""
        shape, tally = ColumnType(), self._tally("look")
        for source, found in self._stretches(tally):
            try:
                shape.add(found.values)
            except UntabularError as error:
                raise self._untabular(source, found, shape, error) from None
            self._count_bad(tally, source, found.bad)
            tally.kept(len(found.values), 0)
        tally.verdict()
        if not tally.documents:
            raise self._nothing(tally)
        try:
            return _import_row_tables().build_arrow_schema(shape), tuple(
                describe_type_changes(shape)
            )
        except UntabularError as error:
            raise InputError(_describe_untabular(error)) from None

    def _stretches(self, tally: JobCounters) -> Iterator[tuple[Source, Records]]:
        """All records in order, as rows of the output."""
        for source in prefetch_sources(self._listing.sources, lambda one: one):
            done = 0
            with PartReader(SourcePart(source, 0, source.size), self._rules) as reader:
                for found in reader:
                    self._make_rows(found)
                    tally.read(reader.consumed - done, found.seen)
                    done = reader.consumed
                    yield source, found
                reader.finish()
            tally.read(source.size - done, 0)

    def _make_rows(self, found: Records) -> None:
        found.values = list(map(coerce_row, found.values))
        if self._choose is None:
            return
        kept = Records(bad=found.bad, seen=found.seen)
        for number, row in enumerate(found.values):
            try:
                kept.values.append(self._choose(row))
            except UnusableRecordError as error:
                kept.bad.append(_make_row_fault(found, number, error.reason))
            else:
                kept.records.append(found.records[number])
                kept.offsets.append(found.offsets[number])
        found.values, found.records, found.offsets = kept.values, kept.records, kept.offsets

    def _tally(self, phase: Phase) -> JobCounters:
        return JobCounters(self._hear, self._max_bad, self._listing.bytes, phase)

    def _count_bad(self, tally: JobCounters, source: Source, bad: list[BadRecord]) -> None:
        if bad:
            tally.bad(str(make_bad_record_error(source, self._rules, 0, bad[0])), len(bad))

    def _tell_bad(self) -> Callable[[Source, BadRecord], None]:
        told = 0

        def tell(source: Source, bad: BadRecord) -> None:
            nonlocal told
            told += 1
            if told <= _MAX_REPORTED_BAD:
                self._hear(Note(f"Left out: {make_bad_record_error(source, self._rules, 0, bad)}"))

        return tell

    def _nothing(self, tally: JobCounters) -> InputError:
        first = f" The first that cannot be used: {tally.first}." if tally.first else ""
        return InputMissingError(f"The input holds no record; nothing is written.{first}")

    def _untabular(
        self, source: Source, found: Records, shape: ColumnType, error: UntabularError
    ) -> InputError:
        """The error of a stretch that does not go with what came before, by its first such row."""
        number = shape.first_other(found.values, error.path)
        if number is None:
            return InputError(f"{source.name}: {_describe_untabular(error)}")
        return make_bad_record_error(
            source, self._rules, 0, _make_row_fault(found, number, _describe_untabular(error))
        )


def _make_row_fault(found: Records, number: int, reason: str) -> BadRecord:
    return BadRecord(found.records[number], found.offsets[number], None, reason, "")


def _describe_untabular(error: UntabularError) -> str:
    column = (
        f"column {format_column_path(error.path)!r} {error.reason}" if error.path else error.reason
    )
    return (
        f"{column}, which no column of Parquet can hold; use .jsonl, which keeps every row as it is, "
        "or leave the column out with --columns"
    )


def _import_row_tables() -> Any:
    """The writer of Parquet; pyarrow is loaded only where it is needed."""
    return importlib.import_module("batchloom.preparation.conversion.row_tables")
