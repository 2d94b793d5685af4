"""gcsfs as the other libraries are: it asks once, and its errors say what was answered."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from batchloom.remote.remote_errors import AnswerError


def disable_retries(fs: Any) -> None:
    """Have a file system of gcsfs ask once where it would ask six times, a minute in all.

    What fails is asked again by us.
    """
    once = getattr(type(fs)._request, "__wrapped__", None)  # noqa: SLF001 - it has no setting for it
    if once is not None:
        fs._request = functools.partial(once, fs)  # noqa: SLF001


@contextlib.contextmanager
def translate_gcs_errors() -> Iterator[None]:
    """Turn what gcsfs tells in words alone into an error with the number of the answer.

    Raises:
        AnswerError: in place of its own.
    """
    try:
        yield
    except OSError as error:
        if type(error) is OSError and str(error).startswith("Forbidden"):
            raise AnswerError(403) from None
        raise
    except ValueError as error:
        if str(error).startswith("Bad Request"):
            raise AnswerError(400) from None
        raise
