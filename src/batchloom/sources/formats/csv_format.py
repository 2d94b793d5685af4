"""CSV and TSV: a header, then one record per row; every value stays a string."""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError
from batchloom.core.wording import format_size
from batchloom.sources.files.part_stream import PartStream, ReadRules
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    describe_invalid_utf8,
    describe_missing_field,
    excerpt_around,
    excerpt_record,
    refuse_wide_encoding,
)

_CHUNK_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
_DELIMITERS = ",;\t"
# A quote after a backslash that neither ends a field nor is doubled: csv would drop it and keep the backslash.
_ESCAPED_QUOTE = re.compile(rb'\\"[^"\r\n,;\t]')
_ESCAPE_REMEDY = (
    "a quote is escaped by a backslash; write the file with doubled quotes, as with escape='\"' of Spark, or as JSON "
    "Lines"
)
_NUL_REMEDY = "a NUL byte, which is not text; if the file is UTF-16: --encoding utf-16-le"


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """Columns of a CSV or TSV file, and its delimiter."""

    names: tuple[str, ...]
    delimiter: str


def read_csv(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the records of a CSV or TSV source in batches."""
    reader = _CsvReader(stream, rules)
    yield from reader.read(reader.read_header())


class _CsvFault(NamedTuple):
    """Reason and 1-based position of a fault; column None for the complete record."""

    reason: str
    line: int
    column: int | None = None
    snippet: str = ""


@final
class _CsvLineReader:
    """Iterator of lines for csv that tracks the size and first fault of each record."""

    def __init__(self, stream: PartStream, max_record_bytes: int) -> None:
        self._stream = stream
        self._max_record_bytes = max_record_bytes
        self._lines: list[bytes] = []
        self._next_index = 0
        self._carry = b""
        self.line = 1
        self.offset = stream.position
        self.at_end = False
        self.begin()

    def begin(self) -> None:
        """Begin a record with the next line."""
        self.start = b""
        self._first_line = self.line
        self._size = 0
        self.fault: _CsvFault | None = None

    def __iter__(self) -> "_CsvLineReader":
        return self

    def __next__(self) -> str:
        data = self.read_line()
        if not data:
            self.at_end = True
            raise StopIteration
        if len(self.start) < SNIPPET_BYTES:
            self.start += data[:SNIPPET_BYTES]
        self._size += len(data)
        if self._size > self._max_record_bytes:
            raise InputError(
                f"{self._stream.source.name}, line {self._first_line}: the record that begins here has more than "
                f"{format_size(self._max_record_bytes)}; close its quotes if they are open, or write it as JSON Lines"
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self._note_fault(data, error.start, describe_invalid_utf8(data, error.start))
            return data.decode("utf-8", "replace")
        if "\x00" in text:
            self._note_fault(data, data.index(b"\0"), _NUL_REMEDY)
        if '\\"' in text and (escaped := _ESCAPED_QUOTE.search(data)):
            self._note_fault(data, escaped.start(), _ESCAPE_REMEDY)
        return text

    def _note_fault(self, data: bytes, at: int, reason: str) -> None:
        """Record a fault at byte ``at`` of the last line, if it is the first one."""
        if self.fault is None:
            line = self.line - data.endswith(b"\n")
            column = len(data[:at].decode("utf-8", "replace")) + 1
            self.fault = _CsvFault(reason, line, column, excerpt_around(data, at))

    def read_line(self) -> bytes:
        """Return the next line with its end, or as much as fits; empty at the end."""
        if self._next_index == len(self._lines):
            self._fill()
        if self._next_index == len(self._lines):
            return b""
        data = self._lines[self._next_index]
        self._next_index += 1
        self.offset += len(data)
        self.line += data.endswith(b"\n")
        return data

    def _fill(self) -> None:
        data = self._carry + self._stream.read_up_to(_CHUNK_BYTES)
        while data and b"\n" not in data and len(data) <= self._max_record_bytes:
            more = self._stream.read_up_to(max(_CHUNK_BYTES, len(data)))
            if not more:
                break
            data += more
        self._lines = _split_lines(data)
        self._next_index = 0
        self._carry = b""
        if self._lines and not self._lines[-1].endswith(b"\n") and len(self._lines) > 1:
            self._carry = self._lines.pop()


def _split_lines(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


@final
class _CsvReader:
    def __init__(self, stream: PartStream, rules: ReadRules) -> None:
        # The csv module's limit is global to the process, and far below the length of a long text.
        csv.field_size_limit(max(csv.field_size_limit(), rules.limits.record_bytes + _CHUNK_BYTES))
        self._name = stream.source.name
        self._kind = stream.source.kind
        self._rules = rules
        self._max_record_bytes = rules.limits.record_bytes
        self._lines = _CsvLineReader(stream, self._max_record_bytes)
        self._record = 0

    def read(self, header: CsvHeader) -> Iterator[Records]:
        """Yield all rows after the header in batches."""
        batch = Records()
        size = 0
        lines = self._lines
        names = header.names
        width = len(header.names)
        column = self._find_column(names)
        for start, line, row in self._iter_rows(header.delimiter):
            if isinstance(row, BadRecord):
                batch.bad.append(row)
            elif lines.fault or (len(row) != width and row):
                fault = lines.fault or _CsvFault(_describe_ragged_row(len(row), width, names), line)
                batch.bad.append(self._make_bad_record(start, fault))
            elif row:
                batch.values.append(dict(zip(names, row, strict=True)) if column is None else row[column])
                batch.records.append(self._record)
                batch.offsets.append(start)
            batch.records_read += 1
            self._record += 1
            size += lines.offset - start
            if size > _BATCH_BYTES:
                yield batch
                batch = Records()
                size = 0
        yield batch

    def _iter_rows(self, delimiter: str) -> Iterator[tuple[int, int, "list[str] | BadRecord"]]:
        """Yield each row or its fault, with the offset and line of its start."""
        lines = self._lines
        rows = csv.reader(lines, delimiter=delimiter)
        while True:
            start = lines.offset
            line = lines.line
            lines.begin()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                # The advice after the dash is for programmers, and differs between versions of Python.
                reason = str(error).partition(" - ")[0]
                yield start, line, self._make_bad_record(start, _CsvFault(f"not readable as CSV: {reason}", line))
                rows = csv.reader(lines, delimiter=delimiter)
            else:
                if lines.at_end:
                    raise InputError(self._make_unclosed_record(line))
                yield start, line, row

    def read_header(self) -> CsvHeader:
        """Read the header from the beginning of the source."""
        lines = self._lines
        first = next(lines, "")
        refuse_wide_encoding(self._name, lines.start)
        if "\r" in first.rstrip("\r\n"):
            raise InputError(f"{self._name} ends its lines with CR alone; convert it with: tr '\\r' '\\n'")
        delimiter = "\t" if self._kind == "tsv" else _detect_delimiter(first)
        rows = csv.reader(itertools.chain(filter(None, [first.removeprefix("\ufeff")]), lines), delimiter=delimiter)
        try:
            names = next(rows, [])
        except csv.Error as error:
            raise InputError(f"{self._name} has no readable header ({error}): {_HEADER_REMEDY}") from error
        if lines.at_end and names:
            raise InputError(self._make_unclosed_record(1))
        if lines.fault:
            fault = lines.fault
            raise RecordError(self._name, fault.line, fault.column, fault.reason)
        problems = [f"{name!r} occurs twice" for name, times in Counter(names).items() if times > 1 and name]
        problems += [f"column {at} has no name" for at, name in enumerate(names, 1) if not name.strip()]
        if problems or not names:
            reason_text = ", ".join(problems) or "the first line is blank"
            raise InputError(f"{self._name} has no valid header ({reason_text}): {_HEADER_REMEDY}")
        return CsvHeader(tuple(names), delimiter)

    def _find_column(self, header: tuple[str, ...]) -> int | None:
        field = self._rules.text_field
        if field is None:
            return None
        if field not in header:
            raise RecordError(self._name, 1, None, describe_missing_field(field, list(header)))
        return header.index(field)

    def _make_bad_record(self, offset: int, fault: _CsvFault) -> BadRecord:
        words = fault.snippet or excerpt_record(self._lines.start)
        return BadRecord(self._record, offset, fault.column, fault.reason, words, fault.line)

    def _make_unclosed_record(self, line: int) -> str:
        return (
            f"{self._name}, line {line}: a quoted field opens in this record and is never closed; double the quotes "
            "inside fields, or fetch the file again if it is cut short"
        )


_HEADER_REMEDY = "the first line must name every column once (pandas: to_csv(index=False))"


def _detect_delimiter(header: str) -> str:
    """Return the delimiter that gives the header most columns, by default the comma."""
    counts = [len(next(csv.reader([header], delimiter=delimiter), [])) for delimiter in _DELIMITERS]
    return _DELIMITERS[counts.index(max(counts))]


def _describe_ragged_row(fields: int, width: int, header: tuple[str, ...]) -> str:
    is_short = fields < width
    return f"{fields} {'field' if fields == 1 else 'fields'} where the header names {width}; " + (
        f"the ones from {header[fields]!r} on are missing" if is_short else "quote the fields that hold delimiters"
    )
