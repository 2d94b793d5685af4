"""Pool of worker processes on this machine, each with its own pipe.

Workers share nothing, so a worker killed at any moment and by any cause loses only its own task
(docs/explanation/decisions/0013-execution.md).
"""

import contextlib
import pickle
import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self, final

from batchloom.core.errors import WorkerError
from batchloom.preparation.workers.fork_server import ForkedWorker, ForkServer, TaskRequest
from batchloom.preparation.workers.machine_limits import describe_memory_excess, measure_process_memory
from batchloom.preparation.workers.protocols import (
    TaskFailure,
    TaskFunctionFactory,
    TaskLoss,
    TaskMessage,
    TaskResult,
    restore_error,
)

# After this many deaths in a row before any worker is ready, the next one would die of the same cause.
_MAX_DEATHS = 3
# Interval of memory checks and of checks for dead workers.
_POLL_SECONDS = 0.2


@dataclass(eq=False, slots=True)
class _PoolWorker:
    """Worker process, and the number of its current task."""

    process: ForkedWorker
    pipe: Connection
    ready: bool = False
    idle: bool = False
    number: int | None = None
    # Why the pool killed it.
    end_reason: str = ""


@final
class ProcessPool:
    """Executor of tasks in processes of this machine; see :class:`Executor`.

    Processes start when tasks arrive. Use one thread for all calls: Linux ends the workers when the thread that
    started them ends.

    Args:
        setup: called once, in the process that all workers are forked from; must be importable there.
        workers: maximum number of processes.
        memory: maximum bytes of a worker, checked while ``next`` runs; a worker above it is killed and its task
            lost. Mapped files do not count.
        server: a server that is already started, to fork the workers; the pool ends it.

    Raises:
        WorkerError: by ``next``, if processes die before their setup is done.
    """

    def __init__(
        self,
        setup: TaskFunctionFactory,
        workers: int,
        memory: int | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self._setup = setup
        self._max_workers = workers
        self._memory = memory
        self._waiting: deque[tuple[int, Any]] = deque()
        self._workers: list[_PoolWorker] = []
        self._readable_workers: deque[_PoolWorker] = deque()
        self._server = server
        # Reason for which the pool killed the server.
        self._server_end_reason = ""
        self._deaths = 0
        self._last_check = 0.0
        if server is not None:
            server.set_up(setup)

    @property
    def workers(self) -> int:
        return self._max_workers

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + sum(worker.number is not None for worker in self._workers)

    def submit(self, number: int, task: Any) -> None:
        self._waiting.append((number, task))
        self._assign_tasks()

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """Return the next event; None after ``seconds`` without one, or when all is done."""
        deadline = time.monotonic() + seconds
        while self.unfinished:
            self._assign_tasks()
            event = self._check_processes() or self._wait_for_message(deadline - time.monotonic())
            if event is not None:
                return event
            if time.monotonic() >= deadline:
                break
        return None

    def close(self) -> None:
        self._waiting.clear()
        self._readable_workers.clear()
        for worker in self._workers:
            worker.process.kill()
        while self._workers:
            self._remove_worker(self._workers[-1])
        if self._server is not None:
            self._server.kill()
            self._remove_server(self._server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _assign_tasks(self) -> None:
        """Send queued tasks to idle workers, and start missing workers."""
        for worker in self._workers:
            if worker.idle and self._waiting and self._send(worker):
                self._waiting.popleft()
        free_workers = sum(worker.number is None and not worker.end_reason for worker in self._workers)
        missing_workers = min(len(self._waiting) - free_workers, self._max_workers - len(self._workers))
        if missing_workers <= 0:
            return
        if self._server is None:
            self._server = ForkServer()
            self._server.set_up(self._setup)
        if self._server.is_ready:
            with contextlib.suppress(EOFError, OSError):  # The server is dead; reading its pipe reports it.
                for _ in range(missing_workers):
                    self._workers.append(_PoolWorker(*self._server.fork()))

    def _send(self, worker: _PoolWorker) -> bool:
        number, task = self._waiting[0]
        worker.idle = False
        try:
            worker.pipe.send_bytes(pickle.dumps((number, task), protocol=5))
        except OSError:
            return False  # The worker is dead; reading its pipe reports it.
        worker.number = number
        return True

    def _wait_for_message(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """Return the next message; all workers with messages get their turn."""
        if not self._readable_workers:
            pipes = [worker.pipe for worker in self._workers]
            if self._server is not None:
                pipes.append(self._server.pipe)
            ready_pipes = set(wait(pipes, max(0.0, min(seconds, _POLL_SECONDS))))
            self._readable_workers.extend(worker for worker in self._workers if worker.pipe in ready_pipes)
            if self._server is not None and self._server.pipe in ready_pipes:
                self._handle_answer(self._server)
        return self._handle_message(self._readable_workers.popleft()) if self._readable_workers else None

    def _handle_answer(self, server: ForkServer) -> None:
        """Receive the server's answer to its setup, or see that it has ended."""
        try:
            failure = server.receive()
        except (EOFError, OSError):
            self._count_death(self._remove_server(server), is_memory=bool(self._server_end_reason))
            self._server_end_reason = ""
            return
        if failure is not None:
            raise restore_error(failure)

    def _handle_message(self, worker: _PoolWorker) -> TaskMessage | TaskResult | TaskLoss | None:
        """Receive one message of a worker."""
        try:
            message = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            return self._handle_exit(worker)
        if isinstance(message, TaskRequest):
            worker.ready = True
            worker.idle = not worker.end_reason
            self._deaths = 0
            return None
        if not isinstance(message, TaskMessage):
            worker.number = None
        if isinstance(message, TaskFailure):
            raise restore_error(message)
        return message  # type: ignore[no-any-return]

    def _check_processes(self) -> TaskLoss | None:
        """Kill processes above the memory limit, and find dead workers with open pipes."""
        if time.monotonic() < self._last_check + _POLL_SECONDS:
            return None
        self._last_check = time.monotonic()
        for worker in self._workers:
            if worker.process.poll() is not None:
                if not worker.pipe.poll():
                    return self._handle_exit(worker)
            elif not worker.end_reason and (reason := self._describe_excess(worker.process.pid)):
                worker.end_reason = reason
                worker.idle = False
                worker.process.kill()
        if self._server is not None and not self._server_end_reason:
            self._server_end_reason = self._describe_excess(self._server.pid)
            if self._server_end_reason:
                self._server.kill()
        return None

    def _describe_excess(self, process: int) -> str:
        """Describe the excess of a process over the memory limit; "" for none."""
        if self._memory is None or (used_memory := measure_process_memory(process)) <= self._memory:
            return ""
        return describe_memory_excess(used_memory, self._memory)

    def _handle_exit(self, worker: _PoolWorker) -> TaskLoss | None:
        reason = self._remove_worker(worker)
        if worker.number is not None:
            return TaskLoss(worker.number, reason)
        # The death of a server counts once, not once more for each of its workers.
        if not worker.ready and not worker.process.has_lost_server:
            self._count_death(reason, is_memory=bool(worker.end_reason))
        return None

    def _count_death(self, reason: str, *, is_memory: bool) -> None:
        """Raise WorkerError if processes die again and again before they can do any work."""
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            remedy = (
                "Give more (--memory-per-worker)."
                if is_memory
                else "Their messages are above, on standard error; give --workers 1 to work without processes."
            )
            raise WorkerError(
                f"{self._deaths} worker processes ended one after the other before they could do any "
                f"work; the last one {reason}. {remedy}"
            )

    def _remove_worker(self, worker: _PoolWorker) -> str:
        """Close a worker's pipe, wait for its end and return the reason."""
        self._workers.remove(worker)
        worker.pipe.close()
        status = worker.process.stop()
        return worker.end_reason or _describe_exit(status)

    def _remove_server(self, server: ForkServer) -> str:
        """Wait for the end of the server and return the reason."""
        self._server = None
        status = server.stop()
        return self._server_end_reason or _describe_exit(status)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "closed its pipe and did not exit"
    if status == -signal.SIGKILL:
        return "was killed by signal 9 (out of memory?)"
    if status < 0:
        signal_name = signal.strsignal(-status)
        return f"was killed by signal {-status}" + (f" ({signal_name})" if signal_name else "")
    return f"exited with code {status}"
