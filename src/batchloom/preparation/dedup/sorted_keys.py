"""Keys of documents, lines and bands in files: sorted in runs, so that any range of keys is read alone."""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import release_pages
from batchloom.preparation.dedup.key_files import (
    count_records,
    describe_io_errors,
    map_records,
    write_key_file,
)

# What is equal when both halves are equal; `part` is the place of its file part in the unit.
KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4"), ("part", "<u4")])
# The key of one band of a document: half as wide, as there are many to a document.
SIGNATURE_KEY = np.dtype([("high", "<u8"), ("number", "<u4"), ("part", "<u4")])

# Keys that are sorted together; a part of the form of the file.
RUN_KEYS = 1 << 21
# Keys of a partition. However often they repeat, they are searched in 600 MiB.
_PARTITION_KEYS = 1 << 21


def count_partitions(keys: int) -> int:
    """Into how many ranges the space of keys is cut where there are so many keys."""
    return max(1, -(-keys // _PARTITION_KEYS))


def argsort_keys(high: NDArray[np.uint64], low: NDArray[np.uint64] | None) -> NDArray[np.int64]:
    """The places of keys in the order of (high, low, place), int64 [K].

    Two different keys of one high half are rare, so halves are compared only among those.
    """
    order = np.argsort(high, kind="stable")
    if low is None:
        return order
    high, low = high[order], low[order]
    collisions = (high[1:] == high[:-1]) & (low[1:] != low[:-1])
    if collisions.any():
        in_collision = np.isin(high, high[1:][collisions])
        suborder = np.lexsort((order[in_collision], low[in_collision], high[in_collision]))
        order[in_collision] = order[in_collision][suborder]
    return order


@contextlib.contextmanager
def open_key_writer(path: Path, kind: np.dtype[np.void] = KEY) -> Iterator[Callable[[NDArray[np.void]], None]]:
    """The keys of one unit while they are written; gives the function that takes them.

    It takes records of ``kind`` [K], of documents whose numbers never go down. The file is
    records back to back, sorted by (high, low, number) inside runs of RUN_KEYS; the last run is what
    is left. It exists when all went well.

    Args:
        path: the file.
        kind: KEY or SIGNATURE_KEY.

    Raises:
        OutputError: it cannot be written.
    """
    with write_key_file(path) as file:
        runs = _RunSorter(path, file, kind)
        yield runs.add
        runs.finish()


@final
class _RunSorter:
    """Sorts keys in runs of RUN_KEYS and writes them down."""

    def __init__(self, path: Path, file: IO[bytes], kind: np.dtype[np.void]) -> None:
        self._path, self._file, self._kind = path, file, kind
        self._buffer: list[NDArray[np.void]] = []
        self._size = 0
        self._last = 0

    def add(self, records: NDArray[np.void]) -> None:
        if records.dtype != self._kind:
            raise AssertionError(f"keys of another form: {records.dtype}")
        if not len(records):
            return
        numbers = records["number"]
        if int(numbers[0]) < self._last or (numbers[1:] < numbers[:-1]).any():
            raise AssertionError("the numbers of keys go down")
        self._last = int(numbers[-1])
        while self._size + len(records) >= RUN_KEYS:
            room = RUN_KEYS - self._size
            self._write_run(np.concatenate([*self._buffer, records[:room]]))
            records, self._buffer, self._size = records[room:], [], 0
        self._buffer.append(records)
        self._size += len(records)

    def finish(self) -> None:
        if self._size:
            self._write_run(np.concatenate(self._buffer))

    def _write_run(self, records: NDArray[np.void]) -> None:
        low = records["low"].copy() if "low" in (records.dtype.names or ()) else None
        order = argsort_keys(records["high"].copy(), low)
        # Several times as fast as indexing, for records.
        with describe_io_errors(self._path):
            self._file.write(np.take(records, order).data)


def make_key_records(
    hashes: NDArray[np.uint64], numbers: NDArray[np.uint32], parts: NDArray[np.uint32]
) -> NDArray[np.void]:
    """Records of 128-bit hashes, KEY [D].

    Args:
        hashes: as (low, high) halves [D, 2].
        numbers: of the documents in their unit [D].
        parts: the place of each document's file part in the unit [D].
    """
    records = np.empty(len(hashes), KEY)
    records["low"], records["high"] = hashes[:, 0], hashes[:, 1]
    records["number"], records["part"] = numbers, parts
    return records


def write_keys(
    path: Path,
    hashes: NDArray[np.uint64],
    numbers: NDArray[np.uint32],
    parts: NDArray[np.uint32],
) -> None:
    """Write the keys of one unit that are in memory; see :func:`make_key_records`.

    Raises:
        OutputError: the file cannot be written.
    """
    with open_key_writer(path) as add:
        add(make_key_records(hashes, numbers, parts))


def count_keys(files: Sequence[Path], kind: np.dtype[np.void] = KEY) -> int:
    """Keys in files.

    Raises:
        OutputError: one cannot be read, or was cut.
    """
    return sum(count_records(path, kind) for path in files)


def iter_key_range(
    path: Path, partition: int, partitions: int, kind: np.dtype[np.void] = KEY
) -> Iterator[NDArray[np.void]]:
    """The keys of one range, a run after the other, as mapped memory that is let go of when the next is asked for."""
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
