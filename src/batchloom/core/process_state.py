"""State of this process: garbage collector, mark of workers, peak memory."""

import contextlib
import gc
import multiprocessing
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# New objects after which the collector runs inside ``relax_gc``.
_RELAXED_GC_THRESHOLD = 100_000

_marked = False


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Disable the garbage collector inside the block: it would find no cycles.

    For a hundred thousand files, collections take an eighth of the time of listing them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def relax_gc() -> Iterator[None]:
    """Run the garbage collector less often inside the block.

    Conversations are many small objects without cycles. At the usual rate, once per 700 new objects, collections take
    a fifth of the time of reading and encoding them.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_RELAXED_GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def mark_worker() -> None:
    """Declare this process a worker of a coordinator that handles its death."""
    global _marked  # noqa: PLW0603 - a property of the process
    _marked = True


def is_worker() -> bool:
    """Return whether this process was marked, or was started by ``multiprocessing``."""
    return _marked or multiprocessing.parent_process() is not None


def measure_memory() -> int:
    """Return the resident memory of this process, in bytes, else its peak."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return measure_peak_memory()


def measure_peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):
        # ru_maxrss would include the peak of the parent process (Linux keeps it over exec).
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    # In bytes on macOS and in kB on other systems.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
