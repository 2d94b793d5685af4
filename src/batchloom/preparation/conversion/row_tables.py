"""Parquet output of rows in bounded memory; importing pyarrow takes its time."""

import io
from typing import IO, Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from batchloom.core.document import Records
from batchloom.preparation.conversion.row_conversion import ColumnType, UntabularError

_GROUP_BYTES = 32 << 20
_SCALAR_TYPES: dict[type, pa.DataType] = {bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}


def build_arrow_schema(shape: ColumnType) -> pa.Schema:
    if not shape.fields:
        raise UntabularError((), "the rows have no columns")
    return pa.schema([(name, _arrow_type(field_shape, (name,))) for name, field_shape in shape.fields.items()])


def _arrow_type(shape: ColumnType, path: tuple[str, ...]) -> pa.DataType:
    kinds = set(shape.kinds)
    if not kinds:
        return pa.null()
    if float in kinds:
        return pa.float64()
    if int in kinds:
        return pa.int64() if shape.most < 1 << 63 else pa.uint64()
    if list in kinds:
        return pa.list_(_arrow_type(shape.items or ColumnType(), (*path, "[]")))
    if dict in kinds:
        if not shape.fields:
            raise UntabularError(path, "holds objects without fields")
        return pa.struct(
            [(name, _arrow_type(field_shape, (*path, name))) for name, field_shape in shape.fields.items()]
        )
    return _SCALAR_TYPES[shape.kinds[0]]


@final
class ParquetRowFile:
    """A Parquet file with a known schema and row groups of about 32 MiB."""

    def __init__(self, file: IO[bytes] | io.RawIOBase, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer: Any = pq.ParquetWriter(file, schema, compression="zstd")
        self._ready: list[pa.RecordBatch] = []
        self._size = 0

    def write(self, batch: Records, *, nan: bool) -> None:  # noqa: ARG002 - Parquet holds NaN
        if batch.values:
            columns = [pa.array([row.get(field.name) for row in batch.values], field.type) for field in self._schema]
            self._ready.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._size += self._ready[-1].nbytes
        if self._size >= _GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._ready:
            table = pa.Table.from_batches(self._ready)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._ready, self._size = [], 0
