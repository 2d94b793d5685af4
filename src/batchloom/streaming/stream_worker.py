"""What a worker of a stream does: one order is one pool of one lane."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np

from batchloom.plan import PlanSpec, lane_stretches
from batchloom.preparation.documents import chat_encoder
from batchloom.preparation.phases import Hand
from batchloom.preparation.workers import Tell, Work, refuse_other_versions
from batchloom.streaming.lane import Keep, LanePool, LaneReader, LaneWork, Place
from batchloom.streaming.record_ranges import Stretch
from batchloom.streaming.stream_media import Aside


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """The pool of a lane that begins at a place."""

    lane: int
    place: Place


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

    hand: Hand
    stretches: Mapping[int, Stretch]
    count: int
    spec: PlanSpec
    lanes: int
    keep: Keep | None
    media: Path | None = None

    def for_lanes(self, lanes: Sequence[int]) -> "StreamSetup":
        """The same for a worker that reads these lanes alone: of very many files it need not know all."""
        mine = [lane_stretches(self.count, self.lanes, self.spec, lane, 0) for lane in lanes]
        numbers = np.concatenate(mine).tolist()
        return replace(self, stretches={number: self.stretches[number] for number in numbers})

    def __call__(self) -> Work:
        """Make what does orders, in the process that does them.

        Raises:
            WorkerError: this process has other versions.
        """
        refuse_other_versions(self.hand.versions)
        task, recipe = self.hand.task(), self.hand.recipe
        chat = cache(lambda: chat_encoder(task.tokenizer, recipe))
        aside = None if self.media is None else Aside(self.media)
        lanes = Lanes(
            LaneWork(
                *(task, chat, self.stretches, self.count, self.spec, self.lanes, self.keep),
                aside=aside,
            )
        )

        def work(order: Any, _tell: Tell) -> LanePool:
            return lanes.pool(order)

        return work


@final
class Lanes:
    """The lanes that one process reads, each open at the place it has come to."""

    def __init__(self, work: LaneWork) -> None:
        self._work = work
        self._open: dict[int, LaneReader] = {}

    def pool(self, order: PoolOrder) -> LanePool:
        """The pool that begins at a place; a lane that stands elsewhere is begun anew there."""
        reader = self._open.pop(order.lane, None)
        if reader is None or reader.place != order.place:
            reader = LaneReader(self._work, order.lane, order.place)
        made = reader.next()
        self._open[order.lane] = reader
        return made
