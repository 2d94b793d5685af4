"""Production of lane pools, in this process or in workers with lanes of their own."""

import queue
import threading
from collections import Counter
from typing import Literal, final

from batchloom.core.errors import WorkerError
from batchloom.preparation.workers import ProcessPool, TaskFunction, TaskLoss, TaskResult, count_cores
from batchloom.streaming.lane import LanePosition, PoolTask, StreamPool, StreamSetup

_MAX_WORKER_DEATHS = 3
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 0.2


def choose_worker_count(workers: int | Literal["auto"], lanes: int, local_ranks: int) -> int:
    """Return the number of worker processes for a rank's lanes; 0 means no workers."""
    worker_count = count_cores() // max(local_ranks, 1) if workers == "auto" else workers
    return min(max(worker_count, 1 if workers == "auto" else 0), lanes)


@final
class InlinePools:
    """Maker of pools in this process, on demand."""

    def __init__(self, setup: StreamSetup) -> None:
        self._setup = setup
        self._work: TaskFunction | None = None

    def ask(self, lane: int, position: LanePosition) -> None:
        """Do nothing: pools are made on demand."""

    def take(self, lane: int, position: LanePosition) -> StreamPool:
        if self._work is None:
            self._work = self._setup()
        pool: StreamPool = self._work((lane, position), lambda _: None)
        return pool

    def close(self) -> None:
        self._work = None


@final
class WorkerPools:
    """Maker of pools ahead in worker processes, one pool per lane at a time.

    A lane belongs to one worker, which keeps its files open. A separate thread submits tasks, since
    Linux ends a process with the thread that started it.
    """

    def __init__(self, setup: StreamSetup, workers: int, lanes: range) -> None:
        self._setup, self._workers = setup, workers
        self._worker_by_lane = {lane: number % workers for number, lane in enumerate(lanes)}
        self._tasks: queue.SimpleQueue[PoolTask | None] = queue.SimpleQueue()
        self._ready_pools: dict[int, StreamPool] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batchloom-stream", daemon=True)
        self._thread.start()

    def ask(self, lane: int, position: LanePosition) -> None:
        self._tasks.put((lane, position))

    def take(self, lane: int, position: LanePosition) -> StreamPool:  # noqa: ARG002 - the request names it
        with self._changed:
            while lane not in self._ready_pools:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise WorkerError("The stream was closed while a batch was being made.")
                self._changed.wait(_WAIT_SECONDS)
            return self._ready_pools.pop(lane)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tasks.put(None)

    def _run(self) -> None:
        executors: list[ProcessPool] = []
        try:
            for worker in range(self._workers):
                worker_lanes = [lane for lane, owner in self._worker_by_lane.items() if owner == worker]
                executors.append(ProcessPool(self._setup.for_lanes(worker_lanes), 1))
            self._run_executors(executors)
        except BaseException as error:  # noqa: BLE001 - take() raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for executor in executors:
                executor.close()

    def _run_executors(self, executors: list[ProcessPool]) -> None:
        pending_tasks: dict[int, PoolTask] = {}
        deaths: Counter[int] = Counter()
        number = 0
        while not self._closed:
            while True:
                try:
                    task = self._tasks.get(block=not pending_tasks)
                except queue.Empty:
                    break
                if task is None:
                    return
                pending_tasks[number] = task
                executors[self._worker_by_lane[task[0]]].submit(number, task)
                number += 1
            for executor in executors:
                if not executor.unfinished:
                    continue
                event = executor.next(_POLL_SECONDS / len(executors))
                if isinstance(event, TaskLoss):
                    # The input of a dead worker's pool is read again.
                    task = pending_tasks[event.number]
                    deaths[event.number] += 1
                    _check_deaths(event.reason, deaths[event.number], task[0])
                    executor.submit(event.number, task)
                elif isinstance(event, TaskResult):
                    lane, _ = pending_tasks.pop(event.number)
                    with self._changed:
                        self._ready_pools[lane] = event.result
                        self._changed.notify_all()


def _check_deaths(reason: str, deaths: int, lane: int) -> None:
    if deaths > _MAX_WORKER_DEATHS:
        raise WorkerError(
            f"A worker of the stream {reason}, {deaths} times at the same pool (lane {lane}). Give it more memory "
            "(fewer workers, smaller pool_size), or workers=0 to see the cause; batchloom prepare finds the record."
        )
