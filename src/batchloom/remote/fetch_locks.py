"""Locks of blocks that are being fetched, so that each node fetches a block once.

A lock is a kernel lock on a byte range of an empty file, held by an open file description. It ends
with its process, even a killed one, and needs no cleanup. No process waits while it holds a lock.
On a file system without such locks, blocks may be fetched twice, which is slow but correct.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import numpy as np

from batchloom.remote.intervals import NO_INTERVALS, Intervals

# struct flock of Linux: type, whence, start, length, process (0 for locks of a description).
_FLOCK_STRUCT = struct.Struct("hhqqi4x")
_SET_LOCK_COMMAND = getattr(fcntl, "F_OFD_SETLK", None)


@final
class FetchLocks:
    """Locks of one fetch; use :func:`open_fetch_locks`."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def acquire(self, intervals: Intervals) -> Intervals:
        """Lock the intervals that no other process has locked, and return them."""
        if self._descriptor is None or _SET_LOCK_COMMAND is None:
            return intervals
        locked_intervals = []
        for start, stop in intervals.tolist():
            try:
                fcntl.fcntl(self._descriptor, _SET_LOCK_COMMAND, _pack_flock(fcntl.F_WRLCK, start, stop))
            except BlockingIOError:
                continue
            except OSError:
                # The file system has no such locks.
                return intervals
            locked_intervals.append((start, stop))
        return np.array(locked_intervals, np.int64) if locked_intervals else NO_INTERVALS

    def release(self) -> None:
        """Release all locks, also those that forked children inherited."""
        if self._descriptor is not None and _SET_LOCK_COMMAND is not None:
            fcntl.fcntl(self._descriptor, _SET_LOCK_COMMAND, _pack_flock(fcntl.F_UNLCK, 0, 0))


def _pack_flock(kind: int, start: int, stop: int) -> bytes:
    return _FLOCK_STRUCT.pack(kind, os.SEEK_SET, start, stop - start, 0)


@contextmanager
def open_fetch_locks(path: Path) -> Iterator[FetchLocks]:
    """Open the fetch locks of one store on a node.

    Args:
        path: lock file; it is created, and stays empty.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield FetchLocks(None)
        return
    fetch_locks = FetchLocks(descriptor)
    try:
        yield fetch_locks
    finally:
        try:
            fetch_locks.release()
        except OSError:
            pass  # The file system has no such locks, so none was taken.
        finally:
            os.close(descriptor)
