"""Adapt gcsfs to the other libraries: no retries, and errors with a status code."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from batchloom.remote.remote_errors import AnswerError


def disable_retries(fs: Any) -> None:
    """Disable the retries of gcsfs, six attempts within a minute.

    Batchloom retries itself.
    """
    once = getattr(type(fs)._request, "__wrapped__", None)  # noqa: SLF001 - it has no setting for it
    if once is not None:
        fs._request = functools.partial(once, fs)  # noqa: SLF001


@contextlib.contextmanager
def translate_gcs_errors() -> Iterator[None]:
    """Turn gcsfs errors that only have a text into errors with a status code.

    Raises:
        AnswerError: instead of the error of gcsfs.
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
