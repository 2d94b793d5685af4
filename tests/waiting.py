"""Waiting for something that happens elsewhere: in a thread, a process or on a server.

A sleep that is long enough here is too short on a busy machine, so tests wait for the event itself. The limit ends a
test that hangs, and decides no result.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Far above what any event takes on a machine with several busy processes.
LIMIT_S = 120.0
_PAUSE_S = 0.005


def wait_until(condition: Callable[[], T], what: str) -> T:
    """Call ``condition`` until it returns something true, and return that; ``what`` names the event in the error."""
    deadline = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:.0f} s"
        time.sleep(_PAUSE_S)
    return result
