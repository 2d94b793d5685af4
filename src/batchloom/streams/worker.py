"""What a worker of a stream does: one order is one pool of one lane."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from batchloom.execution.seam import Tell, Work
from batchloom.plan.spec import PlanSpec
from batchloom.preparation.hand import Hand
from batchloom.preparation.tokenizer_of import chat_encoder
from batchloom.preparation.units import plan_units
from batchloom.preparation.versions import refuse_other_versions
from batchloom.sources.rules import Source
from batchloom.streams.lane import Keep, LanePool, LaneReader, LaneWork, Place
from batchloom.streams.stretches import cut_stretches


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
        sources: the inputs in order.
        unit_bytes: listed input of a unit.
        spec: of the order.
        lanes: how many lanes there are.
        keep: where stretches are kept for a store; None where none is.
    """

    hand: Hand
    sources: tuple[Source, ...]
    unit_bytes: int
    spec: PlanSpec
    lanes: int
    keep: Keep | None

    def __call__(self) -> Work:
        """Make what does orders, in the process that does them.

        Raises:
            WorkerError: this process has other versions.
        """
        refuse_other_versions(self.hand.versions)
        task, recipe = self.hand.task(), self.hand.recipe
        units = plan_units(self.sources, task.rules, self.unit_bytes)
        stretches = cut_stretches(units, task.rules, self.unit_bytes)
        chat = cache(lambda: chat_encoder(task.tokenizer, recipe))
        lanes = Lanes(LaneWork(task, chat, stretches, self.spec, self.lanes, self.keep))

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


def tokenizer_file(folder: Path) -> Path:
    """Where a stream keeps its tokenizer for its workers."""
    return folder / "tokenizer_state.json"
