"""``convert``: write any input as JSON Lines, JSON or Parquet, in bounded memory."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchloom.chat.schema import match_mapping_columns
from batchloom.core.errors import InputMissingError, SchemaError, SettingsError, StoreConflictError
from batchloom.core.files import PARTIAL_SUFFIX, refuse_url
from batchloom.core.settings import is_bool, quote_value, raise_problems
from batchloom.preparation.conversion.conversion_run import ConversionResult, ConversionTarget, RowConversion
from batchloom.preparation.conversion.row_mapping import (
    check_output_columns,
    coerce_row,
    find_missing_columns,
    make_row_mapper,
    unknown_column_error,
)
from batchloom.preparation.documents.record_parsers import read_sample_rows
from batchloom.preparation.listing.input_listing import list_inputs
from batchloom.preparation.report.progress import Listener, Note
from batchloom.preparation.request.inputs import check_no_manifests, split_sample_count
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe, parse_names
from batchloom.preparation.settings.recipe import Recipe, as_recipe_inputs, is_valid_path
from batchloom.sources import ReadLimits, ReadRules, SourceListing, detect_kind_by_name

STANDARD_OUTPUT = "-"
_OUTPUT_SUFFIXES = ".jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet"


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
    listener = listener or (lambda _: None)
    field_mapping = recipe.reading.mapping
    if text_field is not None and ("." in text_field or "[]" in text_field):
        # A path into a row, as of --map.
        field_mapping = {"text": text_field}
        columns = ["text"]
        text_field = None
    rules = ReadRules(text_field, split_on, ReadLimits())
    listing = _list_conversion_inputs(recipe, target, listener)
    resolved_mapping = _resolve_mapping(listing, rules, field_mapping, columns)
    conversion = RowConversion(listing, rules, make_row_mapper(resolved_mapping, columns), max_bad, listener)
    return conversion.run(target)


def _parse_target(out: str | os.PathLike[str]) -> ConversionTarget:
    name = os.fspath(out)
    refuse_url(name, "The output")
    if name == STANDARD_OUTPUT:
        return ConversionTarget(None, "jsonl", None)
    if not is_valid_path(name):
        raise SettingsError([f"out: {quote_value(name)} is not a path; name a file"])
    detection = detect_kind_by_name(name)
    compression = detection.compression if detection else None
    for form in ("jsonl", "json", "parquet"):
        if detection and detection.kind == form and compression in (None, "gzip", "zstd"):
            return ConversionTarget(Path(name), form, compression)
    raise SettingsError([f"out: the name {Path(name).name!r} does not end in {_OUTPUT_SUFFIXES}"])


def _list_conversion_inputs(recipe: Recipe, target: ConversionTarget, listener: Listener) -> SourceListing:
    """List the input without the output and its partial files."""
    listing = list_inputs(recipe, any_columns=True)
    for note in listing.notes:
        listener(Note(note, is_warning=note in listing.warnings))
    if target.path is None or target.quarantine is None:
        return listing
    names = (target.path, target.quarantine)
    output_paths = {os.path.realpath(f"{name}{end}") for name in names for end in ("", PARTIAL_SUFFIX)}
    remaining_sources = tuple(source for source in listing.sources if os.path.realpath(source.path) not in output_paths)
    if not remaining_sources:
        raise InputMissingError(f"{target.path} is both the output and the only input; name another output.")
    if len(remaining_sources) < len(listing.sources):
        listener(Note(f"Left out an input that is the output: {target.path}.", is_warning=True))
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
