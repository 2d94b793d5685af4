"""Suffix of unfinished files, and errors of writing them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from batchloom.core.errors import BatchloomError, OutputError
from batchloom.core.files import WRITE_REMEDIES, describe_os_error

PARTIAL_SUFFIX = ".partial"


@contextlib.contextmanager
def wrap_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError about ``path`` into one sentence with its remedy.

    ``action`` is the failed action, for example "write" for "Cannot write".

    Raises:
        OutputError: replaces any OSError of the system raised inside.
    """
    try:
        yield
    except BatchloomError:
        # Some BatchloomErrors are OSErrors with a complete message.
        raise
    except OSError as error:
        raise OutputError(f"Cannot {action} {path}: {describe_os_error(error, WRITE_REMEDIES)}.") from error
