"""Position of a loader: its iterations, and the protocols of streams it reads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from batchloom.batches.assembly.array_filling import TokenReader
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.core.errors import PlanError, SettingsError
from batchloom.plan import PlanSpec
from batchloom.plan.packing import Rows


class StepFeed(Protocol):
    """The steps of one rank, taken in order."""

    def take(self, step: int) -> tuple[TokenReader, Rows]:
        """Return the reader and the rows of a step."""

    def done(self, step: int) -> None:
        """Mark the batch of a taken step as made; steps are done in order."""

    def cursors(self, step: int) -> Mapping[int, Any]:
        """Return the rank's lane positions before a step that was taken or is next."""

    def tokens(self, step: int) -> int:
        """Return the tokens of the rank's rows of a taken step."""

    def close(self) -> None:
        """Close the readers of the input."""


@runtime_checkable
class RawStream(Protocol):
    """Raw input in a fixed order, as :func:`batchloom.stream` returns it."""

    @property
    def spec(self) -> PlanSpec:
        """Settings of the data order."""

    @property
    def steps(self) -> int:
        """Number of steps of the run."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data order."""

    @property
    def origin(self) -> str:
        """Origin of the data, as in log lines."""

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of the control tokens."""

    @property
    def processor(self) -> Mapping[str, Any] | None:
        """State of the media processor; None if no media are read."""

    def begin(self, rank: int, world_size: int) -> Mapping[int, Any]:
        """Return the start positions of a rank's lanes."""

    def open(self, rank: int, world_size: int, cursors: Mapping[int, Any]) -> StepFeed:
        """Return the steps of a rank, from its lane positions."""

    def state(self, step: int, cursors: Mapping[int, Any]) -> dict[str, Any]:
        """Return a step and a rank's lane positions as plain JSON values."""

    def resume(self, state: Mapping[str, Any], rank: int, world_size: int) -> tuple[int, Mapping[int, Any]]:
        """Return the step of a state, and the rank's lane positions."""


@final
class StreamCursor:
    def __init__(self, stream: RawStream, rank: int, world_size: int) -> None:
        self.stream = stream
        self._ranks = (rank, world_size)
        self._begin = stream.begin(rank, world_size)
        self.loaded: Mapping[int, Any] | None = None

    def open(self, *, resumed: bool) -> StepFeed:
        return self.stream.open(*self._ranks, self._get_start(resumed=resumed))

    def state(self, step: int, steps: StepFeed | None, *, resumed: bool) -> dict[str, Any]:
        """Return the state before a step, of an iteration or of the next one."""
        if steps is not None:
            return self.stream.state(step, steps.cursors(step))
        return self.stream.state(step, self._get_start(resumed=resumed))

    def _get_start(self, *, resumed: bool) -> Mapping[int, Any]:
        return self.loaded if resumed and self.loaded is not None else self._begin

    def resume(self, state: Mapping[str, Any]) -> int:
        step, self.loaded = self.stream.resume(state, *self._ranks)
        return step


def open_stream_cursor(stream: RawStream, spec: BatchSpec) -> StreamCursor:
    if spec.balance:
        raise SettingsError(
            ["balance: the rows of a stream belong to lanes, which each rank reads by itself; leave it out"]
        )
    placement = spec.mesh.get_placement(spec.rank, spec.world_size)
    return StreamCursor(stream, placement.rank, placement.world_size)


def make_random_access_error(step: str) -> PlanError:
    return PlanError(
        f"Step {step} of a stream cannot be read on its own: the steps of a stream are read in order, from the start "
        "or from a state. Prepared data has any step: use batchloom prepare, or stream(keep=FOLDER) and a plan over "
        "that store."
    )


@dataclass(slots=True, eq=False)
class Iteration:
    next_step: int
    batch_count: int = 0
    steps: StepFeed | None = None


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

    def begin(self, first: int, steps: StepFeed | None = None) -> Iteration:
        run = Iteration(first, steps=steps)
        self._running.append(run)
        return run

    def record_batch(self, run: Iteration, step: int) -> None:
        run.batch_count += 1
        run.next_step = step + 1
        self._furthest_step = max(self._furthest_step, run.next_step)
        self._latest = run
        # Reading only the first batch of a resumed loader does not use up the resume.
        self.resumed = self.resumed and run.batch_count == 1
        self.untracked = self.untracked and run.batch_count == 1

    def walk(self, first: int, has_step: Callable[[int], bool]) -> Iterator[int]:
        """Yield step numbers from ``first`` on, recorded as if their batches were given."""
        run = self.begin(first)
        step = first
        try:
            while has_step(step):
                self.record_batch(run, step)
                yield step
                step += 1
            self.resumed = False
        finally:
            self.end(run)

    def end(self, run: Iteration) -> None:
        self._running.remove(run)
        if run.batch_count <= 1 and self._latest is run and self._running:
            self._latest = self._running[-1]
