"""Cut positions in a CSV file: the row ends of Python's csv.

A newline ends a row if an even number of quotes precedes it. This holds if every opening quote is
at the beginning of a field and every closing one at its end, which is checked for blocks of lines
with array operations. For quotes at other positions, the reader itself decides.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import PartStart, ReadRules, Source
from batchloom.sources.formats.csv_format import CsvHeader, iter_row_ends

_CHUNK_BYTES, _MAX_SCAN_BYTES = 1 << 20, 8 << 20
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'


def find_row_cut(
    source: Source, rules: ReadRules, header: CsvHeader, known_cut: PartStart, nominal: int
) -> PartStart | None:
    """Return the first cut at or after byte ``nominal``, or None.

    ``known_cut`` is an earlier cut, or the start of the rows.

    Raises:
        InputError: the source cannot be read, or a quoted field is never closed.
    """
    while known_cut.offset < nominal:
        scan = _RowCutScanner(source, rules, header.delimiter, known_cut)
        cut = scan.find_cut(nominal)
        if cut is not None or not scan.uncertain:
            return cut
        reader_cut = _read_row_cut(source, rules, header, scan.safe, min(nominal, scan.offset))
        if reader_cut is None:
            return None
        known_cut = reader_cut
    return known_cut


def _read_row_cut(
    source: Source, rules: ReadRules, header: CsvHeader, begin: PartStart, least: int
) -> PartStart | None:
    """Read to the first row end at or after ``least``; None at the source's end."""
    with PartStream(source, begin.offset) as stream:
        ends = iter_row_ends(stream, rules, begin.line, header)
        end = next((end for end in ends if end.offset >= least), None)
    return end if end is not None and end.offset < source.size else None


@final
class _RowCutScanner:
    """Scanner of complete lines after a cut, block by block.

    Attributes:
        offset: offset of the next line.
        safe: a cut at or before ``offset``.
        uncertain: whether the scan ended at an undecidable block.
    """

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
                    # The end of so large a row is known only after reading it.
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
