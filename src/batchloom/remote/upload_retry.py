"""Asking a store elsewhere, again and again for a while: what fails there often passes."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

import xxhash

from batchloom.core.errors import OutputError
from batchloom.remote.client import outcome, patience
from batchloom.remote.remote_errors import Fault, not_written

T = TypeVar("T")

# One request is tried so often, and not again after so many seconds.
TRIES, SECONDS = 8, 300.0
# Where the first word of a job is not heard, a person waits.
FIRST_TRIES = 4
# Said by threads that nobody listens to any longer.
_STOPPED = "Stopped."


def waiting(tries: int, name: str) -> float:
    """Seconds to wait after so many failures in a row; as many uploads fail together, each waits another time.

    Between a half and all of what :func:`patience` says, by the name of what is written.
    """
    share = xxhash.xxh3_64_intdigest(f"{name}\n{tries}".encode()) / 2**64
    return patience(tries) * (0.5 + share / 2)


@final
class Asking:
    """What a job asks of one place.

    Args:
        url: the place, for what is said of it.
        ended: is set when the job ends, so that nothing is asked or waited for any longer.
        first: whether this is the job's first word there: what cannot be reached is told at once.
    """

    def __init__(self, url: str, ended: threading.Event, *, first: bool = False) -> None:
        self._url, self._ended, self._first = url, ended, first
        self._given_up = threading.Event()

    def __call__(self, work: Callable[[], T]) -> T:
        """Do a piece of work, again where what failed may pass.

        Raises:
            FileNotFoundError: what it asks for is not there.
            FileExistsError: what it would make is there.
            OutputError: it failed for good.
        """
        began = time.monotonic()
        most = FIRST_TRIES if self._first else TRIES
        tries = 0
        while True:
            if self._ended.is_set():
                raise OutputError(_STOPPED)
            found = outcome(work)
            if not isinstance(found, Fault):
                return found
            tries += 1
            if found.what == "missing":
                raise FileNotFoundError
            if found.what == "exists":
                raise FileExistsError
            passing = found.what == "passing" or (found.what == "unreachable" and not self._first)
            late = tries == most or time.monotonic() - began > SECONDS
            if not passing or late or self._given_up.is_set():
                raise not_written(found, self._url, tries)
            self._ended.wait(waiting(tries, self._url))

    def give_up(self) -> None:
        """Try nothing again from now on."""
        self._given_up.set()
