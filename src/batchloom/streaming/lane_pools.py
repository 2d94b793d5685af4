"""Who makes the pools of lanes: this process, or worker processes that each have lanes of their own."""

import queue
import threading
from dataclasses import dataclass
from typing import Literal, final

from batchloom.core.errors import WorkerError
from batchloom.preparation.workers import (
    ProcessPool,
    TaskFunction,
    TaskLoss,
    TaskResult,
    count_cores,
)
from batchloom.streaming.lane import LanePosition, StreamPool
from batchloom.streaming.stream_worker import PoolTask, StreamSetup

_MAX_WORKER_DEATHS = 3
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 0.2


def choose_worker_count(asked: int | Literal["auto"], lanes: int, local_ranks: int) -> int:
    """How many processes make the pools of a rank's lanes; 0: none but its own."""
    wanted = count_cores() // max(local_ranks, 1) if asked == "auto" else asked
    return min(max(wanted, 1 if asked == "auto" else 0), lanes)


@final
class InlinePools:
    """Makes pools in this process, when they are taken."""

    def __init__(self, setup: StreamSetup) -> None:
        self._setup = setup
        self._work: TaskFunction | None = None

    def ask(self, lane: int, place: LanePosition) -> None:
        """Nothing is made ahead."""

    def take(self, lane: int, place: LanePosition) -> StreamPool:
        """The pool at a place of a lane."""
        if self._work is None:
            self._work = self._setup()
        made: StreamPool = self._work(PoolTask(lane, place), lambda _: None)
        return made

    def close(self) -> None:
        """Let go of what is open."""
        self._work = None


@dataclass(slots=True)
class _PendingPool:
    order: PoolTask
    deaths: int = 0


@final
class WorkerPools:
    """Makes pools ahead, in worker processes: one pool a lane waits, or is being made.

    A lane belongs to one worker, which has its files open. A thread of its own hands out orders, since
    Linux ends a process with the thread that started it.

    Args:
        setup: what workers need to know.
        workers: how many.
        lanes: that will be asked for.
    """

    def __init__(self, setup: StreamSetup, workers: int, lanes: range) -> None:
        self._setup, self._workers = setup, workers
        self._of = {lane: number % workers for number, lane in enumerate(lanes)}
        self._orders: queue.SimpleQueue[PoolTask | None] = queue.SimpleQueue()
        self._made: dict[int, StreamPool] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batchloom-stream", daemon=True)
        self._thread.start()

    def ask(self, lane: int, place: LanePosition) -> None:
        """Have the pool at a place of a lane made."""
        self._orders.put(PoolTask(lane, place))

    def take(self, lane: int, place: LanePosition) -> StreamPool:  # noqa: ARG002 - it was asked for
        """The pool that was asked for of a lane, when it is there."""
        with self._changed:
            while lane not in self._made:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise WorkerError("The stream was closed while a batch was being made.")
                self._changed.wait(_WAIT_SECONDS)
            return self._made.pop(lane)

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._orders.put(None)

    def _run(self) -> None:
        crews: list[ProcessPool] = []
        try:
            for worker in range(self._workers):
                mine = [lane for lane, its in self._of.items() if its == worker]
                crews.append(ProcessPool(self._setup.for_lanes(mine), 1))
            self._run_executors(crews)
        except BaseException as error:  # noqa: BLE001 - who takes a pool raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for crew in crews:
                crew.close()

    def _run_executors(self, crews: list[ProcessPool]) -> None:
        asked: dict[int, _PendingPool] = {}
        number = 0
        while not self._closed:
            while True:
                try:
                    order = self._orders.get(block=not asked)
                except queue.Empty:
                    break
                if order is None:
                    return
                asked[number] = _PendingPool(order)
                crews[self._of[order.lane]].give(number, order)
                number += 1
            for crew in crews:
                if not crew.unfinished:
                    continue
                event = crew.next(_POLL_SECONDS / len(crews))
                if isinstance(event, TaskLoss):
                    self._handle_worker_loss(crew, event, asked[event.number])
                elif isinstance(event, TaskResult):
                    self._done(asked.pop(event.number), event.result)

    def _done(self, asked: _PendingPool, made: StreamPool) -> None:
        with self._changed:
            self._made[asked.order.lane] = made
            self._changed.notify_all()

    def _handle_worker_loss(self, crew: ProcessPool, event: TaskLoss, asked: _PendingPool) -> None:
        """Have the pool made again by the next process; what it was in the middle of is read again."""
        asked.deaths += 1
        if asked.deaths > _MAX_WORKER_DEATHS:
            raise WorkerError(
                f"A worker of the stream {event.reason}, {asked.deaths} times at the same pool (lane "
                f"{asked.order.lane}). Give it more memory (fewer workers, smaller pool_size), or workers=0 to see "
                "what it dies of; prepare finds the record."
            )
        crew.give(event.number, asked.order)
