"""What runs in the processes of a Ray cluster: the mailbox of what is told, and one order."""

import asyncio
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from batchloom.core.worker_process import mark_worker
from batchloom.preparation.workers.machine_limits import (
    describe_memory_excess,
    measure_process_memory,
)
from batchloom.preparation.workers.protocols import TaskFunction
from batchloom.preparation.workers.worker_results import OUT_OF_MEMORY, encode_failure, run_task

# Messages that nobody took; who tells more waits.
_MAX_MESSAGES = 1000
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RayJob:
    """What every task of a crew is told.

    Attributes:
        key: of the crew, alone among all.
        memory: bytes that a worker may hold; None for any.
        shared: a folder of which every node must see the same; it holds a file named after the key.
    """

    key: str
    memory: int | None
    shared: Path | None

    @property
    def token(self) -> Path | None:
        """The file by which a node shows that it sees the folder."""
        return None if self.shared is None else self.shared / f".reach-{self.key}"


@dataclass(frozen=True, slots=True)
class RayMessage:
    """What a task says on its way.

    Attributes:
        serial: of the task.
        message: what its work tells, where the other two are empty.
        node: where it begins.
        last: why its process ends now.
    """

    serial: int
    message: Any = None
    node: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class UnreachableFolder:
    """The node of a task does not see the shared folder."""

    node: str


@final
class MessageMailbox:
    """An actor without a processor, beside the coordinator, which keeps what workers tell."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, RayMessage]] = []
        self._count = 0
        self._message_event, self._room_event = asyncio.Event(), asyncio.Event()
        self._room_event.set()

    async def put(self, message: RayMessage) -> None:
        """Keep a message; what came back from here arrives, whatever becomes of the teller."""
        await self._room_event.wait()
        self._count += 1
        self._messages.append((self._count, message))
        self._message_event.set()
        if len(self._messages) >= _MAX_MESSAGES:
            self._room_event.clear()

    async def take(self) -> list[tuple[int, RayMessage]]:
        """All that is kept, numbered as it came, as soon as there is something (or ``drain`` was called)."""
        await self._message_event.wait()
        self._message_event.clear()
        return self._take_all()

    async def drain(self) -> list[tuple[int, RayMessage]]:
        """All that is kept now; ``take`` comes back, too."""
        self._message_event.set()
        return self._take_all()

    def _take_all(self) -> list[tuple[int, RayMessage]]:
        messages, self._messages = self._messages, []
        self._room_event.set()
        return messages


class _MessageSender(Protocol):
    def __call__(self, message: RayMessage) -> None: ...


# The work of the crew that this process works for; a process of Ray does tasks of one job only.
_task_functions: dict[str, TaskFunction] = {}
# Who tells for the order that is being done, for the thread that looks at memory.
_running_tasks: dict[str, tuple[int, _MessageSender]] = {}


def run_ray_task(job: RayJob, setup: bytes, serial: int, pickled_task: bytes, mailbox: Any) -> bytes:
    """One order of a crew: what ``answers.answer`` gives, or an Unreached.

    The order and the setup come as pickles of ours, so that what fails in them is told as any error.
    """
    import ray  # noqa: PLC0415 - late: this module is also read where nothing is done

    def send(message: RayMessage) -> None:
        ray.get(mailbox.put.remote(message))

    mark_worker()
    mailbox.put.remote(RayMessage(serial, node=ray.get_runtime_context().get_node_id()))
    try:
        if job.token is not None and not _sees_shared_folder(job.token, job.key):
            return pickle.dumps(UnreachableFolder(ray.util.get_node_ip_address()))
        if job.key not in _task_functions:
            _task_functions.clear()
            _task_functions[job.key] = pickle.loads(setup)()  # noqa: S301 - the coordinator's own bytes
            threading.Thread(target=_watch_limits, args=(job, os.getppid()), daemon=True).start()
        _running_tasks["order"] = (serial, send)
        number, value = pickle.loads(pickled_task)  # noqa: S301 - the coordinator's own bytes
        return run_task(
            number,
            _task_functions[job.key],
            value,
            lambda message: send(RayMessage(serial, message)),
        )
    except MemoryError:
        send(RayMessage(serial, last=OUT_OF_MEMORY))
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - the edge of a process: everything is told
        return encode_failure(-1, error)
    finally:
        _running_tasks.clear()


def _sees_shared_folder(token: Path, key: str) -> bool:
    try:
        return token.read_text() == key
    except OSError:
        return False


def _watch_limits(job: RayJob, parent: int) -> None:
    """End this process when it holds more than it may, or when its node is given up.

    Ray lets a process whose raylet died go on until its order is done, while another does it anew.
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
