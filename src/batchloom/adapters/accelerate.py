"""Accelerate: which share a process reads, what divides the loss, and checkpoints that are whole."""

from pathlib import Path
from typing import Any, final

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import newest, step_of, written_aside
from batchloom.adapters.requirements import ACCELERATE, require
from batchloom.batches.loader import Loader
from batchloom.batches.share import share_of_run
from batchloom.core.errors import TrainError


def attach(accelerator: Any, loader: Loader) -> None:
    """Have a loader's place saved and loaded with the accelerator's state; every process calls it, once.

    The loader reads this process's share by itself: it is not given to ``accelerator.prepare``, which would deal its
    batches anew. Iterate it directly: its place is that after the batch given last.

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
    place = _Place(accelerator, loader)
    place.refuse_other_steps()
    accelerator.register_for_checkpointing(place)
    require_agreement(loader)


@final
class _Place:
    """A loader's place, whose steps are the accelerator's also by the edits that a checkpoint brings."""

    def __init__(self, accelerator: Any, loader: Loader) -> None:
        self._accelerator, self._loader = accelerator, loader

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self.refuse_other_steps()

    def refuse_other_steps(self) -> None:
        share = share_of_run(self._loader, self._loader.next_step)
        if (asked := self._accelerator.gradient_accumulation_steps) != share.passes:
            raise TrainError(
                f"A step takes {share.passes} passes of {share.micro_batch_size} of this process's {share.rows} rows, "
                f"and the Accelerator was made with gradient_accumulation_steps={asked}: the optimizer would step "
                f"elsewhere. Give it {share.passes}, or the loader another micro_batch_size."
            )


def scale(accelerator: Any) -> int:
    """What a loss summed over the step's trained tokens and divided by their number is multiplied by.

    Accelerate divides it by the accumulation steps, and averages gradients over processes, where the sum is meant.
    """
    return int(accelerator.gradient_accumulation_steps * accelerator.num_processes)


def save(accelerator: Any, folder: Path, step: int) -> Path:
    """Write ``folder/checkpoint-N`` after N steps, whole or not at all; every process calls it.

    Raises:
        OutputError: the folder cannot be written.
    """
    with written_aside(folder, step) as aside:
        accelerator.save_state(str(aside))
    return folder / f"checkpoint-{step}"


def load_newest(accelerator: Any, folder: Path) -> int:
    """Go on from the newest whole checkpoint of a folder, or from the start; the steps done.

    Call it behind ``accelerator.prepare`` and :func:`attach`.

    Raises:
        StateError: it is of another plan or store; names each field that differs.
        PlanError, TrainError: by its edits the steps are others than the accelerator's.
    """
    found = newest(folder)
    if found is None:
        return 0
    accelerator.load_state(str(found))
    return step_of(found)
