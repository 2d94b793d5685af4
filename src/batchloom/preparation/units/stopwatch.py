"""Timing of a job by stage: seconds, bytes and documents.

Stages are timed per batch, so that the clock is read at most some hundred times per second.
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
# In the order in which a job runs them.
STAGES: tuple[TimedStage, ...] = get_args(TimedStage)
_END = object()


class StageTime(msgspec.Struct, frozen=True):
    """Time of a stage, and the data processed meanwhile.

    Seconds are summed over workers for stages of units, and wall-clock for stages of the job.
    """

    seconds: float = 0.0
    bytes: int = 0
    documents: int = 0

    def __add__(self, other: "StageTime") -> "StageTime":
        return StageTime(self.seconds + other.seconds, self.bytes + other.bytes, self.documents + other.documents)


def add_stage_times(first: Mapping[str, StageTime], second: Mapping[str, StageTime]) -> dict[str, StageTime]:
    """Add two timings, in the order of ``STAGES``, unknown stages last."""
    names = [*STAGES, *sorted({*first, *second} - {*STAGES})]
    none = StageTime()
    return {name: first.get(name, none) + second.get(name, none) for name in names if name in first or name in second}


@final
class Stopwatch:
    """Thread-safe accumulator of stage times.

    Concurrent stages count separately, so their sum may exceed the wall-clock time.
    """

    def __init__(self) -> None:
        self._stage_times: dict[str, StageTime] = {}
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: TimedStage, size: int = 0, documents: int = 0) -> Iterator[None]:
        """Time the body of a ``with`` statement, also if it fails.

        Args:
            stage: name of the stage.
            size: number of bytes processed.
            documents: number of documents processed.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began, size, documents)

    def time_each(self, stage: TimedStage, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, timing how long it takes to get each but not to process it."""
        source = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(source, _END)
            finally:
                self.add(stage, time.perf_counter() - began)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # _END is never yielded

    def add(self, stage: TimedStage, seconds: float, size: int = 0, documents: int = 0) -> None:
        """Add seconds, bytes and documents to a stage."""
        more = StageTime(seconds, size, documents)
        with self._lock:
            self._stage_times[stage] = self._stage_times.get(stage, StageTime()) + more

    def get_stage_times(self) -> dict[str, StageTime]:
        """Return the time of each stage so far, in the order of ``STAGES``."""
        with self._lock:
            return add_stage_times(self._stage_times, {})
