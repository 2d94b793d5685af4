"""Parquet and Arrow: columnar files, read a bounded number of rows at a time.

Parts meet at the starts of row groups (Parquet) or record batches (Arrow). This module imports
pyarrow, and is itself imported when the first such file is opened.

The messages of an Arrow file are found by their headers, as pyarrow does not tell their offsets ("Serialization and
Interprocess Communication" of Arrow): a marker of four bytes 0xFF, the i32 length of a flatbuffer ``Message`` (fields:
version, header type, header, body length), the flatbuffer, then its body.
"""

import json
import mmap
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, Self, cast, final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchloom.core.document import BadRecord, JsonObject, Records
from batchloom.core.errors import DamagedFileError, InputError, RecordError
from batchloom.core.files import describe_os_error
from batchloom.sources.files.archives import BOMB_BYTES, BOMB_RATIO
from batchloom.sources.files.file_opening import ReadOnlyFile, find_local_path
from batchloom.sources.files.part_stream import ReadRules, Source
from batchloom.sources.formats.record_faults import (
    SNIPPET_BYTES,
    describe_missing_field,
    excerpt_around,
    make_too_large_record,
)

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 2048
_BUFFER_BYTES = 256 << 10
# Larger record batches are memory-mapped instead of read.
_MIN_MAPPED_BYTES = 64 << 20
_FILE_MAGIC = b"ARROW1"
_DICTIONARY = 2
_BATCH = 3
_CONTINUATION_MARKER = 0xFFFFFFFF
_MAX_METADATA_BYTES = 64 << 20


@final
class TableReader:
    """Context manager of an open Parquet or Arrow file.

    ``starts`` are the byte offsets of its row groups, ascending, or a single 0 if offsets cannot distinguish them.
    ``rows`` are their numbers of rows, or None if unknown before reading.
    """

    def __init__(self, source: Source, file: BinaryIO) -> None:
        self.source = source
        self.consumed = 0
        self._file = file
        with _wrap_arrow_errors(source):
            self._groups: _ParquetGroups | _ArrowGroups = (
                _ParquetGroups(self._file, source.size)
                if source.kind == "parquet"
                else _ArrowGroups(self._file, source)
            )
            _check_names(source, self._groups.schema.names)
        self.starts = self._groups.starts
        self.rows = self._groups.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, start: int, stop: int, rules: ReadRules) -> Iterator[Records]:
        """Yield the records of all groups that begin in bytes [start, stop)."""
        field = rules.text_field
        if field is not None:
            self._check_text(field)
        first = bisect_left(self.starts, start)
        last = bisect_left(self.starts, stop)
        record = 0
        with _wrap_arrow_errors(self.source):
            for offset, batch in self._groups.batches(first, last, field):
                self.consumed = max(0, offset - start)
                rows = _count_rows_per_batch(batch)
                for at in range(0, batch.num_rows, rows):
                    batch_slice = batch.slice(at, rows)
                    records = (
                        _read_rows(to_plain_batch(batch_slice), record, offset, rules.limits.record_bytes)
                        if field is None
                        else _read_texts(batch_slice.column(0), record, offset, rules.limits.record_bytes)
                    )
                    record += batch_slice.num_rows
                    yield records

    def _check_text(self, field: str) -> None:
        schema = self._groups.schema
        if field not in schema.names:
            raise RecordError(self.source.name, None, None, describe_missing_field(field, schema.names))
        kind = schema.field(field).type
        if not is_text_type(kind) and not is_binary_type(kind):
            text_columns = [schema_field.name for schema_field in schema if is_text_type(schema_field.type)]
            hint = f"; --text-field {text_columns[0]!r} does" if text_columns else ""
            raise RecordError(self.source.name, None, None, f"column {field!r} holds {kind}, not text{hint}")


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group: its rows, uncompressed bytes and the first byte of its pages."""

    rows: int
    unpacked: int
    start: int


def _list_row_groups(metadata: pq.FileMetaData) -> list[_RowGroup]:
    groups = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(number) for number in range(group.num_columns)]
        # A column may state a dictionary page at offset 0, which is none.
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        starts += [column.data_page_offset for column in columns]
        groups.append(_RowGroup(group.num_rows, group.total_byte_size, min(starts, default=0)))
    return groups


@final
class _ParquetGroups:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        self.schema: pa.Schema = self._file.schema_arrow
        self._row_groups = _list_row_groups(self._file.metadata)
        unpacked = sum(group.unpacked for group in self._row_groups)
        if unpacked > max(BOMB_BYTES, BOMB_RATIO * size):
            raise ValueError(
                f"it unpacks to {unpacked:,} bytes, more than {BOMB_RATIO:,} times its size, like a zip bomb"
            )
        starts = [group.start for group in self._row_groups]
        self._are_separate = all(a < b for a, b in pairwise([0, *starts, size]))
        self.starts = starts if self._are_separate else [0]
        rows = [group.rows for group in self._row_groups]
        self.rows: list[int] | None = rows if self._are_separate else [sum(rows)]

    def batches(self, first: int, last: int, field: str | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group in range(first, last) if self._are_separate else range(len(self._row_groups) if first < last else 0):
            row_group = self._row_groups[group]
            if not row_group.rows:
                continue
            average = max(1, row_group.unpacked // row_group.rows)
            batches = self._file.iter_batches(
                batch_size=max(1, min(_BATCH_ROWS, _BATCH_BYTES // average)),
                row_groups=[group],
                columns=None if field is None else [field],
                use_threads=False,
            )
            for batch in batches:
                yield (row_group.start if self._are_separate else 0), batch


@final
class _ArrowGroups:
    """Record batches of an IPC file or stream.

    Both are read as streams, with messages found by their headers. ``open_file`` on a Python file object
    reads the footer in a thread. That thread crashes the process if it releases the object during
    interpreter exit.
    """

    def __init__(self, file: BinaryIO, source: Source) -> None:
        self._raw = file
        self._is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        self._messages = _list_messages(file, source.size)
        if not self._messages:
            raise ValueError("it has no schema")
        large = max(message.body for message in self._messages) > _MIN_MAPPED_BYTES
        local_path = find_local_path(source.path, source.size) if source.member is None else None
        self._mapped: mmap.mmap | None = None
        if large and local_path:
            with open(local_path, "rb") as table:
                self._mapped = mmap.mmap(table.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = [message.start for message in self._messages if message.kind == _BATCH]
        # This also applies if mapping is impossible: parts must not depend on a file's location.
        are_separate = self._is_file or not large or source.member is not None
        self.schema: pa.Schema = pa.ipc.open_stream(self._chain_batches(0, 0)).schema
        self.starts = self._starts if are_separate and self._starts else [0]
        self.rows: list[int] | None = None

    def batches(self, first: int, last: int, field: str | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        if first >= last or not self._starts:
            return
        for offset, read_batch in self._iter_readers(first, last, field):
            batch = read_batch()
            batch = batch if field is None else batch.select([field])
            # Without validation, a damaged file makes Arrow read beyond its buffers.
            batch.validate(full=self._mapped is None)
            if self._mapped is None:
                yield offset, batch
            else:
                yield from self._iter_slices(offset, batch)

    def _iter_slices(self, offset: int, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield slices of a mapped batch, releasing the memory of each before the next."""
        rows = _count_rows_per_batch(batch)
        for at in range(0, batch.num_rows, rows):
            batch_slice = batch.slice(at, rows)
            batch_slice.validate(full=True)
            yield offset, batch_slice
            if self._mapped is not None:
                self._mapped.madvise(mmap.MADV_DONTNEED)

    def _iter_readers(
        self, first: int, last: int, field: str | None
    ) -> Iterator[tuple[int, Callable[[], pa.RecordBatch]]]:
        # Selecting columns would copy even a mapped batch.
        selects_column = field is not None and self._mapped is None
        included_fields = [self.schema.names.index(field)] if field is not None and selects_column else None
        options = pa.ipc.IpcReadOptions(included_fields=included_fields, use_threads=False)
        if self._mapped is not None and self._is_file:
            reader = pa.ipc.open_file(pa.py_buffer(self._mapped), options=options)
            if reader.num_record_batches != len(self._starts):
                raise ValueError("its directory does not match its record batches")
            for at in range(first, last):
                yield self.starts[at], lambda at=at: reader.get_batch(at)  # type: ignore[misc]
            return
        are_separate = self.starts == self._starts
        if self._mapped is not None:
            file: Any = pa.py_buffer(self._mapped)
        elif are_separate:
            file = self._chain_batches(first, last)
        else:
            file = self._raw
            file.seek(0)
        stream = pa.ipc.open_stream(file, options=options)
        for start in self._starts[first:last] if are_separate else self._starts:
            yield (start if are_separate else 0), stream.read_next_batch

    def _chain_batches(self, first: int, last: int) -> BinaryIO:
        """Return a stream of the schema, needed dictionaries and batches [first, last)."""
        if first == last:
            return cast(
                "BinaryIO",
                _ConcatenatedRanges(self._raw, [(self._messages[0].start, self._messages[0].stop)]),
            )
        start = self._starts[first]
        stop = self._starts[last] if last < len(self._starts) else self._messages[-1].stop
        preceding_messages = [message for message in self._messages if message.start < start and message.kind != _BATCH]
        head_ranges = [(message.start, message.stop) for message in preceding_messages]
        batch_messages = [
            message
            for message in self._messages
            if start <= message.start < stop and message.kind in (_BATCH, _DICTIONARY)
        ]
        byte_ranges = head_ranges + [(message.start, message.stop) for message in batch_messages]
        return cast("BinaryIO", _ConcatenatedRanges(self._raw, byte_ranges))


@dataclass(frozen=True, slots=True)
class _ArrowMessage:
    """A message: its kind, byte range and body length."""

    kind: int
    start: int
    stop: int
    body: int


def _list_messages(file: BinaryIO, size: int) -> list[_ArrowMessage]:
    """Return all messages up to the end marker of an IPC file or stream."""
    file.seek(0)
    offset = 0
    if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
        offset = 8
        size = _find_footer_start(file, size)
    messages: list[_ArrowMessage] = []
    while offset < size:
        file.seek(offset)
        head = file.read(8)
        if len(head) < 4:
            raise ValueError("it is cut short")
        length = struct.unpack("<i", head[:4])[0]
        prefix = 4
        if length & 0xFFFFFFFF == _CONTINUATION_MARKER:
            if len(head) < 8:
                raise ValueError("it is cut short")
            length = struct.unpack("<i", head[4:])[0]
            prefix = 8
        if length == 0:
            break
        if not 0 < length <= _MAX_METADATA_BYTES:
            raise ValueError(f"invalid message length {length} at byte {offset}")
        file.seek(offset + prefix)
        kind, body = _parse_header(file.read(length))
        stop = offset + prefix + length + body
        if body < 0 or stop > size:
            raise ValueError("it is cut short")
        messages.append(_ArrowMessage(kind, offset, stop, body))
        offset = stop
    return messages


def _find_footer_start(file: BinaryIO, size: int) -> int:
    """Return the footer offset of an IPC file; early writers omit the end marker."""
    tail_bytes = 4 + len(_FILE_MAGIC)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < tail_bytes or tail[4:] != _FILE_MAGIC:
        raise ValueError("it is cut short: its end marker is missing")
    start = size - tail_bytes - int(struct.unpack("<i", tail[:4])[0])
    if not 8 <= start <= size - tail_bytes:
        raise ValueError("its directory is damaged")
    return start


def _parse_header(data: bytes) -> tuple[int, int]:
    """Return header type and body length of a flatbuffer Message."""
    try:
        (root,) = struct.unpack_from("<I", data, 0)
        (back,) = struct.unpack_from("<i", data, root)
        table = root - back
        (size,) = struct.unpack_from("<H", data, table)
        # Slots 1 and 3 of the table; an absent field has its default, 0.
        field_offsets = [
            struct.unpack_from("<H", data, table + 4 + 2 * slot)[0] if size >= 6 + 2 * slot else 0 for slot in (1, 3)
        ]
        kind = struct.unpack_from("<B", data, root + field_offsets[0])[0] if field_offsets[0] else 0
        body = struct.unpack_from("<q", data, root + field_offsets[1])[0] if field_offsets[1] else 0
    except struct.error as error:
        raise ValueError("a message has a damaged header") from error
    return kind, body


@final
class _ConcatenatedRanges(ReadOnlyFile):
    """Concatenated byte ranges of a file, as one file."""

    def __init__(self, file: BinaryIO, byte_ranges: list[tuple[int, int]]) -> None:
        self._file = file
        self._remaining_ranges = byte_ranges[::-1]

    def read(self, size: int | None = -1) -> bytes:
        chunks = []
        size = -1 if size is None else size
        while size and self._remaining_ranges:
            start, stop = self._remaining_ranges.pop()
            self._file.seek(start)
            data = self._file.read(stop - start if size < 0 else min(size, stop - start))
            if not data:
                raise EOFError
            if start + len(data) < stop:
                self._remaining_ranges.append((start + len(data), stop))
            chunks.append(data)
            size = -1 if size < 0 else size - len(data)
        return b"".join(chunks)


def _count_rows_per_batch(batch: pa.RecordBatch) -> int:
    average = max(1, batch.nbytes // max(1, batch.num_rows))
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // average)))


def _read_rows(batch: pa.RecordBatch, record: int, offset: int, max_bytes: int) -> Records:
    count = batch.num_rows
    large = batch.nbytes > max_bytes
    if large and count > 1:
        return _read_row_by_row(batch, record, offset, max_bytes)
    if large:
        # Refuse the row before its texts are copied.
        beginnings = (_read_beginning(column, max_bytes) for column in batch.columns)
        if (beginning := next((start for start in beginnings if start is not None), None)) is not None:
            return Records(bad=[make_too_large_record(record, offset, beginning, max_bytes)], records_read=1)
    records = Records(offsets=[offset] * count, records_read=count)
    records.records = list(range(record, record + count))
    try:
        records.values = _decode_json(batch.to_pylist(), batch.schema)
    except UnicodeDecodeError:
        if count > 1:
            return _read_row_by_row(batch, record, offset, max_bytes)
        return Records(bad=[_make_undecodable_record(batch, record, offset)], records_read=1)
    if large:
        # Arrow counts shared buffers of views for every row; the JSON shows the size of the record itself.
        data = msgspec.json.encode(records.values[0], enc_hook=str)
        if len(data) > max_bytes:
            return Records(
                bad=[make_too_large_record(record, offset, data[:SNIPPET_BYTES], max_bytes)],
                records_read=1,
            )
    return records


def _decode_json(rows: list[Any], schema: pa.Schema) -> list[Any]:
    """Decode the JSON of columns that are declared as such, in place, at any depth.

    Hugging Face datasets declare so what is not of one type, such as contents that are texts and lists of parts.
    """
    for field in schema:
        if decode := _make_json_decoder(field.type):
            for row in rows:
                row[field.name] = decode(row[field.name])
    return rows


def _make_json_decoder(column_type: pa.DataType) -> Callable[[Any], Any] | None:
    """Return the function that decodes the JSON in values of a type, if any."""
    if isinstance(column_type, pa.BaseExtensionType):
        return _parse_json if column_type.extension_name == "arrow.json" else None
    is_list = pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
    if is_list and (decode_item := _make_json_decoder(column_type.value_type)):
        return lambda values: values and list(map(decode_item, values))
    fields = column_type if pa.types.is_struct(column_type) else ()
    decoders = {field.name: decode for field in fields if (decode := _make_json_decoder(field.type))}
    if not decoders:
        return None
    return lambda row: row and {**row, **{name: decode(row[name]) for name, decode in decoders.items()}}


def _parse_json(text: str | None) -> Any:
    """Return the value of a JSON text; texts that are no JSON, and null, unchanged."""
    try:
        return None if text is None else _wrap_objects(json.loads(text))
    except ValueError:
        return text


def _wrap_objects(value: Any) -> Any:
    if isinstance(value, dict):
        return JsonObject(value)
    return [_wrap_objects(item) for item in value] if isinstance(value, list) else value


def _make_undecodable_record(batch: pa.RecordBatch, record: int, offset: int) -> BadRecord:
    """Return the bad record of a single row with a text that is not UTF-8."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.to_pylist()
        except UnicodeDecodeError as error:
            reason = (
                f"column {name!r}: byte 0x{error.object[error.start]:02x} of a text is not valid UTF-8; write the file "
                "again from its source"
            )
            return BadRecord(record, offset, None, reason, excerpt_around(error.object, error.start))
    raise AssertionError("a row that cannot be decoded must have such a column")


def _read_row_by_row(batch: pa.RecordBatch, record: int, offset: int, max_bytes: int) -> Records:
    records = Records()
    for index in range(batch.num_rows):
        row_records = _read_rows(batch.slice(index, 1), record + index, offset, max_bytes)
        records.values += row_records.values
        records.records += row_records.records
        records.offsets += row_records.offsets
        records.bad += row_records.bad
        records.records_read += row_records.records_read
    return records


def _read_texts(column: pa.Array, record: int, offset: int, max_bytes: int) -> Records:
    count = len(column)
    if column.nbytes > max_bytes and count == 1 and (start := _read_beginning(column, max_bytes)) is not None:
        return Records(bad=[make_too_large_record(record, offset, start, max_bytes)], records_read=1)
    if is_binary_type(column.type):
        # Other bytes than UTF-8 are reported by row.
        with suppress(pa.ArrowInvalid):
            column = column.cast(pa.large_string())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values = plain.cast(pa.large_binary()).to_pylist()
    is_all_text = all(type(value) is str for value in values)
    if is_all_text and (column.nbytes <= max_bytes or max(map(len, values)) * 4 <= max_bytes):
        records = list(range(record, record + count))
        return Records(values=values, records=records, offsets=[offset] * count, records_read=count)
    text_records = Records(records_read=count)
    for number, value in enumerate(values, record):
        text_records.add(number, offset, _read_text(value, number, offset, max_bytes))
    return text_records


def _read_beginning(column: pa.Array, max_bytes: int) -> bytes | None:
    """Return the beginning of a column's single text if it exceeds ``max_bytes``."""
    plain = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if not plain or (pc.binary_length(column)[0].as_py() or 0) <= max_bytes:
        return None
    data = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    return bytes(pc.binary_slice(data, 0, SNIPPET_BYTES)[0].as_py())


def _read_text(value: str | bytes | None, record: int, offset: int, max_bytes: int) -> str | BadRecord:
    if value is None:
        return BadRecord(record, offset, None, "the text is null; drop such rows first", "")
    data = value.encode() if isinstance(value, str) else value
    if len(data) > max_bytes:
        return make_too_large_record(record, offset, data[:SNIPPET_BYTES], max_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{data[error.start]:02x} of the text is not valid UTF-8; write the file again from its source"
        return BadRecord(record, offset, None, reason, excerpt_around(data, error.start))


def _check_names(source: Source, names: list[str]) -> None:
    duplicates = [repr(name) for name, times in Counter(names).items() if times > 1]
    if duplicates:
        raise InputError(f"{source.name} has several columns named {', '.join(duplicates)}; rename them first.")


@contextmanager
def _wrap_arrow_errors(source: Source) -> Iterator[None]:
    """Raise errors of pyarrow as an InputError that names the file."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        # Too little memory is no damage, although a damaged file can ask for too much.
        raise InputError(
            f"{source.name} cannot be read: not enough memory ({error}). Give the job more memory, or leave the file "
            "out."
        ) from error
    except (pa.ArrowException, ValueError, OSError, EOFError) as error:
        # Arrow's own errors of damaged pages have no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{source.name} cannot be read: {describe_os_error(error)}.") from error
        reason = (str(error) or "it is cut short").strip().splitlines()[0].rstrip(".")
        kind = "Parquet" if source.kind == "parquet" else "Arrow"
        if "crypt" in reason.lower():
            raise InputError(
                f"{source.name} is encrypted, which is not supported: write it again without encryption ({reason})."
            ) from error
        raise DamagedFileError(
            f"{source.name} is not a valid {kind} file ({reason[:1].lower()}{reason[1:]}); fetch or write it again, or "
            "leave it out."
        ) from error


def is_text_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds bytes."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def to_plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast decimals, dates, times and timestamps to text, and durations to numbers.

    Other types stay unchanged: numbers, booleans, text, null, lists, structs (dicts), maps
    (lists of pairs) and binary (bytes).
    """
    columns = []
    for column in batch.columns:
        values = column.storage if isinstance(column, pa.ExtensionArray) else column
        target_type = _get_plain_type(values.type)
        columns.append(values if target_type is values.type else values.cast(target_type))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _get_plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to cast to; the same object if nothing changes."""
    types = pa.types
    if types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_dictionary(kind):
        return _get_plain_type(kind.value_type)
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        plain_fields = [field.with_type(_get_plain_type(field.type)) for field in fields]
        return (
            kind
            if all(a.type == b.type for a, b in zip(fields, plain_fields, strict=True))
            else pa.struct(plain_fields)
        )
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            value = kind.value_field.with_type(_get_plain_type(kind.value_type))
            return kind if value.type == kind.value_type else make(value)
    return kind
