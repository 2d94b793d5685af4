"""JSON Lines: one record per line, read completely or only for its text field."""

import itertools
from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Records
from batchloom.sources.files.part_stream import PartStream
from batchloom.sources.files.source_rules import BOM, ReadRules
from batchloom.sources.formats.delimiters import FixedDelimiter
from batchloom.sources.formats.json_rows import JsonRowReader
from batchloom.sources.formats.record_blocks import RecordBlock, iter_record_blocks
from batchloom.sources.formats.record_faults import make_too_large_record

_OPEN, _CLOSE, _NEWLINE = b"{}\n"
_FEW_BYTES, _FEW_LINES = 64 << 10, 16


def read_jsonl(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the records of a part of a JSONL source in batches.

    Raises:
        RecordError: the source's first records all lack the text field.
        InputError: the bytes cannot be read.
    """
    reader = _JsonlReader(stream, rules)
    for block in iter_record_blocks(stream, FixedDelimiter(b"\n"), rules.limits):
        batch = reader.read_oversize(block) if block.oversize else reader.read_block(block)
        # A suspended generator keeps its locals alive, and a record may be very large.
        del block
        yield batch
    reader.finish()


@final
class _JsonlReader:
    def __init__(self, stream: PartStream, rules: ReadRules) -> None:
        self._rules = rules
        self._rows = JsonRowReader(stream.source.name, rules, first=stream.position == 0)
        self._record = 0

    def read_oversize(self, block: RecordBlock) -> Records:
        """Return the bad record of a block that is one record above the limit."""
        bad = make_too_large_record(self._record, block.offset, block.data, self._rules.limits.record_bytes)
        self._record += 1
        return Records(bad=[bad], records_read=1)

    def read_block(self, block: RecordBlock) -> Records:
        """Return the good and bad records of a block of complete lines."""
        if block.offset == 0 and block.data.startswith(BOM):
            block = RecordBlock(len(BOM), block.data[len(BOM) :])
        batch = self._read_few_at_once(block)
        if batch is None:
            starts, ends = _find_lines(block.data)
            batch = self._read_all_at_once(block, starts, ends)
        if batch is None:
            batch = self._read_one_by_one(block, starts, ends)
        self._record += batch.records_read
        return batch

    def finish(self) -> None:
        """Raise RecordError if every record of a short source lacked the field."""
        self._rows.finish()

    def _read_few_at_once(self, block: RecordBlock) -> Records | None:
        """Read a few faultless lines without arrays, whose overhead dominates small files."""
        if len(block.data) > _FEW_BYTES or block.data.count(b"\n") > _FEW_LINES:
            return None
        lines = block.data.removesuffix(b"\n").split(b"\n")
        max_record_bytes = self._rules.limits.record_bytes
        if not all(1 < len(line) <= max_record_bytes and line[0] == _OPEN and line[-1] == _CLOSE for line in lines):
            return None
        values = self._rows.decode_lines(block.data)
        if values is None or len(values) != len(lines):
            return None
        starts = itertools.accumulate((len(line) + 1 for line in lines[:-1]), initial=block.offset)
        records = list(range(self._record, self._record + len(values)))
        return Records(values=values, records=records, offsets=list(starts), records_read=len(values))

    def _read_all_at_once(
        self, block: RecordBlock, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> Records | None:
        """Return the records of a faultless block; None if there may be a fault."""
        data = np.frombuffer(block.data, np.uint8)
        # Lines that begin with { and end with } hold complete values: none can continue in the next.
        if not (
            len(starts)
            and (ends - starts).min() >= 2
            and (ends - starts).max() <= self._rules.limits.record_bytes
            and (data[starts] == _OPEN).all()
            and (data[ends - 1] == _CLOSE).all()
        ):
            return None
        values = self._rows.decode_lines(block.data)
        if values is None or len(values) != len(starts):
            return None
        return Records(
            values=values,
            records=list(range(self._record, self._record + len(values))),
            offsets=(starts + block.offset).tolist(),
            records_read=len(values),
        )

    def _read_one_by_one(self, block: RecordBlock, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Records:
        batch = Records(records_read=len(starts))
        if block.data.isspace():
            return batch  # millions of empty lines, with or without CR
        numbers = np.flatnonzero(ends > starts)
        lines = zip(numbers.tolist(), starts[numbers].tolist(), ends[numbers].tolist(), strict=True)
        for number, start, end in lines:
            line = block.data[start:end]
            if not line.strip():
                continue
            record, offset = self._record + number, block.offset + start
            value = self._rows.decode_record(record, offset, line)
            if isinstance(value, BadRecord):
                batch.bad.append(value)
            else:
                batch.values.append(value)
                batch.records.append(record)
                batch.offsets.append(offset)
        return batch


def _find_lines(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and end of each line, without its newline."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    starts = np.empty(len(ends) + 1, np.int64)
    starts[0] = 0
    starts[1:] = ends + 1
    if starts[-1] < len(data):
        ends = np.append(ends, len(data))
    else:
        starts = starts[:-1]
    return starts, ends
