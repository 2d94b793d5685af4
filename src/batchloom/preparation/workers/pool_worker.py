"""Worker process of a pool: requests the setup, then one task after the other.

It is started by module name (``process_pool.py``), not forked from the coordinator, and does not import the
coordinator's main module.
"""

import importlib
import os
import pickle
import select
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from batchloom.core.process_state import mark_worker
from batchloom.preparation.workers.protocols import TaskFunction, TaskLoss, TaskMessage
from batchloom.preparation.workers.worker_results import OUT_OF_MEMORY, encode_failure, run_task

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """Request of an idle worker for the setup (once) or for a task."""

    setup: bool


def main(pipe: int, coordinator: int, module: str = "") -> None:
    """Run the tasks that arrive through a socket until it closes.

    ``pipe`` is the file descriptor of the worker's end; ``module`` is imported before the first request.
    """
    # The terminal sends Ctrl-C to all processes, but only the coordinator may end its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    mark_worker()
    os.set_inheritable(pipe, False)  # noqa: FBT003 - positional only
    _exit_with_coordinator(pipe, coordinator)
    if module:
        importlib.import_module(module)
    try:
        _serve_tasks(Connection(pipe))
    except (EOFError, OSError):
        # The coordinator has ended, so no one can receive an error.
        os._exit(1)


def _exit_with_coordinator(pipe: int, coordinator: int) -> None:
    """End this process as soon as the coordinator ends, so that it writes no more.

    On Linux the kernel does it, even while native code holds the GIL. Elsewhere, and if the coordinator
    died before the call, a thread detects that the other end closed.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - needed on Linux only

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != coordinator:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe, 0)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve_tasks(pipe: Connection) -> None:
    pipe.send_bytes(pickle.dumps(WorkerRequest(setup=True)))
    work = _receive_setup(pipe)
    while True:
        pipe.send_bytes(pickle.dumps(WorkerRequest(setup=False)))
        number, order = pickle.loads(pipe.recv_bytes())  # noqa: S301 - bytes of the coordinator

        def tell(message: Any, number: int = number) -> None:
            pipe.send_bytes(pickle.dumps(TaskMessage(number, message), protocol=5))

        try:
            pipe.send_bytes(run_task(number, work, order, tell))
        except MemoryError:
            pipe.send_bytes(pickle.dumps(TaskLoss(number, OUT_OF_MEMORY)))
            os._exit(1)
        del order


def _receive_setup(pipe: Connection) -> TaskFunction:
    try:
        setup = pickle.loads(pipe.recv_bytes())  # noqa: S301 - bytes of the coordinator
        return setup()  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
        pipe.send_bytes(encode_failure(-1, error))
        os._exit(1)
