"""Threads that end before the interpreter does.

The interpreter stops daemon threads at any point when it exits. Inside C++ code, such as torch's, that aborts the
process.
"""

import atexit
import weakref
from typing import Protocol

# Seconds to wait for a thread that was told to end: one that waits for a server may need minutes.
JOIN_TIMEOUT_S = 5.0


class ThreadOwner(Protocol):
    """An object with a background thread."""

    def end(self) -> None:
        """Tell the thread to end after its current work; callable at any time."""

    def wait(self) -> None:
        """Wait up to ``JOIN_TIMEOUT_S`` until the thread has ended."""


_OWNERS: "weakref.WeakSet[ThreadOwner]" = weakref.WeakSet()


def end_at_exit(owner: ThreadOwner) -> None:
    """End the thread of ``owner`` at the latest when the interpreter exits."""
    _OWNERS.add(owner)


@atexit.register
def _end_all() -> None:
    owners = list(_OWNERS)
    for owner in owners:
        owner.end()
    for owner in owners:
        owner.wait()
