"""Columns that documents and records of a unit carry."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.store import map_file, wrap_write_errors
from batchloom.store.format import DocumentFields, compute_pair_numbers

if TYPE_CHECKING:
    import pyarrow as pa

# Ends of the JSON of each document, and the JSON of all documents.
FIELD_NAMES = ("fields.ends", "fields.json")


def read_unit_fields(folder: Path) -> DocumentFields | None:
    """Return the columns that the documents of a unit carry; None if they carry none."""
    ends, data = (folder / name for name in FIELD_NAMES)
    if not ends.exists():
        return None
    with translate_read_errors(ends):
        return DocumentFields(np.fromfile(ends, "<u8"), map_file(data))


COLUMNS_NAME = "columns.arrow"
# Name of the first column of this file, which no column of a record has.
_KEY = "\0record"


@final
@dataclass(frozen=True, slots=True)
class UnitColumns:
    """Columns of the records of a unit."""

    keys: NDArray[np.uint64]  # pair numbers of part and record, ascending, uint64 [R]
    table: "pa.Table"  # [R]

    def take(self, rows: NDArray[np.void]) -> "pa.Table | None":
        """Return columns of documents, [D], null where a record has none; None if all are."""
        import pyarrow as pa

        keys = compute_pair_numbers(rows["part"], rows["record"])
        indices = np.minimum(self.keys.searchsorted(keys), len(self.keys) - 1)
        is_missing = self.keys[indices] != keys
        return None if is_missing.all() else self.table.take(pa.array(indices, mask=is_missing))


@final
class UnitColumnsWriter:
    """Writer of the columns of records, whose file is created with the first ones."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COLUMNS_NAME
        self._file: IO[bytes] | None = None
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None

    def add(self, part: int, columns: Mapping[int, Mapping[str, Any]]) -> None:
        """Append the columns of records of a part, by record."""
        if columns:
            import pyarrow as pa

            keys = compute_pair_numbers(np.full(len(columns), part, np.uint32), np.array([*columns], np.uint64))
            self.write(UnitColumns(keys, pa.Table.from_pylist([*columns.values()])))

    def write(self, columns: UnitColumns) -> None:
        """Append columns."""
        import pyarrow as pa

        table = columns.table.add_column(0, _KEY, pa.array(columns.keys))
        with wrap_write_errors(self._path):
            if self._stream is None:
                self._file = self._path.open("wb")
                self._stream = pa.ipc.new_stream(self._file, table.schema)
            self._stream.write_table(table)

    def sync(self) -> None:
        """Complete the file and flush it to disk."""
        if self._stream is not None and self._file is not None:
            with wrap_write_errors(self._path):
                self._stream.close()
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        # As for other files, a failed write has raised already.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def read_unit_columns(folder: Path) -> UnitColumns | None:
    """Return the columns of the records of a unit; None if no record has some."""
    path = folder / COLUMNS_NAME
    if not path.exists():
        return None
    import pyarrow as pa

    with translate_read_errors(path):
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except pa.ArrowInvalid as error:
            raise OSError(str(error)) from error
    return UnitColumns(table[_KEY].to_numpy(), table.drop_columns([_KEY]))
