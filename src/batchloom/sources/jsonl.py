"""JSON Lines: one record a line, of which one field is the text."""

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.document import BadRecord, Documents
from batchloom.core.errors import RecordError
from batchloom.core.files import NOT_JSON
from batchloom.sources.delimiters import FixedDelimiter
from batchloom.sources.faults import (
    MissingField,
    diagnose,
    row_decoder,
    snippet,
    too_large,
    wide,
)
from batchloom.sources.records import Block, record_blocks
from batchloom.sources.rules import BOM, ReadRules
from batchloom.sources.streams import PartStream

# A source whose first records all lack the field was not meant with this field.
_FIRST_RECORDS = 100
_OPEN, _CLOSE, _NEWLINE = b"{}\n"


def read_jsonl(stream: PartStream, rules: ReadRules) -> Iterator[Documents]:
    """The documents of a part of a JSONL source, a stretch at a time.

    Raises:
        RecordError: the source's first records all lack the text field.
        InputError: the bytes cannot be read.
    """
    reader = _Reader(stream, rules)
    for block in record_blocks(stream, FixedDelimiter(b"\n"), rules.limits):
        found = reader.oversize(block) if block.oversize else reader.documents(block)
        # A generator holds its names while it waits, and a record may be very large.
        del block
        yield found
    reader.finish()


@final
class _Reader:
    def __init__(self, stream: PartStream, rules: ReadRules) -> None:
        self._name, self._rules = stream.source.name, rules
        self._decoder = row_decoder(rules.text_field)
        self._record = 0
        # None once a record had the field; parts that begin further on are not asked.
        self._missing: list[RecordError] | None = [] if stream.position == 0 else None

    def oversize(self, block: Block) -> Documents:
        """The one bad record of a block that is a single record above the limit."""
        bad = too_large(self._record, block.offset, block.data, self._rules.limits.record_bytes)
        self._record += 1
        return Documents(bad=[bad], seen=1)

    def documents(self, block: Block) -> Documents:
        """The documents and bad records of a block of whole lines."""
        if block.offset == 0 and block.data.startswith(BOM):
            block = Block(len(BOM), block.data[len(BOM) :])
        starts, ends = _line_bounds(block.data)
        found = self._all_at_once(block, starts, ends)
        if found is None:
            found = self._one_by_one(block, starts, ends)
        self._record += len(starts)
        return found

    def finish(self) -> None:
        """Raise where every record of a short source lacked the field."""
        if self._missing:
            raise self._missing[0]

    def _all_at_once(
        self, block: Block, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> Documents | None:
        """The documents of a block without any fault; None where there might be one."""
        data = np.frombuffer(block.data, np.uint8)
        # Lines that begin with { and end with } hold whole values: none can go on in the next.
        if not (
            len(starts)
            and (ends - starts).min() >= 2
            and (ends - starts).max() <= self._rules.limits.record_bytes
            and (data[starts] == _OPEN).all()
            and (data[ends - 1] == _CLOSE).all()
        ):
            return None
        try:
            rows = self._decoder.decode_lines(block.data)
        except NOT_JSON:
            return None
        if len(rows) != len(starts):
            return None
        self._missing = None
        return Documents(
            texts=[row.value for row in rows],
            records=list(range(self._record, self._record + len(rows))),
            offsets=(starts + block.offset).tolist(),
            seen=len(rows),
        )

    def _one_by_one(
        self, block: Block, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> Documents:
        found = Documents(seen=len(starts))
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            line = block.data[start:end]
            if not line.strip():
                continue
            record, offset = self._record + number, block.offset + start
            text = self._text(record, offset, line)
            if isinstance(text, str):
                self._missing = None
                found.texts.append(text)
                found.records.append(record)
                found.offsets.append(offset)
            else:
                found.bad.append(text)
        return found

    def _text(self, record: int, offset: int, line: bytes) -> str | BadRecord:
        if len(line) > self._rules.limits.record_bytes:
            return too_large(record, offset, line, self._rules.limits.record_bytes)
        try:
            row: Any = self._decoder.decode(line)
        except NOT_JSON:
            return self._bad(record, offset, line)
        text: str = row.value
        return text

    def _bad(self, record: int, offset: int, line: bytes) -> BadRecord:
        encoding = wide(line) if offset == 0 else None
        try:
            column, reason = (
                (None, encoding) if encoding else diagnose(line, self._rules.text_field)
            )
        except MissingField as missing:
            column, reason = None, str(missing)
            if self._missing is not None:
                self._missing.append(RecordError(self._name, record + 1, None, reason))
                if len(self._missing) >= _FIRST_RECORDS:
                    raise self._missing[0] from None
        else:
            self._missing = None
        return BadRecord(record, offset, column, reason, snippet(line))


def _line_bounds(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each line begins and ends (before its newline)."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    starts = np.empty(len(ends) + 1, np.int64)
    starts[0] = 0
    starts[1:] = ends + 1
    if starts[-1] < len(data):
        ends = np.append(ends, len(data))
    else:
        starts = starts[:-1]
    return starts, ends
