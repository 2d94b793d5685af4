"""Pause of the garbage collector while many objects without cycles are created."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Disable the garbage collector inside the block: it would find no cycles.

    For a hundred thousand files, collections take an eighth of the time of listing them.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
