"""Threads that end before the interpreter does.

The interpreter stops daemon threads at any point when it exits. Inside C++ code, such as torch's, that aborts the
process; while they delete a folder, half of it stays.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import final

# Seconds to wait for a thread that was told to end: one that waits for a server may need minutes.
_JOIN_TIMEOUT_S = 5.0


@final
class BackgroundThread(threading.Thread):
    """A daemon thread that ends at the latest when the interpreter exits.

    ``end`` tells it to end soon, and may be called at any time.
    """

    def __init__(self, name: str, work: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.end: Callable[[], None] | None = end
        _THREADS.add(self)

    def run(self) -> None:
        try:
            super().run()
        finally:
            # This may be the last reference to a stream, which deletes its folder: the interpreter waits for that.
            self.end = None


_THREADS: "weakref.WeakSet[BackgroundThread]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in list(_THREADS) if thread.is_alive()]
    for thread in threads:
        end = thread.end
        # The thread may have ended meanwhile.
        if end is not None:
            end()
    for thread in threads:
        thread.join(_JOIN_TIMEOUT_S)
