"""CSV and TSV: a header, then one record per row; every value stays a string."""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import PartStart, ReadRules, Source
from batchloom.sources.formats.json_text import refuse_wide_encoding
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    describe_invalid_utf8,
    describe_missing_field,
    excerpt_around,
    excerpt_record,
    make_too_large_record,
)

_CHUNK_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
_NEWLINE, _QUOTE = b'\n"'
_DELIMITERS = ",;\t"
_NUL_REMEDY = "a NUL byte, which is not text; if the file is UTF-16: iconv -f UTF-16 -t UTF-8"


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """Columns of a CSV or TSV file, its delimiter, and the start of its rows."""

    names: tuple[str, ...]
    delimiter: str
    rows: PartStart


def read_csv(stream: PartStream, rules: ReadRules, begin: PartStart | None = None) -> Iterator[Records]:
    """Yield the records of a part of a CSV or TSV source in batches.

    Args:
        stream: bytes of the part.
        rules: read rules of the source.
        begin: start of the part; None: the start of the source.

    Raises:
        InputError: the header is invalid, or a quoted field is never closed.
        RecordError: no column has the name of the text field.
    """
    reader = _CsvReader(stream, rules, begin.line if begin else 1)
    header = reader.read_header() if begin is None else read_csv_header(stream.source, rules)
    yield from reader.read(header)


def read_csv_header(source: Source, rules: ReadRules) -> CsvHeader:
    """Return the header of an uncompressed source.

    Raises:
        InputError: the header is invalid.
    """
    with PartStream(source) as stream:
        return _CsvReader(stream, rules).read_header()


def iter_row_ends(stream: PartStream, rules: ReadRules, line: int, header: CsvHeader) -> Iterator[PartStart]:
    """Yield the end of each row of a stream whose first row begins at ``line``.

    Raises:
        InputError: a quoted field is never closed.
    """
    return _CsvReader(stream, rules, line).iter_ends(header)


class _CsvFault(NamedTuple):
    """Reason and 1-based position of a fault; column None for the complete record."""

    reason: str
    line: int
    column: int | None = None
    snippet: str = ""


@final
class _CsvLineReader:
    """Iterator of lines for csv that tracks the size and quotes of each record.

    Attributes:
        line: 1-based number of the next line.
        offset: byte offset of the next line.
        at_end: whether the stream has ended.
        start: first bytes of the record.
        fault: decoding fault of the record, or None.
    """

    def __init__(self, stream: PartStream, max_record_bytes: int, line: int) -> None:
        self._stream, self._max_record_bytes = stream, max_record_bytes
        self._lines: list[bytes] = []
        self._next_index = 0
        self._carry = b""
        self.line, self.offset, self.at_end = line, stream.position, False
        self.start = b""
        self._size = self._quotes = 0
        self._ended = True
        self.fault: _CsvFault | None = None

    def begin(self) -> None:
        """Begin a record with the next line."""
        self.start, self._size, self._quotes, self.fault = b"", 0, 0, None

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
        self._quotes += data.count(b'"')
        self._ended = data.endswith(b"\n")
        if self._size > self._max_record_bytes:
            raise _TooLargeError
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self._note_fault(data, error.start, describe_invalid_utf8(data[error.start]))
            return data.decode("utf-8", "replace")
        if "\x00" in text:
            self._note_fault(data, data.index(b"\0"), _NUL_REMEDY)
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

    def skip_rest_of_record(self) -> bool:
        """Skip the rest of an oversize record; return False if the stream ends in it."""
        odd = self._quotes % 2
        ended = not odd and self._ended
        self.begin()
        data = b"".join(self._lines[self._next_index :]) + self._carry
        self._lines, self._next_index, self._carry = [], 0, data
        while not ended:
            data = self._carry or self._stream.read_up_to(_CHUNK_BYTES)
            if not data:
                return not odd
            end, odd = _find_record_end(data, odd)
            ended = end > 0
            end = end or len(data)
            self.offset += end
            self.line += data.count(b"\n", 0, end)
            self._carry = data[end:]
        return True

    def _fill(self) -> None:
        data = self._carry + self._stream.read_up_to(_CHUNK_BYTES)
        while data and b"\n" not in data and len(data) <= self._max_record_bytes:
            more = self._stream.read_up_to(max(_CHUNK_BYTES, len(data)))
            if not more:
                break
            data += more
        self._lines, self._next_index, self._carry = _split_lines(data), 0, b""
        if self._lines and not self._lines[-1].endswith(b"\n") and len(self._lines) > 1:
            self._carry = self._lines.pop()


def _find_record_end(data: bytes, odd: int) -> tuple[int, int]:
    """Return the end of the record in ``data`` (0: none) and its final quote parity.

    ``odd`` is the quote parity before ``data``: 1 while a quoted field is open.
    """
    array = np.frombuffer(data, np.uint8)
    newlines, quotes = np.flatnonzero(array == _NEWLINE), np.flatnonzero(array == _QUOTE)
    even = newlines[(np.searchsorted(quotes, newlines) + odd) % 2 == 0]
    return (int(even[0]) + 1, 0) if len(even) else (0, (odd + len(quotes)) % 2)


class _TooLargeError(Exception):
    """The record is above the limit."""


def _split_lines(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


@final
class _CsvReader:
    def __init__(self, stream: PartStream, rules: ReadRules, line: int = 1) -> None:
        # The csv module's limit is global to the process, and far below the length of a long text.
        csv.field_size_limit(max(csv.field_size_limit(), rules.limits.record_bytes + _CHUNK_BYTES))
        self._name, self._kind = stream.source.name, stream.source.kind
        self._rules, self._max_record_bytes = rules, rules.limits.record_bytes
        self._lines = _CsvLineReader(stream, self._max_record_bytes, line)
        self._record = 0

    def read(self, header: CsvHeader) -> Iterator[Records]:
        """Yield all rows after the header in batches."""
        batch, size = Records(), 0
        lines, names, width = self._lines, header.names, len(header.names)
        column = self._find_column(names)
        for start, line, row in self._iter_rows(header.delimiter):
            if isinstance(row, BadRecord):
                batch.bad.append(row)
            elif lines.fault or (len(row) != width and row):
                fault = lines.fault or _CsvFault(_describe_ragged_row(len(row), width, names), line)
                batch.bad.append(self._make_faulty_record(start, fault))
            elif row:
                batch.values.append(dict(zip(names, row, strict=True)) if column is None else row[column])
                batch.records.append(self._record)
                batch.offsets.append(start)
            batch.records_read += 1
            self._record += 1
            size += lines.offset - start
            if size > _BATCH_BYTES:
                yield batch
                batch, size = Records(), 0
        yield batch

    def iter_ends(self, header: CsvHeader) -> Iterator[PartStart]:
        """Yield the end of each row."""
        for _ in self._iter_rows(header.delimiter):
            yield PartStart(self._lines.offset, self._lines.line)

    def _iter_rows(self, delimiter: str) -> Iterator[tuple[int, int, "list[str] | BadRecord"]]:
        """Yield each row or its fault, with the offset and line of its start."""
        lines = self._lines
        rows = csv.reader(lines, delimiter=delimiter)
        while True:
            start, line = lines.offset, lines.line
            lines.begin()
            try:
                row = next(rows)
            except StopIteration:
                return
            except _TooLargeError:
                yield start, line, self._skip_too_large(start, line)
                rows = csv.reader(lines, delimiter=delimiter)
            except csv.Error as error:
                yield start, line, self._make_bad_record(start, line, f"not readable as CSV: {error}")
                rows = csv.reader(lines, delimiter=delimiter)
            else:
                if lines.at_end:
                    raise InputError(self._make_unclosed_record(line))
                yield start, line, row

    def read_header(self) -> CsvHeader:
        """Read the header from the beginning of the source."""
        lines = self._lines
        try:
            first = next(lines, "")
        except _TooLargeError as error:
            raise InputError(f"{self._name} has no readable header (it does not end): {_HEADER_REMEDY}") from error
        refuse_wide_encoding(self._name, lines.start)
        if "\r" in first.rstrip("\r\n"):
            raise InputError(f"{self._name} ends its lines with CR alone; convert it with: tr '\\r' '\\n'")
        delimiter = "\t" if self._kind == "tsv" else _detect_delimiter(first)
        rows = csv.reader(_ChainedLines(first.removeprefix("\ufeff"), lines), delimiter=delimiter)
        try:
            names = next(rows, [])
        except (csv.Error, _TooLargeError) as error:
            reason = str(error) or "it does not end"
            raise InputError(f"{self._name} has no readable header ({reason}): {_HEADER_REMEDY}") from error
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
        return CsvHeader(tuple(names), delimiter, PartStart(lines.offset, lines.line))

    def _find_column(self, header: tuple[str, ...]) -> int | None:
        field = self._rules.text_field
        if field is None:
            return None
        if field not in header:
            raise RecordError(self._name, 1, None, describe_missing_field(field, list(header)))
        return header.index(field)

    def _make_bad_record(self, offset: int, line: int, reason: str) -> BadRecord:
        return BadRecord(self._record, offset, None, reason, excerpt_record(self._lines.start), line)

    def _make_faulty_record(self, offset: int, fault: _CsvFault) -> BadRecord:
        words = fault.snippet or excerpt_record(self._lines.start)
        return BadRecord(self._record, offset, fault.column, fault.reason, words, fault.line)

    def _skip_too_large(self, offset: int, line: int) -> BadRecord:
        start = self._lines.start
        if not self._lines.skip_rest_of_record():
            raise InputError(self._make_unclosed_record(line))
        return make_too_large_record(self._record, offset, start, self._max_record_bytes, line)

    def _make_unclosed_record(self, line: int) -> str:
        return (
            f"{self._name}, line {line}: a quoted field opens in this record and is never closed; double the quotes "
            "inside fields, or fetch the file again if it is cut short"
        )


_HEADER_REMEDY = "the first line must name every column once (pandas: to_csv(index=False))"


@final
class _ChainedLines:
    """One line, then the remaining lines."""

    def __init__(self, first: str, lines: _CsvLineReader) -> None:
        self._first, self._lines = first, lines

    def __iter__(self) -> "_ChainedLines":
        return self

    def __next__(self) -> str:
        first, self._first = self._first, ""
        return first or next(self._lines)


def _detect_delimiter(header: str) -> str:
    """Return the delimiter that gives the header most columns, by default the comma."""
    counts = [len(next(csv.reader([header], delimiter=delimiter), [])) for delimiter in _DELIMITERS]
    return _DELIMITERS[counts.index(max(counts))]


def _describe_ragged_row(fields: int, width: int, header: tuple[str, ...]) -> str:
    is_short = fields < width
    return f"{fields} {'field' if fields == 1 else 'fields'} where the header names {width}; " + (
        f"the ones from {header[fields]!r} on are missing" if is_short else "quote the fields that hold delimiters"
    )
