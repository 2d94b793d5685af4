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
from batchloom.preparation.workers.machine_limits import own_memory, too_much
from batchloom.preparation.workers.protocols import Work
from batchloom.preparation.workers.worker_results import OUT_OF_MEMORY, answer, failure

# Messages that nobody took; who tells more waits.
_MOST_KEPT = 1000
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
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
class Message:
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
class Unreached:
    """The node of a task does not see the shared folder."""

    node: str


@final
class Mailbox:
    """An actor without a processor, beside the coordinator, which keeps what workers tell."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Message]] = []
        self._count = 0
        self._some, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    async def put(self, message: Message) -> None:
        """Keep a message; what came back from here arrives, whatever becomes of the teller."""
        await self._room.wait()
        self._count += 1
        self._kept.append((self._count, message))
        self._some.set()
        if len(self._kept) >= _MOST_KEPT:
            self._room.clear()

    async def take(self) -> list[tuple[int, Message]]:
        """All that is kept, numbered as it came, as soon as there is something (or ``drain`` was called)."""
        await self._some.wait()
        self._some.clear()
        return self._emptied()

    async def drain(self) -> list[tuple[int, Message]]:
        """All that is kept now; ``take`` comes back, too."""
        self._some.set()
        return self._emptied()

    def _emptied(self) -> list[tuple[int, Message]]:
        kept, self._kept = self._kept, []
        self._room.set()
        return kept


class _Teller(Protocol):
    def __call__(self, message: Message) -> None: ...


# The work of the crew that this process works for; a process of Ray does tasks of one job only.
_made: dict[str, Work] = {}
# Who tells for the order that is being done, for the thread that looks at memory.
_doing: dict[str, tuple[int, _Teller]] = {}


def do_order(job: Job, setup: bytes, serial: int, order: bytes, mailbox: Any) -> bytes:
    """One order of a crew: what ``answers.answer`` gives, or an Unreached.

    The order and the setup come as pickles of ours, so that what fails in them is told as any error.
    """
    import ray  # noqa: PLC0415 - late: this module is also read where nothing is done

    def send(message: Message) -> None:
        ray.get(mailbox.put.remote(message))

    mark_worker()
    mailbox.put.remote(Message(serial, node=ray.get_runtime_context().get_node_id()))
    try:
        if job.token is not None and not _reached(job.token, job.key):
            return pickle.dumps(Unreached(ray.util.get_node_ip_address()))
        if job.key not in _made:
            _made.clear()
            _made[job.key] = pickle.loads(setup)()  # noqa: S301 - the coordinator's own bytes
            threading.Thread(target=_watch, args=(job, os.getppid()), daemon=True).start()
        _doing["order"] = (serial, send)
        number, value = pickle.loads(order)  # noqa: S301 - the coordinator's own bytes
        return answer(number, _made[job.key], value, lambda message: send(Message(serial, message)))
    except MemoryError:
        send(Message(serial, last=OUT_OF_MEMORY))
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - the edge of a process: everything is told
        return failure(-1, error)
    finally:
        _doing.clear()


def _reached(token: Path, key: str) -> bool:
    try:
        return token.read_text() == key
    except OSError:
        return False


def _watch(job: Job, parent: int) -> None:
    """End this process when it holds more than it may, or when its node is given up.

    Ray lets a process whose raylet died go on until its order is done, while another does it anew.
    """
    while job.key in _made:
        time.sleep(_LOOK_SECONDS)
        if os.getppid() != parent:
            os._exit(1)
        held = own_memory(os.getpid()) if job.memory is not None else 0
        doing = _doing.get("order")
        if job.memory is not None and held > job.memory and doing is not None:
            serial, send = doing
            send(Message(serial, last=too_much(held, job.memory)))
            os._exit(1)
