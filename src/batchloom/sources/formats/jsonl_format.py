"""JSON Lines, one record per line, and the decoding of JSON values into records."""

import functools
from collections.abc import Iterator
from typing import Any, Literal, final

import msgspec

from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import InputError, RecordError, make_record_error
from batchloom.core.files import JSON_DECODE_ERRORS
from batchloom.sources.files.part_stream import BOM, PartStream, ReadRules
from batchloom.sources.formats.record_faults import (
    MissingFieldError,
    describe_wide_encoding,
    diagnose_json,
    excerpt_around,
    excerpt_record,
    make_too_large_record,
)
from batchloom.sources.formats.text_format import FixedDelimiter, RecordBlock, iter_record_blocks

# If this many first records all lack the text field, the field is wrong for the source.
_FIRST_RECORDS = 100
# The excerpt from the beginning of a record shows faults up to this character.
_MAX_ROW_DEPTH = 40
_OPEN, _CLOSE = b"{}"


@functools.lru_cache(maxsize=64)
def _make_decoders(field: str | None, late_field: str | None) -> tuple[Any, Any]:
    """Return a decoder of one row, and one of an array of rows.

    They are stateless and cached: making them takes longer than reading a small file.
    """
    row: Any = dict[str, Any]
    if field is not None:
        fields: list[Any] = [("value", str)]
        if late_field is not None:
            fields.append(("late", Literal[1, ""] | None, None))
        try:
            row = msgspec.defstruct("Row", fields, rename={"value": field, "late": late_field or ""}, gc=False)
        except ValueError:
            raise InputError(
                f"The text field {field!r} of JSON records cannot be read: its name holds a quote, a backslash or a "
                "control character; rename it."
            ) from None
    return msgspec.json.Decoder(row), msgspec.json.Decoder(list[row])


@final
class JsonRowReader:
    """Decoder of JSON values into texts or rows.

    The first records are checked for the text field if reading starts at the beginning of the source (``first``).
    """

    def __init__(self, name: str, rules: ReadRules, *, first: bool) -> None:
        self._name = name
        self._field = rules.text_field
        self._max_record_bytes = rules.limits.record_bytes
        self._late_field = rules.late_field
        self._decoder, self._array = _make_decoders(self._field, self._late_field)
        # None once a record had the field, and for parts that do not start the source.
        self._missing_field_errors: list[RecordError] | None = [] if first else None

    def decode_lines(self, data: bytes) -> list[Any] | None:
        """Return the records of complete lines; None if there may be a fault."""
        try:
            return self._extract_values(self._decoder.decode_lines(data))
        except JSON_DECODE_ERRORS:
            return None

    def decode_array(self, data: bytes) -> list[Any] | None:
        """Return the records of a JSON array; None if there may be a fault."""
        try:
            return self._extract_values(self._array.decode(data))
        except JSON_DECODE_ERRORS:
            return None

    def decode_record(self, record: int, offset: int, data: bytes, position: tuple[int, int] | None = None) -> Any:
        """Return the record of one value, or a BadRecord."""
        if len(data) > self._max_record_bytes:
            return make_too_large_record(
                record, offset, data, self._max_record_bytes, position[0] if position else None
            )
        try:
            row: Any = self._decoder.decode(data)
        except JSON_DECODE_ERRORS:
            return self._make_bad_record(record, offset, data, position)
        self._missing_field_errors = None
        return row if self._field is None else row.value

    def finish(self) -> None:
        """Raise RecordError if every record of a short source lacked the field."""
        if self._missing_field_errors:
            raise self._missing_field_errors[0]

    def _extract_values(self, rows: list[Any]) -> list[Any]:
        if rows:
            self._missing_field_errors = None
        return rows if self._field is None else [row.value for row in rows]

    def _make_bad_record(self, record: int, offset: int, data: bytes, position: tuple[int, int] | None) -> BadRecord:
        encoding = describe_wide_encoding(data) if offset == 0 else None
        try:
            at, reason = (None, encoding) if encoding else diagnose_json(data, self._field, self._late_field)
        except MissingFieldError as missing:
            at = None
            reason = str(missing)
            if self._missing_field_errors is not None:
                line, row = (position[0], record + 1) if position else (record + 1, None)
                self._missing_field_errors.append(make_record_error(self._name, line, None, reason, row))
                if len(self._missing_field_errors) >= _FIRST_RECORDS:
                    raise self._missing_field_errors[0] from None
        else:
            self._missing_field_errors = None
        is_far = at is not None and at > _MAX_ROW_DEPTH
        words = excerpt_around(data, count_leading_bytes(data, at or 0)) if is_far else excerpt_record(data)
        if position is None:
            column = None if at is None else at + 1
            return BadRecord(record, offset, column, reason, words)
        line, column = _locate_character(data, at, position)
        return BadRecord(record, offset, column, reason, words, line)


def count_leading_bytes(data: bytes, characters: int) -> int:
    """Return the number of bytes of the first characters of a value."""
    return len(data.decode("utf-8", "replace")[:characters].encode())


def _locate_character(data: bytes, at: int | None, position: tuple[int, int]) -> tuple[int, int | None]:
    """Return line and column of character ``at`` in a value at ``position``."""
    if at is None:
        return position[0], None
    before = data.decode("utf-8", "replace")[:at]
    lines = before.count("\n")
    if not lines:
        return position[0], position[1] + at
    return position[0] + lines, at - before.rfind("\n")


def read_jsonl(stream: PartStream, rules: ReadRules) -> Iterator[Records]:
    """Yield the records of a part of a JSONL source in batches."""
    reader = _JsonlReader(stream, rules)
    for block in iter_record_blocks(stream, FixedDelimiter(b"\n"), rules.limits):
        batch = reader.read_oversize(block) if block.oversize else reader.read_block(block)
        # A suspended generator keeps its locals alive, and a record may be very large.
        del block
        yield batch
    reader.rows.finish()


@final
class _JsonlReader:
    def __init__(self, stream: PartStream, rules: ReadRules) -> None:
        self._rules = rules
        self.rows = JsonRowReader(stream.source.name, rules, first=stream.position == 0)
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
        batch: Records | None
        if block.data.isspace():
            # Millions of empty lines, with or without CR.
            batch = Records(records_read=block.data.count(b"\n") + (not block.data.endswith(b"\n")))
        else:
            starts, ends = _find_lines(block.data)
            batch = self._read_all_at_once(block, starts, ends)
            if batch is None:
                batch = self._read_one_by_one(block, starts, ends)
        self._record += batch.records_read
        return batch

    def _read_all_at_once(self, block: RecordBlock, starts: list[int], ends: list[int]) -> Records | None:
        """Return the records of a faultless block; None if there may be a fault."""
        data = block.data
        most = self._rules.limits.record_bytes
        # Lines that begin with { and end with } hold complete values: none can continue in the next.
        if not all(
            1 < end - start <= most and data[start] == _OPEN and data[end - 1] == _CLOSE
            for start, end in zip(starts, ends, strict=True)
        ):
            return None
        values = self.rows.decode_lines(data)
        if values is None or len(values) != len(starts):
            return None
        return Records(
            values=values,
            records=list(range(self._record, self._record + len(values))),
            offsets=[block.offset + start for start in starts],
            records_read=len(values),
        )

    def _read_one_by_one(self, block: RecordBlock, starts: list[int], ends: list[int]) -> Records:
        batch = Records(records_read=len(starts))
        for record, (start, end) in enumerate(zip(starts, ends, strict=True), self._record):
            line = block.data[start:end]
            # Files that were concatenated may each begin with a mark.
            if line.startswith(BOM):
                start = start + len(BOM)  # noqa: PLW2901 - as above
                line = line[len(BOM) :]
            if line and not line.isspace():
                offset = block.offset + start
                batch.add(record, offset, self.rows.decode_record(record, offset, line))
        return batch


def _find_lines(data: bytes) -> tuple[list[int], list[int]]:
    """Return the start and end of each line, without its newline."""
    starts = [0]
    ends = []
    while (end := data.find(b"\n", starts[-1])) >= 0:
        ends.append(end)
        starts.append(end + 1)
    if starts[-1] < len(data):
        ends.append(len(data))
    else:
        starts.pop()
    return starts, ends
