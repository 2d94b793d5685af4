"""Mark of worker processes, whose death a coordinator survives and reports."""

import multiprocessing

_marked = False


def mark_worker() -> None:
    """Declare this process a worker of a coordinator that handles its death."""
    global _marked  # noqa: PLW0603 - a property of the process
    _marked = True


def is_worker() -> bool:
    """Return whether this process was marked, or was started by ``multiprocessing``."""
    return _marked or multiprocessing.parent_process() is not None
