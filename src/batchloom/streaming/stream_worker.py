"""Worker of a stream: each task makes one pool of one lane."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np

from batchloom.plan import PlanSpec, order_lane_ranges
from batchloom.preparation.documents import make_chat_encoder
from batchloom.preparation.phases import WorkerSetup
from batchloom.preparation.workers import MessageCallback, TaskFunction, check_versions
from batchloom.streaming.lane import CachedRanges, LaneContext, LanePosition, LaneReader, StreamPool
from batchloom.streaming.record_ranges import RangeGroup
from batchloom.streaming.stream_media import MediaSpill


@dataclass(frozen=True, slots=True)
class PoolTask:
    """Request for the pool of a lane at a position."""

    lane: int
    position: LanePosition


@dataclass(frozen=True, slots=True)
class StreamSetup:
    """Setup of a stream worker, which can be sent to other processes.

    Attributes:
        worker_setup: how records become documents.
        range_groups: range groups of the lanes read here, by number.
        count: number of all range groups.
        spec: settings of the data order.
        lanes: number of lanes.
        keep: cache of range groups for a store; None without one.
        media: spill folder of media bytes from records; None if media are not read.
    """

    worker_setup: WorkerSetup
    range_groups: Mapping[int, RangeGroup]
    count: int
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None
    media: Path | None = None

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """Return the setup of a worker of these lanes, with only their range groups.

        With very many files, the full list is large.
        """
        numbers_by_lane = [order_lane_ranges(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(numbers_by_lane).tolist()
        return replace(self, range_groups={number: self.range_groups[number] for number in numbers})

    def __call__(self) -> TaskFunction:
        """Create the task function in the process that runs it.

        Raises:
            WorkerError: this process has other package versions.
        """
        check_versions(self.worker_setup.versions)
        task, recipe = self.worker_setup.load_context(), self.worker_setup.recipe
        chat = cache(lambda: make_chat_encoder(task.tokenizer, recipe))
        media_spill = None if self.media is None else MediaSpill(self.media)
        lanes = LaneSet(
            LaneContext(
                *(task, chat, self.range_groups, self.count, self.spec, self.lanes, self.keep),
                media_spill=media_spill,
            )
        )

        def work(pool_task: Any, _send: MessageCallback) -> StreamPool:
            return lanes.pool(pool_task)

        return work


@final
class LaneSet:
    """Lanes that one process reads, each open at its current position."""

    def __init__(self, context: LaneContext) -> None:
        self._context = context
        self._open: dict[int, LaneReader] = {}

    def pool(self, pool_task: PoolTask) -> StreamPool:
        """Return the pool at a position; reopen a lane that is at another position."""
        reader = self._open.pop(pool_task.lane, None)
        if reader is None or reader.position != pool_task.position:
            reader = LaneReader(self._context, pool_task.lane, pool_task.position)
        pool = reader.next()
        self._open[pool_task.lane] = reader
        return pool
