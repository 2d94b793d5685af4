"""Reader of TensorBoard event files as rows in written order."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, MissingDependencyError

# Header of a record: its length (8 bytes) and the checksum of the length (4).
_RECORD_HEADER = struct.Struct("<QI")
_RECORD_CHECKSUM = struct.Struct("<I")


def read_events(files: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Return the rows of the event files of one run, file by file.

    A row has ``step`` and the scalars written consecutively for it, by tag; values that are not numbers are unchanged.
    If a run restarts at a step, rows from that step on are removed.

    ``files`` is in written order. Raises ``InputError`` for a damaged file (an unfinished end, left by a killed
    process, is no damage) and ``MissingDependencyError`` without tensorboard.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import (  # noqa: PLC0415 - it is optional
            Event,
            SessionLog,
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"{files[0]} holds TensorBoard events, and tensorboard is not installed: pip install tensorboard."
        ) from error
    parts: list[list[dict[str, Any]]] = []
    for file in files:
        rows: list[dict[str, Any]] = []
        parts.append(rows)
        for record in _iter_event_records(file):
            event = Event.FromString(record)
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                for part in parts:
                    part[:] = [row for row in part if row["step"] < event.step]
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                if kind in ("simple_value", "tensor"):
                    scalar = value.simple_value if kind == "simple_value" else _tensor_to_scalar(value.tensor)
                    _add_value(rows, event.step, value.tag, scalar)
    return parts


def _add_value(rows: list[dict[str, Any]], step: int, tag: str, value: Any) -> None:
    """Add a value to the last row; start a new row on another step or a repeated tag."""
    if not rows or rows[-1]["step"] != step or tag in rows[-1]:
        rows.append({"step": step})
    # The step comes last, so that a tag named "step" cannot replace it.
    rows[-1] |= {tag: value, "step": step}


def _tensor_to_scalar(tensor: Any) -> Any:
    from tensorboard.util.tensor_util import make_ndarray  # noqa: PLC0415 - it is optional

    array = make_ndarray(tensor)
    return array.item() if array.size == 1 else array


def _iter_event_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file.

    A record is its length, the checksum of the length, the bytes, and the checksum of the bytes.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (  # noqa: PLC0415 - it is optional
        masked_crc32c,
    )

    data, offset = file.read_bytes(), 0
    while offset + _RECORD_HEADER.size <= len(data):
        size, length_checksum = _RECORD_HEADER.unpack_from(data, offset)
        begin = offset + _RECORD_HEADER.size
        has_valid_length = masked_crc32c(data[offset : offset + 8]) == length_checksum
        if has_valid_length and begin + size + _RECORD_CHECKSUM.size > len(data):
            return
        record = data[begin : begin + size]
        if not has_valid_length or masked_crc32c(record) != _RECORD_CHECKSUM.unpack_from(data, begin + size)[0]:
            raise InputError(
                f"{file} is damaged at byte {offset:,} of {len(data):,}: a checksum does not match its bytes, and "
                "the rest cannot be read. Copy the file again from where it was written."
            )
        yield record
        offset = begin + size + _RECORD_CHECKSUM.size
