"""Key and duplicate files, renamed into place so that existing files are complete."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.core.files import PARTIAL_SUFFIX, wrap_os_errors


def describe_io_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Raise OSErrors about ``path`` as an OutputError with a remedy."""
    return wrap_os_errors("use", path)


@contextlib.contextmanager
def write_key_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is renamed to ``path`` on success and removed on failure.

    Exceptions of the body pass unchanged, so callers wrap their writes in :func:`describe_io_errors`.
    """
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    with contextlib.ExitStack() as stack:
        with describe_io_errors(path):
            file = partial_path.open("wb")
        stack.callback(_discard_partial, file, partial_path)
        yield file
        with describe_io_errors(path):
            file.flush()
            os.fsync(file.fileno())
            partial_path.replace(path)


def _discard_partial(file: BinaryIO, partial_path: Path) -> None:
    # The write error is already raised. An error on closing would only repeat it.
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        partial_path.unlink(missing_ok=True)


def count_records(path: Path, kind: np.dtype[np.void]) -> int:
    """Return the number of records of ``kind``.

    Raises:
        OutputError: the file cannot be read, or is truncated.
    """
    with describe_io_errors(path):
        size = path.stat().st_size
    count, remainder = divmod(size, kind.itemsize)
    if remainder:
        raise OutputError(
            f"{path} has {size:,} bytes, which is not a multiple of {kind.itemsize}: it was truncated or "
            "overwritten; delete its work folder to start over."
        )
    return count


def map_records(path: Path, kind: np.dtype[np.void]) -> NDArray[np.void]:
    """Memory-map the records of a file, ``kind`` [records].

    Raises:
        OutputError: the file cannot be read, or is truncated.
    """
    if not count_records(path, kind):
        return np.zeros(0, kind)
    with describe_io_errors(path):
        return np.memmap(path, kind, "r").view(np.ndarray)
