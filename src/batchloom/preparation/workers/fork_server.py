"""Fork server: a process that makes the task function once, and forks workers.

Importing modules and loading a tokenizer takes most of a second of a worker's start; a fork takes milliseconds and
shares that memory. Only the server is forked, which has one thread and no locks, never the coordinator
(docs/explanation/decisions/0013-execution.md). The server is started by module name and does not
import the coordinator's main module.
"""

import contextlib
import errno
import fcntl
import gc
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
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Any, Self, final

from batchloom.core.errors import WorkerError
from batchloom.core.process_state import mark_worker
from batchloom.preparation.workers.protocols import (
    OUT_OF_MEMORY,
    TaskFailure,
    TaskFunction,
    TaskFunctionFactory,
    TaskLoss,
    TaskMessage,
    encode_failure,
    run_task,
)

# A killed process ends at once, unless the kernel blocks it (for example on a disk that does not answer).
_EXIT_SECONDS = 5.0
_EXIT_POLL_SECONDS = 0.005
# The search path must be set before anything of batchloom is imported.
_SERVER_COMMAND = (
    "import sys; sys.path[:] = sys.argv[4:]; from batchloom.preparation.workers.fork_server import run_server; "
    "run_server(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)
# There are as many workers as cores, so threads of libraries would only compete, and the server must have none.
_SINGLE_THREAD_ENV = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class _CallRequest:
    """Request to call a pickled function, for example to fill a cache."""

    function: bytes


@dataclass(frozen=True, slots=True)
class _SetupRequest:
    """Request to make the task function of later workers by a pickled setup."""

    setup: bytes


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """Request to fork a worker for the file descriptor that follows."""


@dataclass(frozen=True, slots=True)
class _ExitStatusRequest:
    """Request to wait for the exit status of a worker."""

    pid: int
    seconds: float


@final
class ForkedWorker:
    """Worker process that a server forked."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid
        self._status: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """Wait for the exit status; None after ``seconds`` without one."""
        if self._status is None:
            self._status = self._server.wait_for(self.pid, seconds)
        return self._status

    @property
    def has_lost_server(self) -> bool:
        """True if the server has ended, and the worker with it."""
        return self._server.has_ended

    def kill(self) -> None:
        # Only the server releases the process id. Without it, the id may belong to another process by now.
        if self._status is None and not self.has_lost_server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Wait for the end of a killed or dead worker; None if it does not end."""
        if (status := self.poll(_EXIT_SECONDS)) is None:
            self.kill()
            status = self.poll(_EXIT_SECONDS)
        return status


@final
class ForkServer:
    """Coordinator's side of a fork server; a context manager that ends it.

    Use one thread for all calls: Linux ends the server when the thread that started it ends.

    Args:
        module: imported by the server at once, while the coordinator does other work.

    Attributes:
        pipe: becomes readable with the answer to :meth:`set_up`, and when the server ends.
        is_ready: the server can fork workers.
    """

    def __init__(self, module: str = "") -> None:
        self._process, self.pipe = _start_server(module)
        self.is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def call(self, function: Callable[[], object]) -> None:
        """Call a picklable function in the server; do not wait.

        Workers share what it leaves in caches. An exception of the function is the answer to :meth:`set_up`.
        """
        self._send(_CallRequest(pickle.dumps(function, protocol=5)))

    def set_up(self, setup: TaskFunctionFactory) -> None:
        """Make the task function in the server; do not wait."""
        self.is_ready = False
        self._send(_SetupRequest(pickle.dumps(setup, protocol=5)))

    def receive(self) -> TaskFailure | None:
        """Receive the answer to :meth:`set_up`: None, or a failure.

        Raises:
            EOFError, OSError: the server has ended.
        """
        answer = pickle.loads(self.pipe.recv_bytes())
        self.is_ready = answer is None
        return answer  # type: ignore[no-any-return]

    def fork(self) -> tuple[ForkedWorker, Connection]:
        """Fork a worker; return it with a pipe that leads to it.

        Raises:
            EOFError, OSError: the server has ended.
        """
        parent_fd, child_fd = _make_socket_pair()
        connection = Connection(parent_fd)
        try:
            self.pipe.send_bytes(pickle.dumps(_ForkRequest()))
            with socket.socket(fileno=os.dup(self.pipe.fileno())) as endpoint:
                socket.send_fds(endpoint, [b"\0"], [child_fd])
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            connection.close()
            raise
        finally:
            os.close(child_fd)
        if isinstance(answer, OSError):
            connection.close()
            raise WorkerError(f"A worker process cannot be started: {answer}; give fewer (--workers).") from answer
        return ForkedWorker(self, answer), connection

    def wait_for(self, pid: int, seconds: float) -> int | None:
        """Wait for the exit status of a worker; None after ``seconds`` without one."""
        try:
            self.pipe.send_bytes(pickle.dumps(_ExitStatusRequest(pid, seconds)))
            return pickle.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            # The server has ended. On Linux the kernel ended its workers; elsewhere they end when their pipe closes.
            return -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int | None:
        """Wait for the end of a killed or dead server; None if it does not end."""
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_SECONDS)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.stop()

    def _send(self, request: _CallRequest | _SetupRequest) -> None:
        with contextlib.suppress(OSError):  # The server is dead; reading its pipe reports it.
            self.pipe.send_bytes(pickle.dumps(request))


def _make_socket_pair() -> tuple[int, int]:
    """Return two connected file descriptors above the standard streams.

    Standard streams may be closed here and must not become a pipe.
    """
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(endpoint) for endpoint in socket.socketpair()]
        first, second = (_move_above_streams(endpoint.fileno()) for endpoint in endpoints)
    return first, second


def _move_above_streams(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _start_server(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that inherits only the search path, the environment and a pipe."""
    executable = get_executable()
    if not executable:
        raise WorkerError(
            "Worker processes cannot be started: this Python does not know its own executable; name it with "
            "multiprocessing.set_executable, or work with one worker (--workers 1)."
        )
    parent_fd, child_fd = _make_socket_pair()
    search_path = [entry for entry in sys.path if isinstance(entry, str)]
    warning_options = [f"-W{option}" for option in sys.warnoptions]
    arguments = [str(child_fd), str(os.getpid()), module, *search_path]
    command = [os.fsdecode(executable), *warning_options, "-c", _SERVER_COMMAND, *arguments]
    # Ctrl-C must not end the server before its first line runs.
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
    return process, Connection(parent_fd)


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Request of an idle worker for a task."""


_PR_SET_PDEATHSIG = 1


def run_server(pipe: int, coordinator: int, module: str = "") -> None:
    """Answer the requests that arrive through a socket until it closes.

    ``pipe`` is the file descriptor of the server's end; ``module`` is imported before the first request.
    """
    # The terminal sends Ctrl-C to all processes, but only the coordinator may end its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    mark_worker()
    os.set_inheritable(pipe, False)  # noqa: FBT003 - positional only
    _end_with_parent(coordinator)
    if module:
        importlib.import_module(module)
    connection = Connection(pipe)
    try:
        _answer_requests(connection)
    except (EOFError, OSError):
        # The coordinator has ended, so no one can receive an error.
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    """End this process with its parent: the kernel does it, on Linux.

    It does so even while native code holds the GIL.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer_requests(pipe: Connection) -> None:
    task_function: TaskFunction | None = None
    while True:
        request = pickle.loads(pipe.recv_bytes())
        if isinstance(request, _ExitStatusRequest):
            answer: object = _wait_for_exit(request)
        elif isinstance(request, _ForkRequest):
            with socket.socket(fileno=os.dup(pipe.fileno())) as endpoint:
                _, descriptors, _, _ = socket.recv_fds(endpoint, 1, 1)
            if task_function is None:
                raise AssertionError("a server is set up before it forks")
            # Without a free file descriptor none arrives.
            no_descriptor = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            answer = _fork_worker(pipe, descriptors[0], task_function) if descriptors else no_descriptor
        else:
            try:
                if isinstance(request, _CallRequest):
                    pickle.loads(request.function)()
                    continue
                task_function = pickle.loads(request.setup)()
                answer = None
            except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
                pipe.send_bytes(encode_failure(-1, error))
                os._exit(1)
            # The collector would write into the memory that the workers share.
            gc.collect()
            gc.freeze()
        pipe.send_bytes(pickle.dumps(answer))


def _wait_for_exit(request: _ExitStatusRequest) -> int | None:
    """Return a worker's exit status as ``subprocess`` does; None if it still runs."""
    deadline = time.monotonic() + request.seconds
    while True:
        pid, status = os.waitpid(request.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_EXIT_POLL_SECONDS)


def _fork_worker(server_pipe: Connection, descriptor: int, task_function: TaskFunction) -> int | OSError:
    """Fork a worker; return its process id, or the error."""
    server = os.getpid()
    worker_pipe = Connection(_move_above_streams(descriptor))
    os.close(descriptor)
    try:
        pid = os.fork()
    except OSError as error:
        return error
    if pid:
        worker_pipe.close()
        return pid
    try:
        # The coordinator sees the end of the server when no other process has this pipe.
        server_pipe.close()
        _end_with_parent(server)
        _watch_pipe(worker_pipe.fileno())
        _serve_tasks(worker_pipe, task_function)
    except (EOFError, OSError):
        pass  # The coordinator has ended, so no one can receive an error.
    except BaseException:  # noqa: BLE001 - the code of the server must not go on in the worker
        traceback.print_exc()
    os._exit(1)


def _watch_pipe(pipe: int) -> None:
    """End this process on a thread when the other end of a pipe is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe, 0)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve_tasks(pipe: Connection, task_function: TaskFunction) -> None:
    while True:
        pipe.send_bytes(pickle.dumps(TaskRequest()))
        number, task = pickle.loads(pipe.recv_bytes())

        def send_message(message: Any, number: int = number) -> None:
            pipe.send_bytes(pickle.dumps(TaskMessage(number, message), protocol=5))

        try:
            pipe.send_bytes(run_task(number, task_function, task, send_message))
        except MemoryError:
            pipe.send_bytes(pickle.dumps(TaskLoss(number, OUT_OF_MEMORY)))
            os._exit(1)
        del task
