"""Asking a store elsewhere, again and again for a while: what fails there often passes."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

import xxhash

from batchloom.core.errors import OutputError
from batchloom.remote.client import capture_fault, compute_backoff
from batchloom.remote.remote_errors import RemoteFault, make_write_error

T = TypeVar("T")

# One request is tried so often, and not again after so many seconds.
MAX_UPLOAD_ATTEMPTS, MAX_RETRY_SECONDS = 8, 300.0
# Where the first word of a job is not heard, a person waits.
MAX_FIRST_ATTEMPTS = 4
# Said by threads that nobody listens to any longer.
_STOPPED = "Stopped."


def compute_jittered_backoff(tries: int, name: str) -> float:
    """Seconds to wait after so many failures in a row; as many uploads fail together, each waits another time.

    Between a half and all of what :func:`compute_backoff` says, by the name of what is written.
    """
    share = xxhash.xxh3_64_intdigest(f"{name}\n{tries}".encode()) / 2**64
    return compute_backoff(tries) * (0.5 + share / 2)


@final
class RequestRetrier:
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
        start_time = time.monotonic()
        max_attempts = MAX_FIRST_ATTEMPTS if self._first else MAX_UPLOAD_ATTEMPTS
        tries = 0
        while True:
            if self._ended.is_set():
                raise OutputError(_STOPPED)
            result = capture_fault(work)
            if not isinstance(result, RemoteFault):
                return result
            tries += 1
            if result.kind == "missing":
                raise FileNotFoundError
            if result.kind == "exists":
                raise FileExistsError
            is_transient = result.kind == "passing" or (result.kind == "unreachable" and not self._first)
            is_exhausted = tries == max_attempts or time.monotonic() - start_time > MAX_RETRY_SECONDS
            if not is_transient or is_exhausted or self._given_up.is_set():
                raise make_write_error(result, self._url, tries)
            self._ended.wait(compute_jittered_backoff(tries, self._url))

    def give_up(self) -> None:
        """Try nothing again from now on."""
        self._given_up.set()
