"""Retries of requests to a remote output folder."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar, final

import xxhash

from batchloom.core.errors import OutputError
from batchloom.remote.client import capture_fault, compute_backoff
from batchloom.remote.remote_errors import RemoteFault, make_write_error

T = TypeVar("T")

# Maximum number of tries of one request, and seconds after which it is not retried.
MAX_UPLOAD_ATTEMPTS, MAX_RETRY_SECONDS = 8, 300.0
# A person waits for the first request of a run, so it is retried less often.
MAX_FIRST_ATTEMPTS = 4
# Message in threads whose result is no longer read.
_STOPPED = "Stopped."


def compute_jittered_backoff(tries: int, name: str) -> float:
    """Return a delay of 50 to 100% of :func:`compute_backoff`, derived from ``name``.

    Many uploads fail together, so their delays must differ.
    """
    share = xxhash.xxh3_64_intdigest(f"{name}\n{tries}".encode()) / 2**64
    return compute_backoff(tries) * (0.5 + share / 2)


@final
class RequestRetrier:
    """Retry policy of the requests to one URL.

    Args:
        url: URL for error messages.
        ended: event that is set when the run ends; no request or wait starts after it.
        first: whether this is the run's first request there; an unreachable address then fails at once.
    """

    def __init__(self, url: str, ended: threading.Event, *, first: bool = False) -> None:
        self._url, self._ended, self._first = url, ended, first
        self._given_up = threading.Event()

    def __call__(self, work: Callable[[], T]) -> T:
        """Run ``work`` and retry it after transient faults.

        Raises:
            FileNotFoundError: the requested object does not exist.
            FileExistsError: the object to create exists.
            OutputError: the fault is permanent, or all retries failed.
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
        """Stop all retries."""
        self._given_up.set()
