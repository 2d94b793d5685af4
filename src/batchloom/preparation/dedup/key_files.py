"""Files of keys and duplicates: written aside and renamed, so that one that exists is whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError
from batchloom.core.partial_files import PARTIAL_SUFFIX, wrap_os_errors


def describe_io_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn the system's refusal to write or read back ``path`` into one sentence with its remedy.

    Raises:
        OutputError: in place of any OSError of the system raised inside.
    """
    return wrap_os_errors("use", path)


@contextlib.contextmanager
def write_key_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when all went well, and is gone otherwise.

    What is raised inside passes as it is: who writes does so inside of :func:`describe_io_errors`.

    Raises:
        OutputError: it cannot be opened, or not be finished.
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
    # What could not be written has been told already; closing would only tell it again.
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        partial_path.unlink(missing_ok=True)


def count_records(path: Path, kind: np.dtype[np.void]) -> int:
    """How many records of ``kind`` a file has.

    Raises:
        OutputError: it cannot be read, or was cut.
    """
    with describe_io_errors(path):
        size = path.stat().st_size
    count, remainder = divmod(size, kind.itemsize)
    if remainder:
        raise OutputError(
            f"{path} has {size:,} bytes, no multiple of {kind.itemsize}: it was cut or overwritten; "
            "delete the work folder it lies in, to begin anew."
        )
    return count


def map_records(path: Path, kind: np.dtype[np.void]) -> NDArray[np.void]:
    """The records of a file, as mapped memory [records].

    Raises:
        OutputError: it cannot be read, or was cut.
    """
    if not count_records(path, kind):
        return np.zeros(0, kind)
    with describe_io_errors(path):
        return np.memmap(path, kind, "r").view(np.ndarray)
