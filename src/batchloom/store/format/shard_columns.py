"""The ``.parquet`` of a shard: columns of the documents' records.

It is a plain Parquet file with one row per document, in shard order, which other programs read without batchloom. A
document whose record has no columns has nulls; a shard without any has no file.
"""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.store.format.shard_sidecars import CHECK_REMEDY

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are read together to find the columns of one document.
_GROUP_ROWS = 1 << 12


def encode_columns(table: "pa.Table") -> bytes:
    """Return a shard's complete ``.parquet``; its bytes depend on Arrow's version."""
    import pyarrow.parquet as pq

    output = BytesIO()
    # One chunk: the bytes must not depend on the batches in which the records were read.
    pq.write_table(table.combine_chunks(), output, row_group_size=_GROUP_ROWS, compression="zstd")
    return output.getvalue()


def read_columns(path: Path, view: memoryview, documents: int, rows: NDArray[np.int64] | None = None) -> "pa.Table":
    """Read columns of the ``.parquet`` of a shard.

    Args:
        path: its path, for messages.
        view: its content.
        documents: number of documents of the shard.
        rows: documents of the shard whose rows are read, int64 [n]; None for all.

    Raises:
        StoreError: it is no Parquet file, or has another number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(view))
        if file.metadata.num_rows != documents:
            raise StoreError(
                f"{path} has {file.metadata.num_rows} rows, the manifest says {documents} documents. {CHECK_REMEDY}"
            )
        if rows is None:
            return file.read()
        sizes = np.array([file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)])
        ends = np.cumsum(sizes)
        # Only the groups that hold rows are read.
        groups, own = np.unique(np.searchsorted(ends, rows, side="right"), return_inverse=True)
        shifts = np.cumsum(sizes[groups]) - ends[groups]
        return file.read_row_groups(groups.tolist()).take(rows + shifts[own])
    except (pa.ArrowException, OSError) as error:
        # Arrow raises the second for pages that cannot be decompressed.
        raise StoreError(f"{path} is no sound Parquet file: {error}. {CHECK_REMEDY}") from error
