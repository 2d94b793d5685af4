"""Production of lane pools, in this process or in workers with lanes of their own."""

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from batchloom.core.errors import WorkerError
from batchloom.plan import PlanSpec, order_lane_ranges
from batchloom.preparation.documents import make_chat_encoder
from batchloom.preparation.phases import WorkerSetup, check_versions
from batchloom.preparation.workers import (
    MessageCallback,
    ProcessPool,
    TaskFunction,
    TaskLoss,
    TaskResult,
    count_cores,
)
from batchloom.streaming.lane import CachedRanges, LaneContext, LanePosition, LaneReader, StreamPool
from batchloom.streaming.record_ranges import RangeGroup
from batchloom.streaming.stream_media import MediaSpill

_MAX_WORKER_DEATHS = 3
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class PoolTask:
    """Request for the pool of a lane at a position."""

    lane: int
    position: LanePosition


@dataclass(frozen=True, slots=True)
class StreamSetup:
    """Setup of a stream worker, which can be sent to other processes."""

    worker_setup: WorkerSetup
    range_groups: Mapping[int, RangeGroup]  # Range groups of the lanes read here, by number
    count: int
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None  # Cache of range groups for a store; None without one
    media: Path | None = None  # Spill folder of media bytes from records; None if media are not read

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """Return the setup of a worker of these lanes, with only their range groups.

        With very many files, the full list is large.
        """
        numbers_by_lane = [order_lane_ranges(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(numbers_by_lane).tolist()
        return replace(self, range_groups={number: self.range_groups[number] for number in numbers})

    def __call__(self) -> TaskFunction:
        """Create the task function in the process that runs it.

        A lane stays open at its position, and is reopened at another one.
        """
        check_versions(self.worker_setup.versions)
        task, recipe = self.worker_setup.load_context(), self.worker_setup.recipe
        chat = cache(lambda: make_chat_encoder(task.tokenizer, recipe))
        media_spill = None if self.media is None else MediaSpill(self.media)
        context = LaneContext(
            *(task, chat, self.range_groups, self.count, self.spec, self.lanes, self.keep),
            media_spill=media_spill,
        )
        open_lanes: dict[int, LaneReader] = {}

        def make_pool(pool_task: Any, _send: MessageCallback) -> StreamPool:
            # A lane whose reading fails does not stay open.
            reader = open_lanes.pop(pool_task.lane, None)
            if reader is None or reader.position != pool_task.position:
                reader = LaneReader(context, pool_task.lane, pool_task.position)
            pool = reader.next()
            open_lanes[pool_task.lane] = reader
            return pool

        return make_pool


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
        """Return the pool at a lane's position."""
        if self._work is None:
            self._work = self._setup()
        pool: StreamPool = self._work(PoolTask(lane, position), lambda _: None)
        return pool

    def close(self) -> None:
        """Release open files."""
        self._work = None


@dataclass(slots=True)
class _PendingPool:
    task: PoolTask
    deaths: int = 0


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
        """Request the pool at a lane's position."""
        self._tasks.put(PoolTask(lane, position))

    def take(self, lane: int, position: LanePosition) -> StreamPool:  # noqa: ARG002 - the request names it
        """Return the requested pool of a lane, when it is ready."""
        with self._changed:
            while lane not in self._ready_pools:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise WorkerError("The stream was closed while a batch was being made.")
                self._changed.wait(_WAIT_SECONDS)
            return self._ready_pools.pop(lane)

    def close(self) -> None:
        """Stop all workers."""
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
        pending_pools: dict[int, _PendingPool] = {}
        number = 0
        while not self._closed:
            while True:
                try:
                    task = self._tasks.get(block=not pending_pools)
                except queue.Empty:
                    break
                if task is None:
                    return
                pending_pools[number] = _PendingPool(task)
                executors[self._worker_by_lane[task.lane]].submit(number, task)
                number += 1
            for executor in executors:
                if not executor.unfinished:
                    continue
                event = executor.next(_POLL_SECONDS / len(executors))
                if isinstance(event, TaskLoss):
                    self._handle_worker_loss(executor, event, pending_pools[event.number])
                elif isinstance(event, TaskResult):
                    self._store_pool(pending_pools.pop(event.number), event.result)

    def _store_pool(self, pending_pool: _PendingPool, pool: StreamPool) -> None:
        with self._changed:
            self._ready_pools[pending_pool.task.lane] = pool
            self._changed.notify_all()

    def _handle_worker_loss(self, executor: ProcessPool, event: TaskLoss, pending_pool: _PendingPool) -> None:
        """Resubmit the pool of a dead worker; its input is read again."""
        pending_pool.deaths += 1
        if pending_pool.deaths > _MAX_WORKER_DEATHS:
            raise WorkerError(
                f"A worker of the stream {event.reason}, {pending_pool.deaths} times at the same pool (lane "
                f"{pending_pool.task.lane}). Give it more memory (fewer workers, smaller pool_size), or workers=0 to "
                "see the cause; batchloom prepare finds the record."
            )
        executor.submit(event.number, pending_pool.task)
