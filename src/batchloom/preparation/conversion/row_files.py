"""Files that rows are written to: JSON Lines, JSON and Parquet."""

import contextlib
import io
import json
from typing import IO, Any, Protocol, cast, final

import orjson
import zstandard
from isal import igzip

from batchloom.core.document import Records
from batchloom.core.errors import OutputError, UnusableRecordError
from batchloom.preparation.conversion.row_mapping import Row
from batchloom.sources.files import Compression

_GROUP_BYTES = 32 << 20


class RowFile(Protocol):
    """Protocol of a file that takes rows in order."""

    def write(self, batch: Records, *, nan: bool) -> None:
        """Append rows; those that cannot be written become bad records."""

    def finish(self) -> None:
        """Write the remaining data; the underlying file stays open."""

    def abandon(self) -> None:
        """Give the file up; the underlying file is deleted by its owner."""


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
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return f"column {name!r} holds what JSON cannot hold ({error}); {remedy}"
    return f"the row cannot be written as JSON; {remedy}"


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

    def write(self, batch: Records, *, nan: bool) -> None:
        batch.convert(lambda row: _encode_row(row, nan=nan), lambda _: "")
        if batch.values:
            between = b",\n" if self._array else b"\n"
            self._out.write(self._before + between.join(batch.values) + self._after)
            self._before = between if self._array else b""

    def finish(self) -> None:
        if self._array:
            self._out.write(b"\n]\n")
        if self._packed:
            self._out.close()

    def abandon(self) -> None:
        pass


@final
class ParquetRowFile:
    """A Parquet file with a known schema and row groups of about 32 MiB."""

    def __init__(self, file: IO[bytes] | io.RawIOBase, schema: Any) -> None:
        import pyarrow.parquet as pq

        self._schema = schema
        self._writer: Any = pq.ParquetWriter(file, schema, compression="zstd")
        self._ready: list[Any] = []
        self._size = 0

    def write(self, batch: Records, *, nan: bool) -> None:
        import pyarrow as pa

        if batch.values:
            columns = [pa.array([row.get(field.name) for row in batch.values], field.type) for field in self._schema]
            self._ready.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._size += self._ready[-1].nbytes
        if self._size >= _GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        # pyarrow closes a writer that is deleted, and would write to the underlying file after that was closed.
        with contextlib.suppress(OutputError):
            self._writer.close()
        self._writer.is_open = False

    def _flush(self) -> None:
        import pyarrow as pa

        if self._ready:
            table = pa.Table.from_batches(self._ready)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._ready = []
        self._size = 0
