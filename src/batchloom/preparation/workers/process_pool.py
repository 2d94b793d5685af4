"""Pool of worker processes on this machine, each with its own pipe.

Workers share nothing, so a worker killed at any moment and by any cause loses only its own task
(docs/decisions/0013-execution.md). They are started by module name, not forked from the coordinator, and do not
import the coordinator's main module.
"""

import contextlib
import fcntl
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_executable
from typing import Any, Self, final

from batchloom.core.errors import WorkerError
from batchloom.core.process_state import mark_worker
from batchloom.preparation.workers.machine_limits import describe_memory_excess, measure_process_memory
from batchloom.preparation.workers.protocols import (
    OUT_OF_MEMORY,
    TaskFailure,
    TaskFunctionFactory,
    TaskLoss,
    TaskMessage,
    TaskResult,
    encode_failure,
    restore_error,
    run_task,
)

# After this many deaths per worker before any is ready, the next one would die of the same cause.
_MAX_DEATHS_PER_WORKER = 3
# Interval of memory checks and of checks for dead workers.
_POLL_SECONDS = 0.2
# A killed worker ends at once, unless the kernel blocks it (for example on a disk that does not answer).
_EXIT_SECONDS = 5.0
# The search path must be set before anything of batchloom is imported.
_WORKER_COMMAND = (
    "import sys; sys.path[:] = sys.argv[4:]; from batchloom.preparation.workers.process_pool import run_worker; "
    "run_worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)
# There are as many workers as cores, so threads of libraries would only compete.
_SINGLE_THREAD_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


@dataclass(eq=False, slots=True)
class _PoolWorker:
    """Worker process, and the number of its current task."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False
    idle: bool = False
    number: int | None = None
    # Why the pool killed it.
    end_reason: str = ""


@final
class PrestartedWorkers:
    """Worker processes started before their setup is known; ends those not taken.

    A worker needs half a second to import ``module``, which the coordinator can use for other work.
    """

    def __init__(self, workers: int, module: str) -> None:
        self._workers = [_start_worker(module) for _ in range(workers)]

    def take(self) -> list[_PoolWorker]:
        """Hand over the workers; the caller must end them."""
        workers, self._workers = self._workers, []
        return workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.take():
            worker.process.kill()
            _stop_worker(worker)


@final
class ProcessPool:
    """Executor of tasks in processes of this machine; see :class:`Executor`.

    Processes start when tasks arrive. Use one thread for all calls: Linux ends a worker when the thread that
    started it ends.

    Args:
        setup: called once in every process; must be importable there.
        workers: maximum number of processes.
        memory: maximum bytes of a worker, checked while ``next`` runs; a worker above it is killed and its task
            lost. Mapped files do not count.
        ready: processes that are already started.

    Raises:
        WorkerError: by ``next``, if workers die before their setup is done.
    """

    def __init__(
        self,
        setup: TaskFunctionFactory,
        workers: int,
        memory: int | None = None,
        ready: PrestartedWorkers | None = None,
    ) -> None:
        self._setup = pickle.dumps(setup, protocol=5)
        self._max_workers, self._memory = workers, memory
        self._waiting: deque[tuple[int, Any]] = deque()
        self._workers = ready.take() if ready else []
        self._readable_workers: deque[_PoolWorker] = deque()
        self._deaths = 0
        self._last_check = 0.0

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
            event = self._check_workers() or self._wait_for_message(deadline - time.monotonic())
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
        while free_workers < len(self._waiting) and len(self._workers) < self._max_workers:
            self._workers.append(_start_worker())
            free_workers += 1

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
            ready_pipes = set(wait(pipes, max(0.0, min(seconds, _POLL_SECONDS))))
            self._readable_workers.extend(worker for worker in self._workers if worker.pipe in ready_pipes)
        return self._handle_message(self._readable_workers.popleft()) if self._readable_workers else None

    def _handle_message(self, worker: _PoolWorker) -> TaskMessage | TaskResult | TaskLoss | None:
        """Receive one message of a worker and answer requests."""
        try:
            message = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301 - sent by our own process
        except (EOFError, OSError):
            return self._handle_exit(worker)
        if isinstance(message, WorkerRequest):
            if message.setup:
                with contextlib.suppress(OSError):  # The worker is dead; reading its pipe reports it.
                    worker.pipe.send_bytes(self._setup)
            else:
                worker.ready, worker.idle, self._deaths = True, not worker.end_reason, 0
            return None
        if not isinstance(message, TaskMessage):
            worker.number = None
        if isinstance(message, TaskFailure):
            raise restore_error(message)
        return message  # type: ignore[no-any-return]

    def _check_workers(self) -> TaskLoss | None:
        """Kill workers above the memory limit; find dead ones whose pipe is still open."""
        if time.monotonic() < self._last_check + _POLL_SECONDS:
            return None
        self._last_check = time.monotonic()
        for worker in self._workers:
            if worker.process.poll() is not None:
                if not worker.pipe.poll():
                    return self._handle_exit(worker)
            elif self._memory is not None and not worker.end_reason:
                used_memory = measure_process_memory(worker.process.pid)
                if used_memory > self._memory:
                    worker.end_reason, worker.idle = (describe_memory_excess(used_memory, self._memory), False)
                    worker.process.kill()
        return None

    def _handle_exit(self, worker: _PoolWorker) -> TaskLoss | None:
        reason = self._remove_worker(worker)
        if worker.number is not None:
            return TaskLoss(worker.number, reason)
        if not worker.ready:
            self._deaths += 1
            if self._deaths >= _MAX_DEATHS_PER_WORKER * self._max_workers:
                remedy = (
                    "Give more (--memory-per-worker)."
                    if worker.end_reason
                    else "Their messages are above, on standard error; give --workers 1 to work without processes."
                )
                raise WorkerError(
                    f"{self._deaths} worker processes ended one after the other before they could do any "
                    f"work; the last one {reason}. {remedy}"
                )
        return None

    def _remove_worker(self, worker: _PoolWorker) -> str:
        self._workers.remove(worker)
        return _stop_worker(worker)


def _stop_worker(worker: _PoolWorker) -> str:
    """Close a worker's pipe, wait for its end and return the reason."""
    worker.pipe.close()
    try:
        status = worker.process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_EXIT_SECONDS)
        return worker.end_reason or "closed its pipe and did not exit"
    return worker.end_reason or _describe_exit(status)


def _describe_exit(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed by signal 9 (out of memory?)"
    if status < 0:
        signal_name = signal.strsignal(-status)
        return f"was killed by signal {-status}" + (f" ({signal_name})" if signal_name else "")
    return f"exited with code {status}"


def _start_worker(module: str = "") -> _PoolWorker:
    """Start a process that inherits only the search path, the environment and a pipe.

    It imports ``module``, if given, before its first request.
    """
    executable = get_executable()
    if not executable:
        raise WorkerError(
            "Worker processes cannot be started: this Python does not know its own executable; name it with "
            "multiprocessing.set_executable, or work with one worker (--workers 1)."
        )
    parent_socket, child_socket = socket.socketpair()
    with parent_socket, child_socket:
        # Stay above the standard streams, which may be closed here and must not become a pipe.
        parent_fd, child_fd = (
            fcntl.fcntl(endpoint, fcntl.F_DUPFD_CLOEXEC, 3) for endpoint in (parent_socket, child_socket)
        )
    search_path = [entry for entry in sys.path if isinstance(entry, str)]
    warning_options = [f"-W{option}" for option in sys.warnoptions]
    arguments = [str(child_fd), str(os.getpid()), module, *search_path]
    command = [os.fsdecode(executable), *warning_options, "-c", _WORKER_COMMAND, *arguments]
    # Ctrl-C must not end a worker before its first line runs.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command, stdin=subprocess.DEVNULL, env={**_SINGLE_THREAD_ENV, **os.environ}, pass_fds=(child_fd,)
        )
    except OSError as error:
        os.close(parent_fd)
        raise WorkerError(f"A worker process cannot be started: {error}; give fewer (--workers).") from error
    finally:
        os.close(child_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return _PoolWorker(process, Connection(parent_fd))


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """Request of an idle worker for the setup (once) or for a task."""

    setup: bool


def run_worker(pipe: int, coordinator: int, module: str = "") -> None:
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

    On Linux the kernel does it, even while native code holds the GIL. On other systems, a thread detects that
    the other end of the pipe was closed.
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
    try:
        task_function = pickle.loads(pipe.recv_bytes())()  # noqa: S301 - bytes of the coordinator
    except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
        pipe.send_bytes(encode_failure(-1, error))
        os._exit(1)
    while True:
        pipe.send_bytes(pickle.dumps(WorkerRequest(setup=False)))
        number, task = pickle.loads(pipe.recv_bytes())  # noqa: S301 - bytes of the coordinator

        def send_message(message: Any, number: int = number) -> None:
            pipe.send_bytes(pickle.dumps(TaskMessage(number, message), protocol=5))

        try:
            pipe.send_bytes(run_task(number, task_function, task, send_message))
        except MemoryError:
            pipe.send_bytes(pickle.dumps(TaskLoss(number, OUT_OF_MEMORY)))
            os._exit(1)
        del task
