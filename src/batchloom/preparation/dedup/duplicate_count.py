"""Count exact duplicate documents by 128-bit hashes, in bounded memory."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from batchloom.store import wrap_write_errors

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
        buffer, self._buffer, self._size = self._buffer, [], 0
        return np.concatenate([np.zeros((0, 2), np.uint64), *buffer])

    def _spill_buffer(self) -> None:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="batchloom-")
        hashes, folder = self._drain_buffer(), Path(self._folder.name)
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
