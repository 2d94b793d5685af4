"""Locks: one process at a time is at a file or folder, or the others are told who is."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from batchloom.core.errors import OutputError, StoreConflictError
from batchloom.core.files import describe_os_error


def lock_exclusively(
    descriptor: int,
    path: Path,
    *,
    busy: Callable[[], str],
    ended: str,
    unable: Callable[[str], str] | None = None,
) -> None:
    """Be the only one at an open file or folder until it is closed, or the process dies.

    Args:
        descriptor: of the file or folder.
        path: the name it was opened by.
        busy: the sentence where another process is at it.
        ended: the sentence where whoever was at it has deleted or renamed it meanwhile: what is open
            is locked by nobody, and may be what the other one has finished.
        unable: the sentence where the file system has no locks, from the reason; None: the OSError of
            the system is left to the caller.

    Raises:
        StoreConflictError: another process is at it, or has just ended.
        OutputError: it cannot be locked.
    """
    try:
        # The kernel lets go of it when the process dies, however it dies.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreConflictError(busy()) from error
    except OSError as error:
        if unable is None:
            raise
        raise OutputError(unable(describe_os_error(error))) from error
    if not has_same_inode(path, descriptor):
        raise StoreConflictError(ended)


def has_same_inode(path: Path, descriptor: int) -> bool:
    """Whether what is open still has this name."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(descriptor))
