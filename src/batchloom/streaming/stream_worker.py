"""What a worker of a stream does: one order is one pool of one lane."""

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
    """The pool of a lane that begins at a place."""

    lane: int
    position: LanePosition


@dataclass(frozen=True, slots=True)
class StreamSetup:
    """All that a worker of a stream needs to know, as a value that other processes can be sent.

    Attributes:
        worker_setup: how records become documents.
        range_groups: those of the lanes that are read here, by number.
        count: how many stretches there are in all.
        spec: of the order.
        lanes: how many lanes there are.
        keep: where stretches are kept for a store; None where none is.
        media: a folder for the bytes of media that stand in records; None where media are not read.
    """

    worker_setup: WorkerSetup
    range_groups: Mapping[int, RangeGroup]
    count: int
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None
    media: Path | None = None

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """The same for a worker that reads these lanes alone: of very many files it need not know all."""
        numbers_by_lane = [order_lane_ranges(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(numbers_by_lane).tolist()
        return replace(self, range_groups={number: self.range_groups[number] for number in numbers})

    def __call__(self) -> TaskFunction:
        """Make what does orders, in the process that does them.

        Raises:
            WorkerError: this process has other versions.
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
    """The lanes that one process reads, each open at the place it has come to."""

    def __init__(self, context: LaneContext) -> None:
        self._context = context
        self._open: dict[int, LaneReader] = {}

    def pool(self, pool_task: PoolTask) -> StreamPool:
        """The pool that begins at a place; a lane that stands elsewhere is begun anew there."""
        reader = self._open.pop(pool_task.lane, None)
        if reader is None or reader.position != pool_task.position:
            reader = LaneReader(self._context, pool_task.lane, pool_task.position)
        pool = reader.next()
        self._open[pool_task.lane] = reader
        return pool
