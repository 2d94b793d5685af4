"""Two ranks of which the second is forked from the first, after imports that take seconds."""

import gc
import os
import signal
import sys
from contextlib import contextmanager


@contextmanager
def fork_second_rank():
    """Become ranks 0 and 1 for a block, after which rank 1 ends; rank 0 fails if it failed."""
    sys.stdout.flush()
    # Without it each garbage collection of a rank would traverse all imported modules and copy their pages.
    gc.freeze()
    child = os.fork()
    rank = "0" if child else "1"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    try:
        yield
    except BaseException:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    if not child:
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"rank 1 ended with status {status}"
