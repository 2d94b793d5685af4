"""Key files of documents, lines and bands, sorted in runs to read key ranges.

Files are renamed into place, so existing ones are complete.
"""

import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.core.files import PARTIAL_SUFFIX, release_pages, wrap_os_errors

# Two keys match if both halves are equal. `part` is the index of the file part in the unit.
KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4"), ("part", "<u4")])
# The key of one band of a document: half as wide, as a document has many of them.
SIGNATURE_KEY = np.dtype([("high", "<u8"), ("number", "<u4"), ("part", "<u4")])

# Keys per sorted run. The file format depends on this number.
RUN_KEYS = 1 << 21
# Keys per partition. The search takes 600 MiB, however often keys repeat.
_PARTITION_KEYS = 1 << 21


WriteRecords = Callable[[NDArray[np.void]], None]


def count_partitions(keys: int) -> int:
    """Return the number of ranges into which the key space is cut for ``keys`` keys."""
    return max(1, -(-keys // _PARTITION_KEYS))


def argsort_keys(high: NDArray[np.uint64], low: NDArray[np.uint64] | None) -> NDArray[np.int64]:
    """Return the indices that sort keys by (high, low, index), int64 [K].

    Different keys rarely share a high half, so low halves are compared only among those.
    """
    order = np.argsort(high)
    high = high[order]
    is_new = high[1:] != high[:-1]
    if is_new.all():
        return order
    # Two fast sorts, the second one by rank and index, take a third of the time of a stable sort.
    ranks = np.zeros(len(order), np.int64)
    np.cumsum(is_new, out=ranks[1:])
    order |= ranks << 32
    order.sort()
    order &= 0xFFFFFFFF
    if low is not None:
        low = low[order]
        collisions = ~is_new & (low[1:] != low[:-1])
        if collisions.any():
            in_collision = np.isin(high, high[1:][collisions])
            suborder = np.lexsort((order[in_collision], low[in_collision], high[in_collision]))
            order[in_collision] = order[in_collision][suborder]
    return order


@contextlib.contextmanager
def open_key_writer(path: Path, kind: np.dtype[np.void] = KEY) -> Iterator[Callable[[NDArray[np.void]], None]]:
    """Open the key file of one unit and yield the function that appends keys to it.

    The function takes records of ``kind`` [K]; document numbers must not decrease. The file holds
    records back to back, sorted by (high, low, number) within runs of RUN_KEYS. The last run may be
    shorter. The file exists only on success.

    Args:
        path: the file to write.
        kind: KEY or SIGNATURE_KEY.

    Raises:
        OutputError: the file cannot be written.
    """
    with write_key_file(path) as write:
        runs = _RunSorter(write, kind)
        yield runs.add
        runs.finish()


@final
class _RunSorter:
    """Writer of keys in sorted runs of RUN_KEYS."""

    def __init__(self, write: WriteRecords, kind: np.dtype[np.void]) -> None:
        self._write = write
        self._kind = kind
        self._buffer: list[NDArray[np.void]] = []
        self._size = 0
        self._last = 0

    def add(self, records: NDArray[np.void]) -> None:
        if records.dtype != self._kind:
            raise AssertionError(f"keys of another dtype: {records.dtype}")
        if not len(records):
            return
        numbers = records["number"]
        if int(numbers[0]) < self._last or (numbers[1:] < numbers[:-1]).any():
            raise AssertionError("the numbers of keys decrease")
        self._last = int(numbers[-1])
        while self._size + len(records) >= RUN_KEYS:
            room = RUN_KEYS - self._size
            self._write_run(np.concatenate([*self._buffer, records[:room]]))
            records = records[room:]
            self._buffer = []
            self._size = 0
        self._buffer.append(records)
        self._size += len(records)

    def finish(self) -> None:
        if self._size:
            self._write_run(np.concatenate(self._buffer))

    def _write_run(self, records: NDArray[np.void]) -> None:
        low = records["low"].copy() if "low" in (records.dtype.names or ()) else None
        order = argsort_keys(records["high"].copy(), low)
        # For records, np.take is several times as fast as indexing.
        self._write(np.take(records, order))


def make_key_records(
    hashes: NDArray[np.uint64], numbers: NDArray[np.uint32], parts: NDArray[np.uint32]
) -> NDArray[np.void]:
    """Return records of 128-bit hashes, KEY [D].

    Args:
        hashes: hashes as (low, high) halves [D, 2].
        numbers: number of each document in its unit [D].
        parts: index of each document's file part in the unit [D].
    """
    records = np.empty(len(hashes), KEY)
    records["low"], records["high"] = hashes[:, 0], hashes[:, 1]
    records["number"], records["part"] = numbers, parts
    return records


def write_keys(path: Path, hashes: NDArray[np.uint64], numbers: NDArray[np.uint32], parts: NDArray[np.uint32]) -> None:
    """Write the keys of one unit from memory; see :func:`make_key_records`.

    Raises:
        OutputError: the file cannot be written.
    """
    with open_key_writer(path) as add:
        add(make_key_records(hashes, numbers, parts))


def count_keys(files: Sequence[Path], kind: np.dtype[np.void] = KEY) -> int:
    """Return the number of keys in files.

    Raises:
        OutputError: a file cannot be read, or is truncated.
    """
    return sum(count_records(path, kind) for path in files)


def iter_key_range(
    path: Path, partition: int, partitions: int, kind: np.dtype[np.void] = KEY
) -> Iterator[NDArray[np.void]]:
    """Yield the keys of one range run by run, as mapped memory.

    The next step releases the memory of the previous run.
    """
    records = map_records(path, kind)
    begin, end = ((boundary << 64) // partitions for boundary in (partition, partition + 1))
    for start in range(0, len(records), RUN_KEYS):
        run = records[start : start + RUN_KEYS]
        high = run["high"]
        first = bisect_left(high, np.uint64(begin))
        last = len(run) if end >> 64 else bisect_left(high, np.uint64(end), first)
        if last > first:
            yield run[first:last]
            release_pages(records)


@contextlib.contextmanager
def write_key_file(path: Path) -> Iterator[WriteRecords]:
    """Yield a function that writes records to a file; it replaces ``path`` on success.

    It is removed on failure. Other errors of the body pass unchanged.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    with wrap_os_errors("write", path):
        file = partial_path.open("wb")

    def write(records: NDArray[np.void]) -> None:
        with wrap_os_errors("write", path):
            file.write(records.data)

    try:
        with file:
            yield write
            with wrap_os_errors("write", path):
                file.flush()
                os.fsync(file.fileno())
        with wrap_os_errors("write", path):
            partial_path.replace(path)
    except BaseException:
        partial_path.unlink(missing_ok=True)
        raise


def count_records(path: Path, kind: np.dtype[np.void]) -> int:
    with wrap_os_errors("use", path):
        size = path.stat().st_size
    count, remainder = divmod(size, kind.itemsize)
    if remainder:
        raise OutputError(
            f"{path} has {size:,} bytes, which is not a multiple of {kind.itemsize}: it was truncated or "
            "overwritten; delete its work folder to start over."
        )
    return count


def map_records(path: Path, kind: np.dtype[np.void]) -> NDArray[np.void]:
    if not count_records(path, kind):
        return np.zeros(0, kind)
    with wrap_os_errors("use", path):
        return np.memmap(path, kind, "r").view(np.ndarray)
