"""Accelerate: which share a process reads, what divides the loss, and checkpoints that are whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import newest, step_of, written_aside
from batchloom.adapters.requirements import ACCELERATE, require
from batchloom.batches.loader import Loader
from batchloom.core.errors import StateError, TrainError
from batchloom.plan.ranks import rows_of_rank


def attach(accelerator: Any, loader: Loader) -> None:
    """Have a loader's place saved and loaded with the accelerator's state; every process calls it, once.

    The loader reads this process's share by itself: it is not given to ``accelerator.prepare``, which would deal its
    batches anew. :func:`save` keeps its place before the step it is given, whatever was fetched ahead;
    ``accelerator.save_state`` alone, or a stream, that after the batch given last.

    Args:
        accelerator: an ``accelerate.Accelerator`` whose ``gradient_accumulation_steps`` are the passes of a step.
        loader: made with ``rank=accelerator.process_index, world_size=accelerator.num_processes`` and a
            ``micro_batch_size``.

    Raises:
        MissingDependencyError: accelerate is older than this needs.
        TrainError: the loader reads another share, or its rows do not make so many passes (says how many they make).
    """
    require(ACCELERATE)
    spec = loader.spec
    place, wanted = (
        (spec.rank, spec.world_size),
        (accelerator.process_index, accelerator.num_processes),
    )
    if place != wanted:
        raise TrainError(
            f"The loader reads the share of rank {place[0]} of {place[1]} and this is process {wanted[0]} of "
            f"{wanted[1]}: make it after the Accelerator, with rank=accelerator.process_index and "
            "world_size=accelerator.num_processes."
        )
    passes, rows = passes_of(loader), rows_of(loader)
    if accelerator.gradient_accumulation_steps != passes:
        raise TrainError(
            f"A step takes {passes} passes of {rows // passes} of this process's {rows} rows, and the Accelerator was "
            f" made with gradient_accumulation_steps={accelerator.gradient_accumulation_steps}: the "
            f"optimizer would step elsewhere. Give it {passes}, or the loader another micro_batch_size."
        )
    kept = _Place(loader)
    _PLACES.setdefault(accelerator, []).append(kept)
    accelerator.register_for_checkpointing(kept)
    require_agreement(loader)


@final
class _Place:
    """What Accelerate keeps of a loader.

    Attributes:
        step: the steps trained, while :func:`save` or :func:`load_newest` are at it; None where nobody says.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """The loader's place before the step."""
        if self.step is None or self._loader.streamed:
            return self._loader.state_dict()
        return self._loader.state_at(self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there.

        Raises:
            StateError: it is of another plan or store, or of another step than the checkpoint's name says.
        """
        self._loader.load_state_dict(state)
        if self.step not in (None, there := self._loader.next_step):
            raise StateError(
                f"checkpoint-{self.step} holds the loader's place before step {there}: it was renamed, or saved with "
                "another number of steps than were trained. Go on from another checkpoint."
            )


# Of each accelerator: it has no public way to ask for what was registered.
_PLACES: WeakKeyDictionary[Any, list[_Place]] = WeakKeyDictionary()


@contextmanager
def _at(accelerator: Any, step: int) -> Iterator[None]:
    """Have the places of an accelerator be those before a step."""
    places = _PLACES.get(accelerator, [])
    for place in places:
        place.step = step
    try:
        yield
    finally:
        for place in places:
            place.step = None


def rows_of(loader: Loader) -> int:
    """Rows of this process's batches."""
    size, spec = loader.plan.spec.global_batch_size, loader.spec
    return rows_of_rank(size, spec.world_size, spec.micro_batch_size, spec.uneven)


def passes_of(loader: Loader) -> int:
    """Forward passes of a step: what ``gradient_accumulation_steps`` has to be."""
    return rows_of(loader) // (loader.spec.micro_batch_size or rows_of(loader))


def scale(accelerator: Any) -> int:
    """What a loss summed over the step's trained tokens and divided by their number is multiplied by.

    Accelerate divides it by the accumulation steps, and averages gradients over processes, where the sum is meant.
    """
    return int(accelerator.gradient_accumulation_steps * accelerator.num_processes)


def save(accelerator: Any, folder: Path, step: int) -> Path:
    """Write ``folder/checkpoint-N`` after N steps, whole or not at all; every process calls it.

    The loader's place is that before step N.

    Raises:
        OutputError: the folder cannot be written.
    """
    with written_aside(folder, step) as aside, _at(accelerator, step):
        accelerator.save_state(str(aside))
    return folder / f"checkpoint-{step}"


def load_newest(accelerator: Any, folder: Path) -> int:
    """Go on from the newest whole checkpoint of a folder, or from the start; the steps done.

    Call it behind ``accelerator.prepare`` and :func:`attach`.

    Raises:
        StateError: it is of another plan or store (names each field that differs), or its loader stands before another
            step than its name says.
    """
    found = newest(folder)
    if found is None:
        return 0
    step = step_of(found)
    with _at(accelerator, step):
        accelerator.load_state(str(found))
    return step
