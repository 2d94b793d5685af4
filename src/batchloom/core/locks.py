"""Exclusive file locks between processes."""

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
    """Lock an open file or folder until it is closed or the process dies.

    Args:
        descriptor: descriptor of the file or folder.
        path: the path it was opened by.
        busy: returns the message if another process holds the lock.
        ended: message if the previous holder has deleted or renamed the path meanwhile: the open file
            then has no lock, and may be the other process's finished output.
        unable: returns the message for a reason if the file system has no locks; None re-raises the OSError.

    Raises:
        StoreConflictError: another process holds the lock, or has just ended.
        OutputError: the file cannot be locked.
    """
    try:
        # The kernel releases it when the process dies, even if it is killed.
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
    """Return whether the open file still has this path."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(descriptor))
