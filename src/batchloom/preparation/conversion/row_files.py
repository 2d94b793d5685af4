"""Row files: JSON Lines or a JSON array, plain or compressed, written in a stream."""

import io
import json
from collections.abc import Sequence
from typing import IO, Any, Protocol, cast, final

import orjson
import zstandard
from isal import igzip

from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type
from batchloom.sources.files import Compression

Row = dict[str, Any]
SkippedRow = tuple[int, str]


def coerce_row(value: Any) -> Row:
    """Return a reader's value as a row; a text becomes a row of one column."""
    return {"text": value} if isinstance(value, str) else value


class RowFile(Protocol):
    """Protocol of a file that takes rows in order."""

    def write(self, rows: Sequence[Row], *, nan: bool) -> list[SkippedRow]: ...

    def finish(self) -> None: ...


def _encode_row(row: Row, *, nan: bool) -> bytes:
    """Encode a row as one line of JSON with unchanged values.

    ``nan`` states whether the source can hold NaN, which orjson would write as null.
    """
    try:
        line = orjson.dumps(row, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError:
        return _encode_row_stdlib(row)
    return _encode_row_stdlib(row) if nan and b"null" in line else line


def _encode_row_stdlib(row: Row) -> bytes:
    """Encode a row with the standard library."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError):
        raise UnusableRecordError(_describe_unencodable(row)) from None


def _describe_unencodable(row: Row) -> str:
    remedy = "leave the column out with --columns, or write .parquet"
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False).encode()
        except TypeError:
            type_name = next(_iter_unencodable_types(value), "a value")
            return f"column {name!r} holds {type_name}, which JSON cannot hold; {remedy}"
        except ValueError:
            return f"column {name!r} holds NaN or infinity, which JSON cannot hold; {remedy}"
        except RecursionError:
            return f"column {name!r} is nested too deeply; {remedy}"
    return f"the row cannot be written as JSON; {remedy}"


def _iter_unencodable_types(value: object) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _iter_unencodable_types(item)
    elif not isinstance(value, str | int | float | None):
        yield "bytes" if isinstance(value, bytes) else describe_json_type(value)


@final
class JsonRowFile:
    """JSON Lines, or one array with one row per line (at least one row)."""

    def __init__(
        self, file: IO[bytes] | io.RawIOBase, *, array: bool = False, compression: Compression | None = None
    ) -> None:
        self._array = array
        self._before, self._after = (b"[\n", b"") if array else (b"", b"\n")
        self._out: Any = file
        self._packed = compression is not None
        if compression == "gzip":
            # The header has neither a name nor a time, so that the same rows give the same bytes.
            self._out = igzip.IGzipFile(filename="", mode="wb", fileobj=file, mtime=0)  # type: ignore[no-untyped-call]
        elif compression == "zstd":
            self._out = zstandard.ZstdCompressor().stream_writer(cast("IO[bytes]", file), closefd=False)

    def write(self, rows: Sequence[Row], *, nan: bool) -> list[SkippedRow]:
        lines, refused = [], []
        for number, row in enumerate(rows):
            try:
                lines.append(_encode_row(row, nan=nan))
            except UnusableRecordError as error:
                refused.append((number, error.reason))
        if lines:
            between = b",\n" if self._array else b"\n"
            self._out.write(self._before + between.join(lines) + self._after)
            self._before = between if self._array else b""
        return refused

    def finish(self) -> None:
        if self._array:
            self._out.write(b"\n]\n")
        if self._packed:
            self._out.close()
