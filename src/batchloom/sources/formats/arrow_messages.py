"""Message offsets in an Arrow IPC file or stream, read from headers alone.

The layout is that of Arrow's "Serialization and Interprocess Communication" page: a marker of
four bytes 0xFF, the i32 length of a flatbuffer ``Message`` (fields: version, header type, header,
body length), the flatbuffer, then its body.
"""

import struct
from dataclasses import dataclass
from typing import BinaryIO

FILE_MAGIC = b"ARROW1"
DICTIONARY, BATCH = 2, 3
_CONTINUATION_MARKER = 0xFFFFFFFF
_MAX_METADATA_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """A message: its kind, byte range and body length."""

    kind: int
    start: int
    stop: int
    body: int


def list_messages(file: BinaryIO, size: int) -> list[ArrowMessage]:
    """Return all messages up to the end marker of an IPC file or stream.

    Raises:
        ValueError: the file is truncated or in another format.
    """
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
