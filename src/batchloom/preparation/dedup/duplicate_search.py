"""Duplicate search: find repeated keys by key range, then read them back by unit.

Units are numbered in input order, and so are the documents of a unit. Of equal keys the first in
that order stays. A range depends on the key files alone, so any process may search ranges in any
order, also in parallel.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.preparation.dedup.sorted_keys import (
    KEY,
    WriteRecords,
    argsort_keys,
    iter_key_range,
    map_records,
    write_key_file,
)
from batchloom.store import wrap_write_errors

# A document to drop, and the document that stays in its place.
DUPLICATE = np.dtype(
    [
        *((name, "<u4") for name in ("unit", "number", "part")),
        *((f"first_{name}", "<u4") for name in ("unit", "number", "part")),
    ]
)
# Keys per batch that is compared with the remaining keys.
_BATCH_KEYS = 1 << 21
_U32 = np.uint64(32)


class _KeyBatch(NamedTuple):
    """Keys by column [K]; ``document_ids`` has the unit in the high 32 bits."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64] | None
    document_ids: NDArray[np.uint64]
    part: NDArray[np.uint32]

    def take(self, indices: NDArray[np.int64]) -> "_KeyBatch":
        low = None if self.low is None else self.low[indices]
        return _KeyBatch(self.high[indices], low, self.document_ids[indices], self.part[indices])


def search_duplicates(
    files: Sequence[Path], range_: tuple[int, int], first_new: int, out: Path, kind: np.dtype[np.void] = KEY
) -> int:
    """Write the duplicates of one key range and return their number.

    The rows are DUPLICATE, sorted by (unit, number). Memory holds the distinct keys and one batch,
    however often a key repeats.

    Args:
        files: key files, indexed by unit number.
        range_: (partition, partitions); :func:`~batchloom.preparation.dedup.count_partitions` gives the latter.
        first_new: number of the first new unit; documents of earlier units stay.
        out: the file to write.
        kind: KEY or SIGNATURE_KEY.

    Raises:
        OutputError: a file cannot be read or written, or is truncated.
    """
    with write_key_file(out) as write:
        search = _DuplicateMatcher(first_new, write)
        for unit, path in enumerate(files):
            for run in iter_key_range(path, *range_, kind):
                search.add(unit, run)
        search.compare(last=True)
        return search.duplicate_count


@final
class _DuplicateMatcher:
    """Comparison of key batches, given in input order, with the first keys so far."""

    def __init__(self, first_new: int, write: WriteRecords) -> None:
        self.duplicate_count = 0
        self._first_new = first_new
        self._write = write
        self._first_keys: _KeyBatch | None = None
        self._batch: list[_KeyBatch] = []
        self._size = 0

    def add(self, unit: int, records: NDArray[np.void]) -> None:
        document_ids = records["number"].astype(np.uint64)
        document_ids |= np.uint64(unit << 32)
        low = records["low"].copy() if "low" in (records.dtype.names or ()) else None
        self._batch.append(_KeyBatch(records["high"].copy(), low, document_ids, records["part"].copy()))
        self._size += len(records)
        if self._size >= _BATCH_KEYS:
            self.compare()

    def compare(self, *, last: bool = False) -> None:
        keys = _concat_batches([] if self._first_keys is None else [self._first_keys], self._batch)
        self._batch = []
        self._size = 0
        if keys is None:
            return
        order = argsort_keys(keys.high, keys.low)
        high = keys.high[order]
        new = np.ones(len(order), bool)
        np.not_equal(high[1:], high[:-1], out=new[1:])
        del high
        if keys.low is not None:
            low = keys.low[order]
            new[1:] |= low[1:] != low[:-1]
            del low
        firsts = np.flatnonzero(new)
        repeats = np.flatnonzero(~new)
        first_indices = order[firsts[np.searchsorted(firsts, repeats, "right") - 1]]
        self._write_duplicates(keys, order[repeats], first_indices)
        if not last:
            self._first_keys = keys.take(order[firsts])

    def _write_duplicates(
        self, keys: _KeyBatch, duplicate_indices: NDArray[np.int64], first_indices: NDArray[np.int64]
    ) -> None:
        is_new = keys.document_ids[duplicate_indices] >= np.uint64(self._first_new << 32)
        duplicate_indices = duplicate_indices[is_new]
        first_indices = first_indices[is_new]
        # Duplicates belong to this batch, and batches come in input order, so the file is sorted.
        order = np.argsort(keys.document_ids[duplicate_indices], kind="stable")
        duplicate_indices = duplicate_indices[order]
        first_indices = first_indices[order]
        rows = make_duplicate_rows(
            keys.document_ids[duplicate_indices],
            keys.part[duplicate_indices],
            keys.document_ids[first_indices],
            keys.part[first_indices],
        )
        self._write(rows)
        self.duplicate_count += len(rows)


def _concat_batches(first_keys: list[_KeyBatch], batch: list[_KeyBatch]) -> _KeyBatch | None:
    batches = [*first_keys, *batch]
    if not batch or len(batches) == 1:
        return batch[0] if batch else None
    lows = [key_batch.low for key_batch in batches if key_batch.low is not None]
    return _KeyBatch(
        np.concatenate([key_batch.high for key_batch in batches]),
        np.concatenate(lows) if lows else None,
        np.concatenate([key_batch.document_ids for key_batch in batches]),
        np.concatenate([key_batch.part for key_batch in batches]),
    )


def make_duplicate_rows(
    document_ids: NDArray[np.uint64],
    part: NDArray[np.integer],
    first: NDArray[np.uint64],
    first_part: NDArray[np.integer],
) -> NDArray[np.void]:
    """Return DUPLICATE records from document ids and parts [K].

    A document id has the unit in the high 32 bits.
    """
    rows = np.empty(len(document_ids), DUPLICATE)
    for prefix, ids, parts in (("", document_ids, part), ("first_", first, first_part)):
        rows[f"{prefix}unit"], rows[f"{prefix}number"] = ids >> _U32, ids.astype("<u4")
        rows[f"{prefix}part"] = parts
    return rows


def get_document_ids(rows: NDArray[np.void], prefix: Literal["", "first_"] = "") -> NDArray[np.uint64]:
    """Return the ids of dropped (or first) documents of DUPLICATE records."""
    units = rows[f"{prefix}unit"].astype(np.uint64)
    return (units << _U32) | rows[f"{prefix}number"].astype(np.uint64)


def read_unit_duplicates(files: Sequence[Path], unit: int, start: int = 0, stop: int = 1 << 32) -> NDArray[np.void]:
    """Return the duplicates of one unit, DUPLICATE sorted by number.

    Args:
        files: files of :func:`search_duplicates` or :func:`~batchloom.preparation.dedup.find_components`.
        unit: number of the unit.
        start: first document number.
        stop: document number after the last.

    Raises:
        OutputError: a file cannot be read, or is truncated.
    """
    row_batches = [np.zeros(0, DUPLICATE)]
    for path in files:
        rows = map_records(path, DUPLICATE)
        begin = bisect_left(rows, (unit, start), key=_document_position)
        end = bisect_left(rows, (unit, stop), begin, key=_document_position)
        unit_rows = rows[begin:end].copy()
        if ((unit_rows["unit"] != unit) | (unit_rows["number"] < start) | (unit_rows["number"] >= stop)).any():
            raise OutputError(
                f"{path} was overwritten: its records are out of order; delete its work folder to start over."
            )
        row_batches.append(unit_rows)
    duplicates = np.concatenate(row_batches)
    return duplicates[np.argsort(duplicates["number"], kind="stable")]


def _document_position(row: np.void) -> tuple[int, int]:
    return int(row["unit"]), int(row["number"])


# Maximum number of 16-byte hashes in memory. More hashes go to bucket files, which are read one at a time.
_MAX_BUFFERED = 1 << 21
_BUCKETS = 256


@final
class DuplicateCounter:
    """Context manager that counts the document hashes that occurred before.

    Above two million documents, the hashes go to temporary files, partitioned by their first
    byte. Each takes 16 bytes.

    Attributes:
        documents: number of hashes that were added.
    """

    def __init__(self) -> None:
        self.documents = 0
        self._buffer: list[NDArray[np.uint64]] = []
        self._size = 0
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add document hashes as (low, high) halves, uint64 [D, 2].

        Raises:
            OutputError: there is no room for the temporary files.
        """
        self.documents += len(hashes)
        self._buffer.append(hashes)
        self._size += len(hashes)
        if self._size >= _MAX_BUFFERED:
            self._spill_buffer()

    def count_repeated(self) -> int:
        """Return the number of documents that repeat the hash of an earlier one."""
        if self._folder is None:
            return self.documents - _count_distinct(self._drain_buffer())
        self._spill_buffer()
        paths = sorted(Path(self._folder.name).iterdir())
        return self.documents - sum(_count_distinct(np.fromfile(path, "<u8").reshape(-1, 2)) for path in paths)

    def _drain_buffer(self) -> NDArray[np.uint64]:
        buffer = self._buffer
        self._buffer = []
        self._size = 0
        return np.concatenate([np.zeros((0, 2), np.uint64), *buffer])

    def _spill_buffer(self) -> None:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="batchloom-")
        hashes = self._drain_buffer()
        folder = Path(self._folder.name)
        bucket_numbers = (hashes[:, 1] >> np.uint64(56)).astype(np.uint8)
        order = np.argsort(bucket_numbers, kind="stable")
        hashes = hashes[order]
        stops = np.cumsum(np.bincount(bucket_numbers, minlength=_BUCKETS))
        for number, bucket in enumerate(np.split(hashes, stops[:-1])):
            with wrap_write_errors(folder), (folder / f"{number:03d}").open("ab") as file:
                file.write(bucket.astype("<u8").tobytes())


def _count_distinct(hashes: NDArray[np.uint64]) -> int:
    if not len(hashes):
        return 0
    ordered = hashes[np.lexsort((hashes[:, 0], hashes[:, 1]))]
    return 1 + int((ordered[1:] != ordered[:-1]).any(axis=1).sum())
