"""One conversion: rows of the input, batch by batch, into the output file."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, InputMissingError
from batchloom.preparation.conversion.column_types import (
    ColumnType,
    UntabularError,
    build_arrow_schema,
    describe_type_changes,
    format_column_path,
)
from batchloom.preparation.conversion.row_files import JsonRowFile, ParquetRowFile, RowFile
from batchloom.preparation.conversion.row_mapping import RowMapper, coerce_row
from batchloom.preparation.report.progress import JobCounters, Listener, Note, Phase
from batchloom.preparation.units.unit_report import encode_quarantine_line
from batchloom.sources import PartReader, ReadRules, SourceListing, SourcePart, make_bad_record_error, prefetch_sources
from batchloom.sources.files import Compression, Source
from batchloom.sources.formats import COLUMNAR_KINDS
from batchloom.store import AtomicFile

OutputFormat = Literal["jsonl", "json", "parquet"]

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
class ConversionTarget:
    """Destination of the rows: ``path`` is None for standard output."""

    path: Path | None
    form: OutputFormat
    compression: Compression | None

    @property
    def quarantine(self) -> Path | None:
        return self.path and self.path.with_name(self.path.name + ".quarantine.jsonl")


@final
class RowConversion:
    """One conversion, read batch by batch, with the counts of bad records."""

    def __init__(
        self, listing: SourceListing, rules: ReadRules, choose: RowMapper | None, max_bad: int | str, listener: Listener
    ) -> None:
        self._listing = listing
        self._rules = rules
        self._choose = choose
        self._max_bad = max_bad
        self._listener = listener

    def run(self, target: ConversionTarget) -> ConversionResult:
        schema, notes = self._infer_schema() if target.form == "parquet" else (None, ())
        for note in notes:
            self._listener(Note(note, is_warning=True))
        size = 0
        quarantine = None
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
                        self._listener(Note(f"Left out: {error}", is_warning=True))
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
        counters = self._counters = JobCounters(self._listener, self._max_bad, self._listing.bytes, phase)
        for source in prefetch_sources(self._listing.sources, lambda source: source):
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
