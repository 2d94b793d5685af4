"""Protocols of the streams that a loader reads."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from batchloom.batches.assembly.array_filling import TokenReader
from batchloom.core.errors import PlanError
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


def make_random_access_error(step: str) -> PlanError:
    return PlanError(
        f"Step {step} of a stream cannot be read on its own: the steps of a stream are read in order, from the start "
        "or from a state. Prepared data has any step: use batchloom prepare, or stream(keep=FOLDER) and a plan over "
        "that store."
    )
