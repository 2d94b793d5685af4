"""Writing aside: the name of a file that is not finished, and what is said when the system refuses it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from batchloom.core.errors import BatchloomError, OutputError
from batchloom.core.files import WRITE_REMEDIES, describe_os_error

PARTIAL_SUFFIX = ".partial"


@contextlib.contextmanager
def wrap_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal of ``path`` into one sentence with its remedy.

    Args:
        action: what is tried, as in "Cannot write".
        path: the file or folder.

    Raises:
        OutputError: in place of any OSError of the system raised inside.
    """
    try:
        yield
    except BatchloomError:
        # Some of ours are OSErrors too, and say already what is wrong.
        raise
    except OSError as error:
        raise OutputError(f"Cannot {action} {path}: {describe_os_error(error, WRITE_REMEDIES)}.") from error
