"""Where the time of a job went: seconds, bytes and documents by stage.

Stages are timed a batch at a time, so that a clock is read some hundred times a second at most.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar, final, get_args

import msgspec

T = TypeVar("T")

TimedStage = Literal[
    "list",
    "sample",
    "find cuts",
    "find repeated pieces",
    "read",
    "clean",
    "hash",
    "encode",
    "write temporary files",
    "find duplicates",
    "settle",
    "write shards",
    "finish",
]
# In the order in which a job comes to them.
STAGES: tuple[TimedStage, ...] = get_args(TimedStage)
_END = object()


class StageTime(msgspec.Struct, frozen=True):
    """What a stage took, and what went through it meanwhile.

    Seconds are over all workers where each does the stage for its units, and by the clock where the job does it
    once.
    """

    seconds: float = 0.0
    bytes: int = 0
    documents: int = 0

    def __add__(self, other: "StageTime") -> "StageTime":
        return StageTime(
            self.seconds + other.seconds,
            self.bytes + other.bytes,
            self.documents + other.documents,
        )


def add_stage_times(first: Mapping[str, StageTime], second: Mapping[str, StageTime]) -> dict[str, StageTime]:
    """The sum of two times, stages in the order of ``STAGES``, unknown ones after them."""
    names = [*STAGES, *sorted({*first, *second} - {*STAGES})]
    none = StageTime()
    return {name: first.get(name, none) + second.get(name, none) for name in names if name in first or name in second}


@final
class Stopwatch:
    """Adds up what stages take; may be told from several threads.

    Stages that run at the same time count each for itself, so their sum may be more than what
    passed on the clock.
    """

    def __init__(self) -> None:
        self._stage_times: dict[str, StageTime] = {}
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: TimedStage, size: int = 0, documents: int = 0) -> Iterator[None]:
        """Count what is done inside, also where it fails.

        Args:
            stage: which.
            size: bytes that go through.
            documents: documents that do.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began, size, documents)

    def time_each(self, stage: TimedStage, items: Iterable[T]) -> Iterator[T]:
        """The items; what it takes to get each of them is counted, what is done with it is not."""
        source = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(source, _END)
            finally:
                self.add(stage, time.perf_counter() - began)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # the end is no item

    def add(self, stage: TimedStage, seconds: float, size: int = 0, documents: int = 0) -> None:
        """Count seconds of a stage, and the bytes and documents that went through it."""
        more = StageTime(seconds, size, documents)
        with self._lock:
            self._stage_times[stage] = self._stage_times.get(stage, StageTime()) + more

    def get_stage_times(self) -> dict[str, StageTime]:
        """What each stage took so far, in the order of ``STAGES``."""
        with self._lock:
            return add_stage_times(self._stage_times, {})
