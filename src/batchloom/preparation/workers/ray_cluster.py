"""Executor on a Ray cluster, or on a local Ray started for the job."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from batchloom.core.errors import InputError, MissingDependencyError, OutputError, WorkerError
from batchloom.core.files import describe_os_error
from batchloom.core.process_state import mark_worker
from batchloom.core.settings import quote_value
from batchloom.preparation.workers.machine_limits import count_cores, describe_memory_excess, measure_process_memory
from batchloom.preparation.workers.protocols import (
    OUT_OF_MEMORY,
    TaskFailure,
    TaskFunction,
    TaskFunctionFactory,
    TaskLoss,
    TaskMessage,
    TaskResult,
    encode_failure,
    restore_error,
    run_task,
)

# Maximum number of buffered messages; further senders wait.
_MAX_MESSAGES = 1000
_MEMORY_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RayJob:
    """Job settings sent with every task; ``shared`` holds a file with the key."""

    key: str
    memory: int | None
    shared: Path | None

    @property
    def token(self) -> Path | None:
        """File that proves that a node sees the shared folder."""
        return None if self.shared is None else self.shared / f".reach-{self.key}"


@dataclass(frozen=True, slots=True)
class RayMessage:
    """Message of a task, the node where it starts, or why its process ends."""

    serial: int
    message: Any = None
    node: str = ""
    last: str = ""


@final
class MessageMailbox:
    """Actor on the coordinator's node, without a processor, that buffers messages."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, RayMessage]] = []
        self._count = 0
        self._message_event = asyncio.Event()
        self._room_event = asyncio.Event()
        self._room_event.set()

    async def put(self, message: RayMessage) -> None:
        """Store a message; after the return it arrives, even if the sender dies."""
        await self._room_event.wait()
        self._count += 1
        self._messages.append((self._count, message))
        self._message_event.set()
        if len(self._messages) >= _MAX_MESSAGES:
            self._room_event.clear()

    async def take(self) -> list[tuple[int, RayMessage]]:
        """Return all messages, numbered by arrival; waits for one, or for ``drain``."""
        await self._message_event.wait()
        self._message_event.clear()
        return self._take_all()

    async def drain(self) -> list[tuple[int, RayMessage]]:
        """Return all messages now, which also wakes ``take``."""
        self._message_event.set()
        return self._take_all()

    def _take_all(self) -> list[tuple[int, RayMessage]]:
        messages = self._messages
        self._messages = []
        self._room_event.set()
        return messages


# Task function of the current executor; a Ray process runs tasks of one job only.
_task_functions: dict[str, TaskFunction] = {}
# Sender of the running task, for the memory watch thread.
_running_tasks: dict[str, tuple[int, Callable[[RayMessage], None]]] = {}


def run_ray_task(job: RayJob, setup: bytes, serial: int, pickled_task: bytes, mailbox: Any) -> bytes:
    """Run one task; it is unpickled here, so that errors in it are reported."""
    import ray

    def send(message: RayMessage) -> None:
        ray.get(mailbox.put.remote(message))

    mark_worker()
    mailbox.put.remote(RayMessage(serial, node=ray.get_runtime_context().get_node_id()))
    try:
        _check_shared_folder(job, ray.util.get_node_ip_address())
        if job.key not in _task_functions:
            _task_functions.clear()
            _task_functions[job.key] = pickle.loads(setup)()
            threading.Thread(target=_watch_limits, args=(job, os.getppid()), daemon=True).start()
        _running_tasks["task"] = (serial, send)
        number, value = pickle.loads(pickled_task)
        return run_task(number, _task_functions[job.key], value, lambda message: send(RayMessage(serial, message)))
    except MemoryError:
        send(RayMessage(serial, last=OUT_OF_MEMORY))
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
        return encode_failure(-1, error)
    finally:
        _running_tasks.clear()


def _check_shared_folder(job: RayJob, node: str) -> None:
    if job.token is not None and not (job.token.exists() and job.token.read_text() == job.key):
        raise OutputError(
            f"Node {node} of the Ray cluster cannot see {job.shared}; give a folder that has the same path on every "
            "node (a shared file system), or leave that node out."
        )


def _watch_limits(job: RayJob, parent: int) -> None:
    """End this process if it exceeds its memory limit or its node is considered dead.

    Ray lets a process whose raylet died finish its task while another process runs it again.
    """
    while job.key in _task_functions:
        time.sleep(_MEMORY_POLL_SECONDS)
        if os.getppid() != parent:
            os._exit(1)
        used_memory = measure_process_memory(os.getpid()) if job.memory is not None else 0
        running_task = _running_tasks.get("task")
        if job.memory is not None and used_memory > job.memory and running_task is not None:
            serial, send = running_task
            send(RayMessage(serial, last=describe_memory_excess(used_memory, job.memory)))
            os._exit(1)


_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# Shared memory for tasks and results of a local Ray; both are small.
_OBJECT_BYTES = 128 << 20
_NODE_DIED = "was on a node of the Ray cluster that died"
_RESUME_HINT = "finished work is kept, so fix the cluster and give the same command again"


@dataclass(slots=True)
class _RayTask:
    serial: int
    number: int
    node: str = ""


@final
class RayExecutor:
    """Executor of tasks on a Ray cluster; see ``Executor`` in ``protocols.py``.

    Paths in tasks must be valid on every node.

    Args:
        setup: called once in every process; must be importable there.
        address: ``host:port`` or ``auto``; None starts a Ray on this machine that others cannot reach, and
            ends it afterwards.
        workers: maximum number of concurrent tasks; None for one per processor.
        memory: maximum bytes of a worker; Ray places only as many workers on a node as fit.
        shared: folder that every node must see.
        patience: seconds without a usable node after which the executor gives up.

    Raises:
        MissingDependencyError: ray is not installed.
        InputError: the address is of an unsupported kind.
        WorkerError: the cluster cannot be reached, or (by ``next``) is lost or has no usable node.
        OutputError: by ``next``, if a node does not see the shared folder.
    """

    def __init__(
        self,
        setup: TaskFunctionFactory,
        address: str | None = None,
        workers: int | None = None,
        memory: int | None = None,
        shared: Path | None = None,
        patience: float = 60.0,
    ) -> None:
        self._setup = pickle.dumps(setup, protocol=5)
        self._address = address
        self._max_workers = workers
        self._memory = memory
        self._shared = shared
        self._patience = patience
        self._waiting: deque[tuple[int, Any]] = deque()
        self._tasks: dict[Any, _RayTask] = {}
        self._exit_reasons: dict[int, str] = {}
        self._events: deque[TaskMessage | TaskResult | TaskLoss | Exception] = deque()
        self._serial = self._slots = 0
        self._last_check = self._last_capacity_time = 0.0
        self._owns_ray = False
        self._token: Path | None = None
        self._mailbox: Any = None

    @property
    def workers(self) -> int:
        return min(self._slots, self._max_workers or self._slots)

    @property
    def unfinished(self) -> int:
        ends = sum(not isinstance(event, TaskMessage) for event in self._events)
        return len(self._waiting) + len(self._tasks) + ends

    def __enter__(self) -> Self:
        self._ray = _import_ray(self._address)
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            _connect(self._ray, self._address, self._max_workers)
        try:
            self._start_actors()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            self._token.unlink(missing_ok=True)
        if self._owns_ray:
            self._ray.shutdown()
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            for task in self._tasks:
                self._ray.cancel(task, force=True)
            if self._mailbox is not None:
                self._ray.kill(self._mailbox)

    def submit(self, number: int, task: Any) -> None:
        self._waiting.append((number, task))

    def next(self, seconds: float) -> TaskMessage | TaskResult | TaskLoss | None:
        """Return the next event; None after ``seconds`` without one, or when all is done."""
        deadline = time.monotonic() + seconds
        while not self._events and self.unfinished:
            try:
                self._update_nodes()
                self._start_tasks()
                self._wait_for_event(max(0.0, min(deadline - time.monotonic(), _POLL_SECONDS)))
            except self._ray.exceptions.RayError as error:
                raise WorkerError(
                    f"The connection to the Ray cluster was lost ({_first_line(error)}); {_RESUME_HINT}."
                ) from error
            if time.monotonic() >= deadline:
                break
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    def _start_actors(self) -> None:
        ray = self._ray
        context = ray.get_runtime_context()
        key = f"{context.get_job_id()}-{os.getpid()}-{time.time_ns()}"
        self._job = RayJob(key, self._memory, self._shared and self._shared.absolute())
        self._token = self._job.token
        if self._token is not None:
            try:
                self._token.write_text(key)
            except OSError as error:
                raise OutputError(f"Cannot write {self._token}: {describe_os_error(error)}.") from error
        local_strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            context.get_node_id(), soft=False
        )
        # Every sending worker occupies one call of the mailbox, and so does the coordinator.
        self._mailbox = (
            ray.remote(MessageMailbox)
            .options(num_cpus=0, max_concurrency=1 << 16, scheduling_strategy=local_strategy)
            .remote()
        )
        self._take_reference = self._mailbox.take.remote()
        self._setup_reference = ray.put(self._setup)
        self._remote_function = ray.remote(run_ray_task).options(num_cpus=1, max_retries=0, memory=self._memory)
        self._last_capacity_time = time.monotonic()

    def _update_nodes(self) -> None:
        """Update the number of worker slots from the current nodes."""
        now = time.monotonic()
        if now < self._last_check + _POLL_SECONDS:
            return
        self._last_check = now
        nodes = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        self._drop_lost_tasks(set(nodes))
        self._slots = count_worker_slots(list(nodes.values()), self._memory)
        if self._slots:
            self._last_capacity_time = now
        elif now > self._last_capacity_time + self._patience:
            requirement = "a processor"
            if self._memory is not None:
                requirement += f" and {self._memory >> 20:,} MiB of memory for a worker"
            raise WorkerError(
                f"No node of the Ray cluster has had {requirement} for {self._patience:g} seconds; {_RESUME_HINT}."
            )

    def _drop_lost_tasks(self, alive: set[str]) -> None:
        """Lose tasks on dead nodes at once; a connection to them may hang for minutes."""
        for reference, task in list(self._tasks.items()):
            if task.node and task.node not in alive:
                del self._tasks[reference]
                self._events.append(TaskLoss(task.number, _NODE_DIED))

    def _start_tasks(self) -> None:
        while self._waiting and len(self._tasks) < self.workers:
            number, queued_task = self._waiting.popleft()
            self._serial += 1
            reference = self._remote_function.remote(
                self._job,
                self._setup_reference,
                self._serial,
                pickle.dumps((number, queued_task), protocol=5),
                self._mailbox,
            )
            self._tasks[reference] = _RayTask(self._serial, number)

    def _wait_for_event(self, seconds: float) -> None:
        """Wait for a message or the end of a task."""
        ready_references, _ = self._ray.wait([*self._tasks, self._take_reference], timeout=seconds)
        if not ready_references:
            return
        [first] = ready_references
        # When a task ends, all its messages are in the mailbox or were taken from it already.
        drained_messages = self._ray.get(self._mailbox.drain.remote()) if first in self._tasks else []
        self._handle_messages(
            sorted(
                self._ray.get(self._take_reference) + drained_messages, key=lambda numbered_message: numbered_message[0]
            )
        )
        self._take_reference = self._mailbox.take.remote()
        if first in self._tasks:
            self._events.append(self._make_event(first, self._tasks.pop(first)))

    def _handle_messages(self, messages: list[tuple[int, RayMessage]]) -> None:
        current = {task.serial: task for task in self._tasks.values()}
        for _, message in messages:
            # A process on a node considered dead may still send messages.
            task = current.get(message.serial)
            if task is None:
                continue
            if message.node:
                task.node = message.node
            elif message.last:
                self._exit_reasons[message.serial] = message.last
            else:
                self._events.append(TaskMessage(task.number, message.message))

    def _make_event(self, reference: Any, task: _RayTask) -> TaskResult | TaskLoss | Exception:
        errors = self._ray.exceptions
        exit_reason = self._exit_reasons.pop(task.serial, "")
        try:
            result = pickle.loads(self._ray.get(reference))
        except errors.RayTaskError as error:
            return WorkerError(_describe_task_error(error))
        except errors.OutOfMemoryError:
            return TaskLoss(task.number, "was killed by Ray, because its node ran out of memory")
        except errors.NodeDiedError:
            return TaskLoss(task.number, _NODE_DIED)
        except errors.WorkerCrashedError:
            return TaskLoss(task.number, exit_reason or "died on a node of the Ray cluster (out of memory?)")
        except errors.ObjectLostError:
            return TaskLoss(task.number, "finished, but its result was lost with its node")
        return restore_error(result) if isinstance(result, TaskFailure) else result


def count_worker_slots(nodes: list[dict[str, float]], memory: int | None) -> int:
    """Count the workers of one processor and ``memory`` bytes that fit on the nodes."""
    return sum(
        min(int(resources.get("CPU", 0)), int(resources.get("memory", 0) // memory) if memory else 1 << 30)
        for resources in nodes
    )


def _import_ray(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        # Without it even a local Ray listens on the network; ray reads it on import.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependencyError(
            "--engine ray needs ray: pip install 'batchloom[ray]', or use --workers on this machine."
        ) from error
    return ray


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    try:
        if address is not None:
            _check_reachable(address)
        if address is None:
            ray.init(
                address="local",
                num_cpus=workers or count_cores(),
                include_dashboard=False,
                object_store_memory=_OBJECT_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, OverflowError, ray.exceptions.RayError) as error:
        raise WorkerError(_describe_connection_error(address, error)) from error


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at an address; Ray itself would retry for minutes."""
    if address.startswith("ray://"):
        raise InputError(
            f"{quote_value(address)} is an address of the Ray client, which is not supported; run the command on a "
            "node of the cluster and give --address auto, or HOST:PORT."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _describe_connection_error(address: str | None, error: Exception) -> str:
    reason = _first_line(error)
    if address is None:
        return f"Ray cannot be started on this machine: {reason}; use --workers without it."
    if "ersion mismatch" in str(error):
        versions = " ".join(str(error).split())
        return (
            f"The Ray cluster at {quote_value(address)} runs another version of Python or Ray than this process "
            f"({versions}); install the same versions on all nodes."
        )
    return (
        f"There is no Ray cluster at {quote_value(address)} ({reason}); give --address HOST:PORT as printed by "
        "`ray start --head`, auto on a node of the cluster, or leave it out."
    )


def _describe_task_error(error: Exception) -> str:
    """Describe why a task failed before any code of batchloom ran in it."""
    text = str(error)
    if "No module named" in text or "ModuleNotFoundError" in text:
        return (
            f"A node of the Ray cluster cannot load batchloom ({text.strip().splitlines()[-1]}); install the same "
            "batchloom, with the same extras, in the Python of every node."
        )
    return f"A task of the Ray cluster failed before it started: {text}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
