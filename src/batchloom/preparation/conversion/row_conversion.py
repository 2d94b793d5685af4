"""``convert``: the rows of any input in one file of JSON lines, JSON or Parquet, in bounded memory."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from batchloom.chat.schema import as_found
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import (
    InputError,
    InputMissingError,
    SchemaError,
    StoreConflictError,
    UnusableRecordError,
)
from batchloom.core.files import refuse_url
from batchloom.core.partial_files import ASIDE
from batchloom.core.settings import is_switch, raise_problems, shown
from batchloom.preparation.conversion.output_columns import (
    Choose,
    as_row,
    chooser,
    column_problems,
    missing_columns,
    unknown_column,
)
from batchloom.preparation.conversion.row_files import JsonRowFile, Row, RowFile
from batchloom.preparation.conversion.row_types import Shape, Untabular, changes, written
from batchloom.preparation.documents import first_rows
from batchloom.preparation.report import Listener, Note, Phase, Tally
from batchloom.preparation.request import refuse_manifests
from batchloom.preparation.settings import ReadRecipe, Recipe, is_path, make_inputs
from batchloom.preparation.units import quarantine_line
from batchloom.sources import (
    Asked,
    Limits,
    Listing,
    Part,
    PartReader,
    ReadRules,
    error_of,
    list_sources,
    read_ahead,
)
from batchloom.sources.files import COLUMNAR, Compression, Source, kind_by_name
from batchloom.store import AsideFile

Form = Literal["jsonl", "json", "parquet"]

STANDARD_OUTPUT = "-"
_ENDINGS = ".jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet"
_SHOWN_BAD = 10


@dataclass(frozen=True, slots=True)
class Converted:
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
    form: Form
    rows: int
    bytes: int
    quarantined: int
    quarantine: Path | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the rows go: ``path`` is None for standard output."""

    path: Path | None
    form: Form
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
) -> Converted:
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
    target = _target(out)
    given = make_inputs(inputs)
    refuse_manifests(given, "convert")
    recipe = Recipe(
        inputs=given,
        reading=ReadRecipe(text_field=text_field, mapping=dict(mapping or {}), split_on=split_on),
        max_bad=max_bad,
    )
    raise_problems(_problems(recipe, columns, force))
    if not force:
        _refuse_existing(target)
    hear = listener or (lambda _: None)
    rules = ReadRules(text_field, split_on, Limits())
    listing = _listed(given, target, hear, follow_links=follow_links)
    found = _checked_columns(listing, rules, recipe.reading.mapping, columns)
    job = _Job(listing, rules, chooser(found, columns), max_bad, hear)
    return job.run(target)


def _target(out: str | os.PathLike[str]) -> _Target:
    name = os.fspath(out)
    refuse_url(name, "The output")
    if name == STANDARD_OUTPUT:
        return _Target(None, "jsonl", None)
    if not is_path(name):
        raise_problems([f"out: {shown(name)} is no path; name a file"])
    verdict = kind_by_name(name)
    packed = verdict.compression if verdict else None
    for form in ("jsonl", "json", "parquet"):
        if verdict and verdict.kind == form and packed in (None, "gzip", "zstd"):
            return _Target(Path(name), form, packed)
    raise_problems([f"out: the name {Path(name).name!r} does not end in {_ENDINGS}"])
    raise AssertionError


def _problems(recipe: Recipe, columns: Sequence[str] | None, force: object) -> list[str]:
    problems = column_problems(recipe.reading.mapping, columns)
    if recipe.reading.text_field is not None and columns is not None:
        problems.append(
            "columns: with text_field the one column is 'text'; give the one or the other"
        )
    if not is_switch(force):
        problems.append(f"force: {shown(force)} is neither True nor False")
    return problems


def _refuse_existing(target: _Target) -> None:
    for path in (target.path, target.quarantine):
        if path is not None and os.path.lexists(path):
            raise StoreConflictError(
                f"{path} is there already; choose another --out, or replace it with --force."
            )


def _listed(
    inputs: Sequence[str], target: _Target, hear: Listener, *, follow_links: bool
) -> Listing:
    """The input without the output and what an earlier run left of it."""
    listing = list_sources(inputs, asked=[Asked(follow_links=follow_links)] * len(inputs))
    for note in listing.notes:
        hear(Note(note))
    if target.path is None or target.quarantine is None:
        return listing
    names = (target.path, target.quarantine)
    own = {os.path.realpath(f"{name}{end}") for name in names for end in ("", ASIDE)}
    kept = tuple(one for one in listing.sources if os.path.realpath(one.path) not in own)
    if not kept:
        raise InputMissingError(f"{target.path} is the output and the only input; name another.")
    if len(kept) < len(listing.sources):
        hear(Note(f"Left out what is the output: {target.path}."))
    return Listing(kept, listing.notes)


def _checked_columns(
    listing: Listing,
    rules: ReadRules,
    mapping: Mapping[str, str],
    columns: Sequence[str] | None,
) -> Mapping[str, str]:
    """The mapping by the very names of the columns, which the first records have."""
    if not mapping and columns is None:
        return mapping
    firsts = [(source, first_rows(source, rules)[0]) for source in listing.sources]
    rows = [as_row(value) for _, found in firsts for value in found]
    known = tuple(dict.fromkeys(name for row in rows for name in row))
    mapping = as_found(mapping, known)
    alone = f"{listing.sources[0].name}: " if len(listing.sources) == 1 else ""
    for option, column in missing_columns(mapping, columns, rows):
        raise SchemaError(f"{alone}{unknown_column(option, column, list(known))}", known)
    for source, found in firsts:
        # Texts have no columns that could be mapped.
        if found and source.kind not in ("text", "code"):
            _refuse_unmapped(source, found, mapping)
    return mapping


def _refuse_unmapped(source: Source, rows: Sequence[Row], mapping: Mapping[str, str]) -> None:
    """Refuse a source of which no first record has a column that is to take a role's name."""
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    for option, column in missing_columns(mapping, None, rows):
        error = unknown_column(option, column, names)
        raise SchemaError(f"{source.name}: {error}; or convert this file apart", names)


@final
class _Job:
    """One conversion: reads stretch by stretch, and keeps account of what is bad."""

    def __init__(
        self,
        listing: Listing,
        rules: ReadRules,
        choose: Choose | None,
        max_bad: int | str,
        hear: Listener,
    ) -> None:
        self._listing, self._rules, self._choose = listing, rules, choose
        self._max_bad, self._hear = max_bad, hear

    def run(self, target: _Target) -> Converted:
        """Write the file."""
        schema, notes = self._schema() if target.form == "parquet" else (None, ())
        for note in notes:
            self._hear(Note(note))
        with ExitStack() as stack:
            if target.path is None or target.quarantine is None:
                tally, _ = self._write(JsonRowFile(sys.stdout.buffer), self._tell_bad())
                return Converted(None, target.form, tally.documents, 0, tally.quarantined, None, ())
            out = stack.enter_context(AsideFile(target.path))
            bad = stack.enter_context(AsideFile(target.quarantine))
            file: RowFile = (
                JsonRowFile(out, array=target.form == "json", compression=target.compression)
                if schema is None
                else _tables().ParquetRowFile(out, schema)
            )
            tally, lines = self._write(
                file, lambda source, one: bad.write(quarantine_line(source, self._rules, 0, one))
            )
            if lines:
                bad.finish()
            elif target.quarantine.exists():
                bad.remove_old()
            size = out.finish()
            quarantine = target.quarantine if lines else None
            return Converted(
                target.path, target.form, tally.documents, size, lines, quarantine, notes
            )

    def _write(
        self, file: RowFile, keep_bad: Callable[[Source, BadRecord], object]
    ) -> tuple[Tally, int]:
        """Every row into ``file``; the account, and how many records were bad."""
        tally = self._tally("convert")
        for source, found in self._stretches(tally):
            refused = file.write(found.values, nan=source.kind in COLUMNAR)
            found.bad += [_bad(found, number, reason) for number, reason in refused]
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
        shape, tally = Shape(), self._tally("look")
        for source, found in self._stretches(tally):
            try:
                shape.add(found.values)
            except Untabular as error:
                raise self._untabular(source, found, shape, error) from None
            self._count_bad(tally, source, found.bad)
            tally.kept(len(found.values), 0)
        tally.verdict()
        if not tally.documents:
            raise self._nothing(tally)
        try:
            return _tables().schema_of(shape), tuple(changes(shape))
        except Untabular as error:
            raise InputError(_sentence(error)) from None

    def _stretches(self, tally: Tally) -> Iterator[tuple[Source, Records]]:
        """All records in order, as rows of the output."""
        for source in read_ahead(self._listing.sources, lambda one: one):
            done = 0
            with PartReader(Part(source, 0, source.size), self._rules) as reader:
                for found in reader:
                    self._make_rows(found)
                    tally.read(reader.consumed - done, found.seen)
                    done = reader.consumed
                    yield source, found
                reader.finish()
            tally.read(source.size - done, 0)

    def _make_rows(self, found: Records) -> None:
        found.values = list(map(as_row, found.values))
        if self._choose is None:
            return
        kept = Records(bad=found.bad, seen=found.seen)
        for number, row in enumerate(found.values):
            try:
                kept.values.append(self._choose(row))
            except UnusableRecordError as error:
                kept.bad.append(_bad(found, number, error.reason))
            else:
                kept.records.append(found.records[number])
                kept.offsets.append(found.offsets[number])
        found.values, found.records, found.offsets = kept.values, kept.records, kept.offsets

    def _tally(self, phase: Phase) -> Tally:
        return Tally(self._hear, self._max_bad, self._listing.bytes, phase)

    def _count_bad(self, tally: Tally, source: Source, bad: list[BadRecord]) -> None:
        if bad:
            tally.bad(str(error_of(source, self._rules, 0, bad[0])), len(bad))

    def _tell_bad(self) -> Callable[[Source, BadRecord], None]:
        told = 0

        def tell(source: Source, bad: BadRecord) -> None:
            nonlocal told
            told += 1
            if told <= _SHOWN_BAD:
                self._hear(Note(f"Left out: {error_of(source, self._rules, 0, bad)}"))

        return tell

    def _nothing(self, tally: Tally) -> InputError:
        first = f" The first that cannot be used: {tally.first}." if tally.first else ""
        return InputMissingError(f"The input holds no record; nothing is written.{first}")

    def _untabular(
        self, source: Source, found: Records, shape: Shape, error: Untabular
    ) -> InputError:
        """The error of a stretch that does not go with what came before, by its first such row."""
        number = shape.first_other(found.values, error.path)
        if number is None:
            return InputError(f"{source.name}: {_sentence(error)}")
        return error_of(source, self._rules, 0, _bad(found, number, _sentence(error)))


def _bad(found: Records, number: int, reason: str) -> BadRecord:
    return BadRecord(found.records[number], found.offsets[number], None, reason, "")


def _sentence(error: Untabular) -> str:
    column = f"column {written(error.path)!r} {error.reason}" if error.path else error.reason
    return (
        f"{column}, which no column of Parquet can hold; use .jsonl, which keeps every row as it is, "
        "or leave the column out with --columns"
    )


def _tables() -> Any:
    """The writer of Parquet; pyarrow is loaded only where it is needed."""
    return importlib.import_module("batchloom.preparation.conversion.row_tables")
