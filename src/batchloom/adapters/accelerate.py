"""Accelerate: which share a process reads, what divides the loss, and checkpoints that are whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary, proxy

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import newest, step_of, written_aside
from batchloom.adapters.requirements import ACCELERATE, require
from batchloom.batches.loader import Loader
from batchloom.batches.share import share_of_run
from batchloom.core.errors import StateError, TrainError


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
        PlanError: edits change how many passes a step takes, and the Accelerator does as many in all.
        TrainError: the loader reads another share, or its rows do not make so many passes (says how many they make).
    """
    require(ACCELERATE)
    spec = loader.spec
    read, wanted = (
        (spec.rank, spec.world_size),
        (accelerator.process_index, accelerator.num_processes),
    )
    if read != wanted:
        raise TrainError(
            f"The loader reads the share of rank {read[0]} of {read[1]} and this is process {wanted[0]} of "
            f"{wanted[1]}: make it after the Accelerator, with rank=accelerator.process_index and "
            "world_size=accelerator.num_processes."
        )
    kept = _Place(accelerator, loader)
    kept.refuse_other_steps()
    _PLACES.setdefault(accelerator, []).append(kept)
    accelerator.register_for_checkpointing(kept)
    require_agreement(loader)


@final
class _Place:
    """What Accelerate keeps of a loader, whose steps are the accelerator's also by the edits that a checkpoint brings.

    Attributes:
        step: the steps trained, while :func:`save` or :func:`load_newest` are at it; None where nobody says.
    """

    def __init__(self, accelerator: Any, loader: Loader) -> None:
        # Weakly: what is kept of an accelerator is kept as long as that is.
        self._accelerator, self._loader = proxy(accelerator), loader
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
            TrainError: by its edits the steps are others than the accelerator's.
        """
        self._loader.load_state_dict(state)
        if self.step not in (None, there := self._loader.next_step):
            raise StateError(
                f"checkpoint-{self.step} holds the loader's place before step {there}: it was renamed, or saved with "
                "another number of steps than were trained. Go on from another checkpoint."
            )
        self.refuse_other_steps()

    def refuse_other_steps(self) -> None:
        """Refuse steps of other passes than the accelerator does."""
        share = share_of_run(self._loader, self._loader.next_step)
        if (asked := self._accelerator.gradient_accumulation_steps) != share.passes:
            raise TrainError(
                f"A step takes {share.passes} passes of {share.micro_batch_size} of this process's {share.rows} rows, "
                f"and the Accelerator was made with gradient_accumulation_steps={asked}: the optimizer would step "
                f"elsewhere. Give it {share.passes}, or the loader another micro_batch_size."
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
        PlanError, TrainError: by its edits the steps are others than the accelerator's.
    """
    found = newest(folder)
    if found is None:
        return 0
    step = step_of(found)
    with _at(accelerator, step):
        accelerator.load_state(str(found))
    return step
