"""The worker process of a pool: asks for the setup, then for one order after the other.

It is started by name (``pool.py``), not by a copy of the coordinator, and imports nothing of the
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

from batchloom.core.worker_process import mark_worker
from batchloom.preparation.workers.protocols import TaskFunction, TaskLoss, TaskMessage
from batchloom.preparation.workers.worker_results import OUT_OF_MEMORY, encode_failure, run_task

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The worker has nothing to do: it wants the setup (once), or an order."""

    setup: bool


def main(pipe: int, coordinator: int, module: str = "") -> None:
    """Do what comes through a socket until it closes.

    Args:
        pipe: the descriptor of the worker's end.
        coordinator: the process that started this one.
        module: is imported before anything is asked for; empty for none.
    """
    # The terminal sends Ctrl-C to all; it is the coordinator's to end its workers.
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
        # The coordinator is gone, and nobody is left to tell.
        os._exit(1)


def _exit_with_coordinator(pipe: int, coordinator: int) -> None:
    """End this process at once when the coordinator does: nobody may write into its folder after.

    On Linux the kernel does it, even where native code holds the interpreter; elsewhere (and where
    the coordinator died before it was asked) a thread sees that the other end closed.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - of no use elsewhere

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
        number, order = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the coordinator's own bytes

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
        setup = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the coordinator's own bytes
        return setup()  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - the edge of a process: everything is told
        pipe.send_bytes(encode_failure(-1, error))
        os._exit(1)
