"""What a loader asks of a stream: its steps in order, and where its lanes stand between them."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, final, runtime_checkable

from batchloom.batches.assembly import BatchSpec, TokenReader
from batchloom.core.errors import PlanError, SettingsError
from batchloom.plan import PlanSpec
from batchloom.plan.packing import Rows

T = TypeVar("T")


class StepFeed(Protocol):
    """The steps of one rank, taken one after the other."""

    def take(self, step: int) -> tuple[TokenReader, Rows]:
        """The rows of a step, and what reads their tokens."""
        ...

    def done(self, step: int) -> None:
        """Say that the batch of a step that was taken is made; steps are done in order."""
        ...

    def cursors(self, step: int) -> Mapping[int, Any]:
        """Where the lanes of the rank stand before a step that was taken, or is the next one."""
        ...

    def tokens(self, step: int) -> int:
        """Tokens of the rank's rows of a step that was taken."""
        ...

    def close(self) -> None:
        """Let go of what reads the input."""
        ...


@runtime_checkable
class RawStream(Protocol):
    """Raw input in a fixed order, as :func:`batchloom.stream` gives it."""

    @property
    def spec(self) -> PlanSpec:
        """Settings of the order."""
        ...

    @property
    def steps(self) -> int:
        """Steps of the run."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the order."""
        ...

    @property
    def origin(self) -> str:
        """Where the data comes from, as log lines say it."""
        ...

    @property
    def control(self) -> Mapping[str, int]:
        """The ids of control tokens."""
        ...

    @property
    def processor(self) -> Mapping[str, Any] | None:
        """The state of what makes features of images and audio; None where none are read."""
        ...

    def begin(self, rank: int, world_size: int) -> Mapping[int, Any]:
        """Where the lanes of a rank begin."""
        ...

    def open(self, rank: int, world_size: int, cursors: Mapping[int, Any]) -> StepFeed:
        """The steps of a rank, from where its lanes stand."""
        ...

    def state(self, step: int, cursors: Mapping[int, Any]) -> dict[str, Any]:
        """A step and where the lanes of a rank stand, as plain JSON values."""
        ...

    def resume(self, state: Mapping[str, Any], rank: int, world_size: int) -> tuple[int, Mapping[int, Any]]:
        """The step of a state, and where the lanes of a rank stand."""
        ...


@final
class StreamCursor:
    """A loader's place in a stream.

    Attributes:
        stream: what is read.
        loaded: where the lanes of the rank stood in a state that was loaded; None where none was.
    """

    def __init__(self, stream: RawStream, rank: int, world_size: int) -> None:
        self.stream, self._ranks = stream, (rank, world_size)
        self._begin = stream.begin(rank, world_size)
        self.loaded: Mapping[int, Any] | None = None

    def open(self, *, resumed: bool) -> StepFeed:
        """The steps from the beginning, or from the state that was loaded."""
        begin = self.loaded if resumed and self.loaded is not None else self._begin
        return self.stream.open(*self._ranks, begin)

    def state(self, step: int, steps: StepFeed | None, *, resumed: bool) -> dict[str, Any]:
        """The state before a step: of an iteration, or where the next one begins."""
        if steps is not None:
            return self.stream.state(step, steps.cursors(step))
        begin = self.loaded if resumed and self.loaded is not None else self._begin
        return self.stream.state(step, begin)

    def resume(self, state: Mapping[str, Any]) -> int:
        """Go on at a state; its step."""
        step, self.loaded = self.stream.resume(state, *self._ranks)
        return step


def open_stream_cursor(stream: RawStream, spec: BatchSpec) -> StreamCursor:
    """A process's place in a stream.

    Raises:
        SettingsError: rows are to be dealt otherwise than to the lanes they belong to.
    """
    if spec.balance:
        raise SettingsError(
            ["balance: the rows of a stream belong to lanes, which each rank reads by itself; leave it out"]
        )
    placement = spec.mesh.get_placement(spec.rank, spec.world_size)
    return StreamCursor(stream, placement.rank, placement.world_size)


def release_step(steps: StepFeed, step: int, item: T) -> T:
    """What was made of a step, which is done with it."""
    steps.done(step)
    return item


def random_access_error(step: str) -> PlanError:
    """What is said where a step of a stream is asked for on its own."""
    return PlanError(
        f"Step {step} of a stream cannot be asked for on its own: its steps come one after the other, and a state "
        "goes on at any of them. Any step of prepared data can be: batchloom prepare, or stream(keep=FOLDER) and a "
        "plan over that store."
    )
