"""Where the iterations of a loader stand: what they gave, and where the next one begins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from batchloom.batches.loading.stream_steps import StepFeed


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over a loader.

    Attributes:
        next_step: the step after the one it gave last.
        batch_count: batches it gave.
        steps: of a stream, what it takes them of.
    """

    next_step: int
    batch_count: int = 0
    steps: StepFeed | None = None


@final
class Iterations:
    """The iterations of a loader that go on, and the last that gave a batch.

    Attributes:
        resumed: whether the next one begins at the step of a loaded state.
        untracked: True after workers of a DataLoader gave batches; the position is then unknown.
    """

    def __init__(self) -> None:
        # Of the next iteration the first step, and the one after the last that any has given.
        self._start = self._furthest_step = 0
        self.resumed = self.untracked = False
        self._running: list[Iteration] = []
        self._latest: Iteration | None = None

    @property
    def next_step(self) -> int:
        """The step the next iteration begins with."""
        return self._start if self.resumed else 0

    @property
    def position(self) -> int:
        """The step after the batch given last."""
        return self._latest.next_step if self._latest else self.next_step

    @property
    def steps(self) -> StepFeed | None:
        """What the iteration that gave the last batch takes its steps of; None but of a stream."""
        return self._latest.steps if self._latest else None

    def first_step_not_made(self, ahead: int) -> int:
        """The first step that is not made yet where each iteration makes so many ahead."""
        return max([self._furthest_step, *(run.next_step + ahead for run in list(self._running))])

    def load(self, step: int) -> None:
        """Begin the next iteration, and only that, at a step."""
        self._start, self.resumed, self._latest, self._furthest_step = step, True, None, step
        self.untracked = False

    def begin(self, first: int, steps: StepFeed | None = None) -> Iteration:
        """Note that an iteration begins."""
        run = Iteration(first, steps=steps)
        self._running.append(run)
        return run

    def record_batch(self, run: Iteration, step: int) -> None:
        """Note that an iteration gives the batch of a step."""
        run.batch_count += 1
        run.next_step = step + 1
        self._furthest_step = max(self._furthest_step, run.next_step)
        self._latest = run
        # Whoever only looks at the first batch of a resumed loader has not resumed it.
        self.resumed = self.resumed and run.batch_count == 1
        self.untracked = self.untracked and run.batch_count == 1

    def walk(self, first: int, has_step: Callable[[int], bool]) -> Iterator[int]:
        """Give the numbers of the steps from one on, noted as if their batches were given."""
        run, step = self.begin(first), first
        try:
            while has_step(step):
                self.record_batch(run, step)
                yield step
                step += 1
            self.resumed = False
        finally:
            self.end(run)

    def end(self, run: Iteration) -> None:
        """Note that an iteration has ended."""
        self._running.remove(run)
        if run.batch_count <= 1 and self._latest is run and self._running:
            self._latest = self._running[-1]
