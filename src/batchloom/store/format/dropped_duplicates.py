r"""The ``report.duplicates`` file: dropped duplicates, and the records kept.

Layout (little-endian): 8 bytes ``BLMDUPS\0``; u64 version 1; u64 rows N; four u16 as in ``.bands``, zeros if only
equal documents were dropped; u64 [2] XXH3-128 (low half, high half) of the rows followed by these 32 bytes; then N rows
of 26 bytes, ``DROPPED_ROW``. The rows are sorted by (kept, dropped) within runs of ``RUN_ROWS``, so that a file of any
size is written in bounded memory. A lookup searches each run.
"""

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.files import PARTIAL_SUFFIX, release_pages, wrap_os_errors
from batchloom.store.format.layout import DUPLICATES_NAME, format_generation_file_name
from batchloom.store.format.shard_sidecars import (
    CHECK_REMEDY,
    HEADER,
    Banding,
    map_file_with_header,
    split_pair_numbers,
    unpack_banding,
)

# The records are numbered as the pairs of `.pairs` files. `offset` is the byte offset of the dropped record in its
# source, `shared` the number of MinHash bands that both documents share, or EQUAL.
DROPPED_ROW = np.dtype([("kept", "<u8"), ("dropped", "<u8"), ("offset", "<u8"), ("shared", "<u2")])
EQUAL = 0xFFFF
RUN_ROWS = 1 << 20
_MAGIC = b"BLMDUPS\x00"
_CHECKSUM = struct.Struct("<QQ")
_HEADER_BYTES = HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class DroppedDuplicates:
    """A mapped file of dropped duplicates.

    Attributes:
        path: path of the file.
        rows: one dropped duplicate each, DROPPED_ROW [N].
        banding: parameters of the MinHash bands; None if only equal documents were dropped.
        checksum: recorded checksum of the rows and the header.
    """

    path: Path
    rows: NDArray[np.void]
    banding: Banding | None
    checksum: int

    def list_copies(self, kept: int) -> list[NDArray[np.void]]:
        """Return the rows of the copies of a kept record, one array per run."""
        copies = []
        for run in self.iter_runs():
            kept_records = run["kept"]
            begin = bisect_left(kept_records, np.uint64(kept))
            end = bisect_right(kept_records, np.uint64(kept), begin)
            if begin < end:
                copies.append(run[begin:end])
        return copies

    def iter_runs(self) -> Iterator[NDArray[np.void]]:
        """Yield the sorted runs."""
        for start in range(0, len(self.rows), RUN_ROWS):
            yield self.rows[start : start + RUN_ROWS]

    def find_fault(self, record_counts: NDArray[np.uint64]) -> str:
        """Describe the first fault, or return an empty string.

        Args:
            record_counts: number of records of each part of the store.
        """
        digest = xxhash.xxh3_128()
        is_in_range = True
        for run in self.iter_runs():
            digest.update(run.tobytes())
            parts, records = split_pair_numbers(np.concatenate([run["kept"], run["dropped"]]))
            is_in_range &= int(parts.max()) < len(record_counts) and bool((records < record_counts[parts]).all())
            release_pages(run)
        digest.update(HEADER.pack(_MAGIC, 1, len(self.rows), self.banding.pack() if self.banding else 0))
        if digest.intdigest() != self.checksum:
            return "checksum differs from that in its header"
        return "" if is_in_range else "it names records that no source has"


def write_dropped_duplicates(path: Path, tables: Iterable[NDArray[np.void]], banding: Banding | None) -> None:
    """Write a file of dropped duplicates atomically.

    Args:
        path: the file.
        tables: the dropped duplicates in any order, DROPPED_ROW [K] each.
        banding: parameters of the MinHash bands; None if only equal documents were dropped.

    Raises:
        OutputError: the file cannot be written.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    digest = xxhash.xxh3_128()
    count = 0
    with wrap_os_errors("write", path):
        with partial_path.open("wb") as file:
            file.seek(_HEADER_BYTES)
            for run in _cut_runs(tables):
                data = np.take(run, np.lexsort((run["dropped"], run["kept"]))).tobytes()
                file.write(data)
                digest.update(data)
                count += len(run)
            header = HEADER.pack(_MAGIC, 1, count, banding.pack() if banding else 0)
            digest.update(header)
            file.seek(0)
            file.write(header + _CHECKSUM.pack(digest.intdigest() & (1 << 64) - 1, digest.intdigest() >> 64))
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)


def _cut_runs(tables: Iterable[NDArray[np.void]]) -> Iterator[NDArray[np.void]]:
    """Yield the same rows in runs of RUN_ROWS; only the last may be shorter."""
    rows = np.zeros(0, DROPPED_ROW)
    for table in tables:
        rows = np.concatenate([rows, table])
        while len(rows) >= RUN_ROWS:
            yield rows[:RUN_ROWS]
            rows = rows[RUN_ROWS:]
    if len(rows):
        yield rows


def map_dropped_duplicates(folder: Path, generation: int) -> DroppedDuplicates | None:
    """Map the duplicates that a generation dropped; None if it has no such file.

    Raises:
        StoreError: the file is of another type or version, or its count does not match its size.
    """
    path = folder / format_generation_file_name(DUPLICATES_NAME, generation)
    if not path.exists():
        return None
    view, count, packed = map_file_with_header(path, _MAGIC)
    if len(view) != _HEADER_BYTES + DROPPED_ROW.itemsize * count:
        raise StoreError(f"{path} declares {count:,} rows, which do not fit its {len(view):,} bytes. {CHECK_REMEDY}")
    low, high = _CHECKSUM.unpack_from(view, HEADER.size)
    rows = np.frombuffer(view, DROPPED_ROW, count, _HEADER_BYTES)
    return DroppedDuplicates(path, rows, unpack_banding(packed) if packed else None, (high << 64) | low)
