"""Offsets of the row groups of Parquet files and the messages of Arrow files.

Both are read without pyarrow, which ends the process if the metadata of a Parquet column chunk is invalid: it does
not catch the C++ exception. So column chunk metadata is not requested from it before the chunk is read.

The layouts are those of ``parquet.thrift`` (Apache Parquet) in the compact protocol of Thrift, and of the page
"Serialization and Interprocess Communication" of Arrow: a marker of four bytes 0xFF, the i32 length of a flatbuffer
``Message`` (fields: version, header type, header, body length), the flatbuffer, then its body.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, final

_MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
_FIXED = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
_MAX_DEPTH = 64
# Field numbers in parquet.thrift.
_FILE_ROW_GROUPS = 4
_GROUP_COLUMNS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3
_CHUNK_METADATA, _CHUNK_CRYPTO = 3, 8
_DATA_PAGE, _DICTIONARY_PAGE = 9, 11
FILE_MAGIC = b"ARROW1"
DICTIONARY, BATCH = 2, 3
_CONTINUATION_MARKER = 0xFFFFFFFF
_MAX_METADATA_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: its rows, uncompressed bytes and the first byte of its pages."""

    rows: int
    unpacked: int
    start: int


def read_row_groups(file: BinaryIO, size: int) -> list[RowGroup]:
    """Return the row groups of a Parquet file of ``size`` bytes."""
    tail_bytes = 4 + len(_MAGIC)
    file.seek(size - tail_bytes, os.SEEK_SET)
    tail = file.read(tail_bytes)
    length = struct.unpack("<I", tail[:4])[0] if len(tail) == tail_bytes else size
    if tail[4:] != _MAGIC or length > size - tail_bytes:
        raise ValueError("its footer is damaged")
    file.seek(size - tail_bytes - length)
    reader = _CompactReader(_read_exactly(file, length))
    groups: list[RowGroup] = []
    try:
        for number, kind in reader.fields():
            if (number, kind) == (_FILE_ROW_GROUPS, _LIST):
                groups = [_read_row_group(reader) for _ in reader.structs()]
            else:
                reader.skip(kind)
    except (IndexError, struct.error) as error:
        raise ValueError("its footer is damaged") from error
    return groups


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    chunks = []
    while size and (data := file.read(size)):
        chunks.append(data)
        size -= len(data)
    return b"".join(chunks)


def _read_row_group(reader: "_CompactReader") -> RowGroup:
    rows = unpacked = 0
    starts: list[int] = []
    for number, kind in reader.fields():
        if (number, kind) == (_GROUP_COLUMNS, _LIST):
            for _ in reader.structs():
                starts += _list_chunk_pages(reader)
        elif (number, kind) == (_GROUP_BYTES, _I64):
            unpacked = reader.integer()
        elif (number, kind) == (_GROUP_ROWS, _I64):
            rows = reader.integer()
        else:
            reader.skip(kind)
    return RowGroup(rows, unpacked, min(starts, default=0))


def _list_chunk_pages(reader: "_CompactReader") -> list[int]:
    """Return the offsets of a column chunk's data pages, and dictionary page if any."""
    pages: list[int] = []
    for number, kind in reader.fields():
        if number == _CHUNK_CRYPTO:
            raise ValueError("it has encrypted columns")
        if (number, kind) != (_CHUNK_METADATA, _STRUCT):
            reader.skip(kind)
            continue
        for inner, inner_kind in reader.fields():
            if inner_kind == _I64 and inner in (_DATA_PAGE, _DICTIONARY_PAGE):
                page_offset = reader.integer()
                if page_offset or inner == _DATA_PAGE:
                    pages.append(page_offset)
            else:
                reader.skip(inner_kind)
    return pages


@final
class _CompactReader:
    """Sequential reader of Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct.

        The caller reads or skips the value before the next step.
        """
        number = 0
        while header := self._byte():
            delta, kind = header >> 4, header & 15
            number = number + delta if delta else self.integer()
            yield number, kind

    def structs(self) -> Iterator[None]:
        """Yield once for each element of a list of structs."""
        size, kind = self._list_header()
        if kind != _STRUCT and size:
            raise ValueError("its footer is damaged")
        for _ in range(size):
            yield

    def integer(self) -> int:
        """Read a signed integer."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, depth: int = 0) -> None:
        if kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            self._skip_bytes(self._varint())
        elif kind in _FIXED:
            self._skip_bytes(_FIXED[kind])
        elif kind not in (_TRUE, _FALSE):
            self._skip_nested(kind, depth + 1)

    def _skip_nested(self, kind: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("its footer is damaged")
        if kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth)
        elif kind in (_LIST, _SET):
            size, inner = self._list_header()
            for _ in range(size):
                self._skip_element(inner, depth)
        elif kind == _MAP:
            size = self._varint()
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._skip_element(kinds >> 4, depth)
                self._skip_element(kinds & 15, depth)
        else:
            raise ValueError("its footer is damaged")

    def _skip_element(self, kind: int, depth: int) -> None:
        """Skip a collection element; unlike in a field, a boolean takes a byte."""
        self.skip(_BYTE if kind in (_TRUE, _FALSE) else kind, depth)

    def _list_header(self) -> tuple[int, int]:
        header = self._byte()
        size = header >> 4
        return (self._varint() if size == 15 else size), header & 15

    def _skip_bytes(self, count: int) -> None:
        self._position += count
        if self._position > len(self._data):
            raise ValueError("its footer is damaged")

    def _byte(self) -> int:
        value = self._data[self._position]
        self._position += 1
        return value

    def _varint(self) -> int:
        data, at = self._data, self._position
        value = data[at]
        at += 1
        if value > 127:
            value &= 127
            shift = 7
            while (byte := data[at]) > 127:
                value |= (byte & 127) << shift
                shift += 7
                at += 1
                if shift > 63:
                    raise ValueError("its footer is damaged")
            value |= byte << shift
            at += 1
        self._position = at
        return value


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """A message: its kind, byte range and body length."""

    kind: int
    start: int
    stop: int
    body: int


def list_messages(file: BinaryIO, size: int) -> list[ArrowMessage]:
    """Return all messages up to the end marker of an IPC file or stream."""
    file.seek(0)
    offset = 0
    if file.read(len(FILE_MAGIC)) == FILE_MAGIC:
        offset, size = 8, _find_footer_start(file, size)
    messages: list[ArrowMessage] = []
    while offset < size:
        file.seek(offset)
        head = file.read(8)
        if len(head) < 4:
            raise ValueError("it is cut short")
        length, prefix = struct.unpack("<i", head[:4])[0], 4
        if length & 0xFFFFFFFF == _CONTINUATION_MARKER:
            if len(head) < 8:
                raise ValueError("it is cut short")
            length, prefix = struct.unpack("<i", head[4:])[0], 8
        if length == 0:
            break
        if not 0 < length <= _MAX_METADATA_BYTES:
            raise ValueError(f"invalid message length {length} at byte {offset}")
        file.seek(offset + prefix)
        kind, body = _parse_header(file.read(length))
        stop = offset + prefix + length + body
        if body < 0 or stop > size:
            raise ValueError("it is cut short")
        messages.append(ArrowMessage(kind, offset, stop, body))
        offset = stop
    return messages


def _find_footer_start(file: BinaryIO, size: int) -> int:
    """Return the footer offset of an IPC file; early writers omit the end marker."""
    tail_bytes = 4 + len(FILE_MAGIC)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < tail_bytes or tail[4:] != FILE_MAGIC:
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
