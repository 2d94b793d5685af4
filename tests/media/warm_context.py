"""Context of ``multiprocessing`` for the workers of a ``DataLoader``."""

import multiprocessing
from multiprocessing.context import ForkServerContext

from processes import start_processes


def get_warm_context() -> ForkServerContext:
    """Return a context whose processes get pickled objects, as by spawn, and have imported torch already."""
    # This starts the server of warm processes, and no process.
    with start_processes(environments=()):
        return multiprocessing.get_context("forkserver")
