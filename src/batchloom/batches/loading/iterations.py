"""Iterations over the batches of a loader, and its position."""

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import final

from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.loading.stream_steps import StepFeed


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over the batches of a loader."""

    next_step: int  # step after the last batch given
    batch_count: int = 0  # number of batches given
    steps: StepFeed | None = None  # what it reads, with a stream


@final
class Iterations:
    """Running iterations of a loader, and the last one that gave a batch.

    Attributes:
        resumed: whether the next iteration begins at the step of a loaded state.
        untracked: True after workers of a DataLoader gave batches; the position is then unknown.
    """

    def __init__(self) -> None:
        # First step of the next iteration, and the step after the last that any iteration has given.
        self._start = self._furthest_step = 0
        self.resumed = self.untracked = False
        self._running: list[Iteration] = []
        self._latest: Iteration | None = None

    @property
    def next_step(self) -> int:
        return self._start if self.resumed else 0

    @property
    def position(self) -> int:
        """Step after the last batch given."""
        return self._latest.next_step if self._latest else self.next_step

    @property
    def steps(self) -> StepFeed | None:
        """Step feed of the iteration that gave the last batch; None without a stream."""
        return self._latest.steps if self._latest else None

    def first_step_not_made(self, ahead: int) -> int:
        """Return the first unmade step if each iteration makes ``ahead`` steps in advance."""
        return max([self._furthest_step, *(run.next_step + ahead for run in list(self._running))])

    def load(self, step: int) -> None:
        """Set the first step of the next iteration only."""
        self._start = step
        self.resumed = True
        self._latest = None
        self._furthest_step = step
        self.untracked = False

    def follow(self, first: int, iter_batches: Callable[[Iteration], Generator[Batch]]) -> Iterator[Batch]:
        """Yield the batches of an iteration, and record each one that is given."""
        run = self._begin(first)
        try:
            with contextlib.closing(iter_batches(run)) as batches:
                for batch in batches:
                    self._record_batch(run, batch.step)
                    yield batch
            self.resumed = False
        finally:
            self._end(run)

    def _begin(self, first: int) -> Iteration:
        run = Iteration(first)
        self._running.append(run)
        return run

    def _record_batch(self, run: Iteration, step: int) -> None:
        run.batch_count += 1
        run.next_step = step + 1
        self._furthest_step = max(self._furthest_step, run.next_step)
        self._latest = run
        # Reading only the first batch of a resumed loader does not use up the resume.
        self.resumed = self.resumed and run.batch_count == 1
        self.untracked = self.untracked and run.batch_count == 1

    def walk(self, first: int, has_step: Callable[[int], bool]) -> Iterator[int]:
        """Yield step numbers from ``first`` on, recorded as if their batches were given."""
        run = self._begin(first)
        step = first
        try:
            while has_step(step):
                self._record_batch(run, step)
                yield step
                step += 1
            self.resumed = False
        finally:
            self._end(run)

    def _end(self, run: Iteration) -> None:
        self._running.remove(run)
        if run.batch_count <= 1 and self._latest is run and self._running:
            self._latest = self._running[-1]
