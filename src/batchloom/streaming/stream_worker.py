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
    place: LanePosition


@dataclass(frozen=True, slots=True)
class StreamSetup:
    """All that a worker of a stream needs to know, as a value that other processes can be sent.

    Attributes:
        hand: how records become documents.
        stretches: those of the lanes that are read here, by number.
        count: how many stretches there are in all.
        spec: of the order.
        lanes: how many lanes there are.
        keep: where stretches are kept for a store; None where none is.
        media: a folder for the bytes of media that stand in records; None where media are not read.
    """

    hand: WorkerSetup
    stretches: Mapping[int, RangeGroup]
    count: int
    spec: PlanSpec
    lanes: int
    keep: CachedRanges | None
    media: Path | None = None

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """The same for a worker that reads these lanes alone: of very many files it need not know all."""
        mine = [order_lane_ranges(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(mine).tolist()
        return replace(self, stretches={number: self.stretches[number] for number in numbers})

    def __call__(self) -> TaskFunction:
        """Make what does orders, in the process that does them.

        Raises:
            WorkerError: this process has other versions.
        """
        check_versions(self.hand.versions)
        task, recipe = self.hand.task(), self.hand.recipe
        chat = cache(lambda: make_chat_encoder(task.tokenizer, recipe))
        aside = None if self.media is None else MediaSpill(self.media)
        lanes = LaneSet(
            LaneContext(
                *(task, chat, self.stretches, self.count, self.spec, self.lanes, self.keep),
                aside=aside,
            )
        )

        def work(order: Any, _tell: MessageCallback) -> StreamPool:
            return lanes.pool(order)

        return work


@final
class LaneSet:
    """The lanes that one process reads, each open at the place it has come to."""

    def __init__(self, work: LaneContext) -> None:
        self._work = work
        self._open: dict[int, LaneReader] = {}

    def pool(self, order: PoolTask) -> StreamPool:
        """The pool that begins at a place; a lane that stands elsewhere is begun anew there."""
        reader = self._open.pop(order.lane, None)
        if reader is None or reader.place != order.place:
            reader = LaneReader(self._work, order.lane, order.place)
        made = reader.next()
        self._open[order.lane] = reader
        return made
