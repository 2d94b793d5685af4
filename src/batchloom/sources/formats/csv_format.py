"""CSV and TSV: a header, then one record per row; every value stays a string.

Rows end where they do for the csv module. A newline ends a row if an even number of quotes precedes it. This holds
if every opening quote is at the beginning of a field and every closing one at its end, which is checked for blocks of
lines with array operations. For quotes at other positions, the reader itself decides where a file is cut.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError
from batchloom.core.wording import format_size
from batchloom.sources.files.part_stream import PartStart, PartStream, ReadRules, Source
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    describe_invalid_utf8,
    describe_missing_field,
    excerpt_around,
    excerpt_record,
    refuse_wide_encoding,
)

_CHUNK_BYTES, _MAX_SCAN_BYTES = 1 << 20, 8 << 20
_BATCH_BYTES = 1 << 20
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
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
    """Columns of a CSV or TSV file, its delimiter, and the start of its rows."""

    names: tuple[str, ...]
    delimiter: str
    rows: PartStart


def read_csv(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the records of a part of a CSV or TSV source in batches."""
    reader = _CsvReader(stream, rules)
    yield from reader.read(read_csv_header(stream.source, rules) if stream.begin else reader.read_header())


@lru_cache(maxsize=64)
def read_csv_header(source: Source, rules: ReadRules) -> CsvHeader:
    """Return the header of an uncompressed source."""
    with PartStream(source) as stream:
        return _CsvReader(stream, rules).read_header()


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
        self._stream, self._max_record_bytes = stream, max_record_bytes
        self._lines: list[bytes] = []
        self._next_index = 0
        self._carry = b""
        self.line = stream.begin.line if stream.begin else 1
        self.offset, self.at_end = stream.position, False
        self.begin()

    def begin(self) -> None:
        """Begin a record with the next line."""
        self.start, self._first_line, self._size = b"", self.line, 0
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
        self._lines, self._next_index, self._carry = _split_lines(data), 0, b""
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
        self._name, self._kind = stream.source.name, stream.source.kind
        self._rules, self._max_record_bytes = rules, rules.limits.record_bytes
        self._lines = _CsvLineReader(stream, self._max_record_bytes)
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
        return CsvHeader(tuple(names), delimiter, PartStart(lines.offset, lines.line))

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


def find_row_cut(source: Source, rules: ReadRules, known_cut: PartStart | None, nominal: int) -> PartStart | None:
    """Return the first cut at or after byte ``nominal``, or None.

    ``known_cut`` is an earlier cut to continue from; None: the source's beginning.
    """
    header = read_csv_header(source, rules)
    cut = known_cut or header.rows
    while cut.offset < nominal:
        scan = _RowCutScanner(source, rules, header.delimiter, cut)
        found_cut = scan.find_cut(nominal)
        if found_cut is None and scan.uncertain:
            found_cut = _read_row_cut(source, rules, header, scan.safe, min(nominal, scan.offset))
        if found_cut is None:
            return None
        cut = found_cut
    return cut if cut.offset < source.size else None


def _read_row_cut(
    source: Source, rules: ReadRules, header: CsvHeader, begin: PartStart, least: int
) -> PartStart | None:
    """Read to the first row end at or after ``least``; None at the source's end."""
    with PartStream(source, begin.offset, begin=begin) as stream:
        ends = _CsvReader(stream, rules).iter_ends(header)
        end = next((end for end in ends if end.offset >= least), None)
    return end if end is not None and end.offset < source.size else None


@final
class _RowCutScanner:
    """Scanner of complete lines after a cut, block by block."""

    def __init__(self, source: Source, rules: ReadRules, delimiter: str, begin: PartStart) -> None:
        self._source, self._delimiter = source, ord(delimiter)
        self._max_record_bytes = rules.limits.record_bytes
        self.safe, self.offset, self._line = begin, begin.offset, begin.line
        self._odd = 0
        self.uncertain = False

    def find_cut(self, nominal: int) -> PartStart | None:
        """Return the first cut at or after ``nominal``."""
        with PartStream(self._source, self.offset) as stream:
            carry = b""
            while data := stream.read_up_to(max(_CHUNK_BYTES, min(len(carry), _MAX_SCAN_BYTES))):
                data = carry + data
                end = data.rfind(b"\n") + 1
                carry = data[end:]
                if len(carry) > self._max_record_bytes:
                    # The reader refuses so large a row, unless a quote at another position ends it earlier.
                    self.offset += len(data)
                    self.uncertain = True
                    return None
                if end and (cut := self._scan_lines(data[:end], nominal)) is not None:
                    return cut
                if self.uncertain:
                    return None
        return None

    def _scan_lines(self, data: bytes, nominal: int) -> PartStart | None:
        array = np.frombuffer(data, np.uint8)
        quotes = np.flatnonzero(array == _QUOTE) if b'"' in data else np.empty(0, np.int64)
        start, self.offset = self.offset, self.offset + len(data)
        if len(quotes) and not _has_plain_quotes(data, array, quotes, self._odd, self._delimiter):
            self.uncertain = True
            return None
        if self.offset >= nominal:
            newlines = np.flatnonzero(array == _NEWLINE) + 1
            if len(quotes) or self._odd:
                newlines = newlines[(np.searchsorted(quotes, newlines) + self._odd) % 2 == 0]
            index = int(np.searchsorted(newlines, nominal - start))
            if index < len(newlines):
                end = int(newlines[index])
                if start + end >= self._source.size:
                    return None
                return PartStart(start + end, self._line + data.count(b"\n", 0, end))
        self._line += data.count(b"\n")
        self._odd = (self._odd + len(quotes)) % 2
        if not self._odd:
            self.safe = PartStart(self.offset, self._line)
        return None


def _has_plain_quotes(
    data: bytes, array: NDArray[np.uint8], quotes: NDArray[np.int64], odd: int, delimiter: int
) -> bool:
    """Return whether every quote opens or closes a field, or is doubled.

    ``data`` holds complete lines.
    """
    opening, closing = quotes[odd::2], quotes[1 - odd :: 2]
    before = array[opening - 1]
    if len(opening) and opening[0] == 0:
        before[0] = _NEWLINE
    after = array[closing + 1]
    marks = np.zeros(256, bool)
    marks[[_NEWLINE, _QUOTE, delimiter]] = True
    if not marks[before].all():
        return False
    marks[_RETURN] = True
    if not marks[after].all():
        return False
    if b"\r" not in data:
        return True
    # A lone CR outside of quotes is a fault of its row, after which the reader starts over.
    returns = np.flatnonzero(array == _RETURN)
    alone = returns[array[returns + 1] != _NEWLINE]
    return bool(((np.searchsorted(quotes, alone) + odd) % 2 == 1).all())
