"""Code that runs in processes of a Ray cluster: the message mailbox, and tasks."""

import asyncio
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from batchloom.core.process_state import mark_worker
from batchloom.preparation.workers.machine_limits import describe_memory_excess, measure_process_memory
from batchloom.preparation.workers.protocols import TaskFunction
from batchloom.preparation.workers.worker_results import OUT_OF_MEMORY, encode_failure, run_task

# Maximum number of buffered messages; further senders wait.
_MAX_MESSAGES = 1000
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RayJob:
    """Job settings sent with every task.

    Attributes:
        key: unique key of the executor.
        memory: maximum bytes of a worker; None for no limit.
        shared: folder that every node must see; it holds a file with the key.
    """

    key: str
    memory: int | None
    shared: Path | None

    @property
    def token(self) -> Path | None:
        """File that proves that a node sees the shared folder."""
        return None if self.shared is None else self.shared / f".reach-{self.key}"


@dataclass(frozen=True, slots=True)
class RayMessage:
    """Message of a running task.

    Attributes:
        serial: serial number of the task.
        message: message of the task function, if the other two are empty.
        node: node on which the task starts.
        last: why its process ends now.
    """

    serial: int
    message: Any = None
    node: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class UnreachableFolder:
    """Result of a task on a node that does not see the shared folder."""

    node: str


@final
class MessageMailbox:
    """Actor on the coordinator's node, without a processor, that buffers messages."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, RayMessage]] = []
        self._count = 0
        self._message_event, self._room_event = asyncio.Event(), asyncio.Event()
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
        messages, self._messages = self._messages, []
        self._room_event.set()
        return messages


class _MessageSender(Protocol):
    def __call__(self, message: RayMessage) -> None: ...


# Task function of the current executor; a Ray process runs tasks of one job only.
_task_functions: dict[str, TaskFunction] = {}
# Sender of the running task, for the memory watch thread.
_running_tasks: dict[str, tuple[int, _MessageSender]] = {}


def run_ray_task(job: RayJob, setup: bytes, serial: int, pickled_task: bytes, mailbox: Any) -> bytes:
    """Run one task; return :func:`run_task`'s bytes or a pickled UnreachableFolder.

    Setup and task arrive as pickled bytes, so that errors in unpickling are reported like any other.
    """
    import ray  # noqa: PLC0415 - this module is also imported where no task runs

    def send(message: RayMessage) -> None:
        ray.get(mailbox.put.remote(message))

    mark_worker()
    mailbox.put.remote(RayMessage(serial, node=ray.get_runtime_context().get_node_id()))
    try:
        if job.token is not None and not _sees_shared_folder(job.token, job.key):
            return pickle.dumps(UnreachableFolder(ray.util.get_node_ip_address()))
        if job.key not in _task_functions:
            _task_functions.clear()
            _task_functions[job.key] = pickle.loads(setup)()  # noqa: S301 - bytes of the coordinator
            threading.Thread(target=_watch_limits, args=(job, os.getppid()), daemon=True).start()
        _running_tasks["order"] = (serial, send)
        number, value = pickle.loads(pickled_task)  # noqa: S301 - bytes of the coordinator
        return run_task(number, _task_functions[job.key], value, lambda message: send(RayMessage(serial, message)))
    except MemoryError:
        send(RayMessage(serial, last=OUT_OF_MEMORY))
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - process boundary: every error is reported
        return encode_failure(-1, error)
    finally:
        _running_tasks.clear()


def _sees_shared_folder(token: Path, key: str) -> bool:
    try:
        return token.read_text() == key
    except OSError:
        return False


def _watch_limits(job: RayJob, parent: int) -> None:
    """End this process if it exceeds its memory limit or its node is considered dead.

    Ray lets a process whose raylet died finish its task while another process runs it again.
    """
    while job.key in _task_functions:
        time.sleep(_POLL_SECONDS)
        if os.getppid() != parent:
            os._exit(1)
        used_memory = measure_process_memory(os.getpid()) if job.memory is not None else 0
        running_task = _running_tasks.get("order")
        if job.memory is not None and used_memory > job.memory and running_task is not None:
            serial, send = running_task
            send(RayMessage(serial, last=describe_memory_excess(used_memory, job.memory)))
            os._exit(1)
