"""Ray Train: which share a worker has, and how its state goes into Ray's checkpoints and comes back.

Inside the function that a ``TorchTrainer`` runs on each worker nothing has to be translated: torch.distributed is
ready there, so that a ``Loader`` knows its rank, and ``adapters.agreement`` can ask the others. With a trainer that
starts no torch.distributed, ``Loader(..., rank=rank, world_size=world_size)`` of
:func:`get_rank_and_world_size` says the same, and ``require_agreement(loader, world_size=world_size)`` that it is
all of them.

When a worker is lost, or their number changes, Ray starts all of them anew from the newest checkpoint: what was
trained after it is gone with the weights that saw it, and its sequences are given again, among the workers there are
then. So in what the last weights have seen, every sequence is once.
"""

from batchloom.adapters.requirements import PANDAS, RAY, TORCH, require_installed

require_installed(TORCH)

import tempfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from batchloom.core.errors import StateError, TrainError
from batchloom.core.settings import quote_value

_STATE_FILE = "batchloom.pt"


def get_rank_and_world_size() -> tuple[int, int]:
    """Rank of this worker, and how many there are.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this is no worker of Ray Train.
    """
    context = _import_ray_train().get_context()
    return context.get_world_rank(), context.get_world_size()


def report_step(metrics: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
    """Tell Ray of a step, and give it a checkpoint; every worker calls it, between the same two steps.

    It returns when the checkpoint is kept.

    Args:
        metrics: as ``ray.train.report`` takes them.
        state: what a run goes on with: of the model, the optimizer and the ``Loader``; tensors and plain values.
            That of the first worker alone is kept, so of a sharded model gather the whole before
            (``torch.distributed.checkpoint.state_dict.get_state_dict`` with ``full_state_dict=True``): parts of
            other workers are lost. None on all of them makes no checkpoint.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this is no worker of Ray Train.
    """
    train = _import_ray_train()
    if state is None or get_rank_and_world_size()[0]:
        train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(dict(state), Path(folder) / _STATE_FILE)
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder))


def load_restored_state() -> dict[str, Any] | None:
    """The state to go on with, on the CPU: that of the newest checkpoint; None at the start of a run.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this is no worker of Ray Train.
        StateError: the checkpoint was not made by :func:`report_step`, or is damaged.
    """
    checkpoint = _import_ray_train().get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        file = Path(folder) / _STATE_FILE
        if not file.is_file():
            raise StateError(
                f"The checkpoint {checkpoint.path} holds no {_STATE_FILE}: it was not made by "
                "batchloom.adapters.ray_train.report. Read it as it was written, with ray.train.get_checkpoint()."
            )
        return _read_state(file, checkpoint.path)


def _read_state(file: Path, checkpoint_path: str) -> dict[str, Any]:
    """The state in a file of a checkpoint.

    Args:
        file: as it lies here.
        checkpoint_path: of the checkpoint, as Ray names it.

    Raises:
        StateError: it is damaged.
    """
    try:
        # No code is run by what a checkpoint holds.
        state = torch.load(file, map_location="cpu", weights_only=True)
    # What torch raises for files that are cut off or overwritten.
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        message = " ".join(str(error).split())[:300]
        raise StateError(
            f"{_STATE_FILE} of the checkpoint {checkpoint_path} cannot be read ({type(error).__name__}: {message}): "
            "it is damaged. "
            "Begin a run of another name (RunConfig) from the state of an earlier checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise StateError(
            f"{_STATE_FILE} of the checkpoint {checkpoint_path} holds {quote_value(state)}, no state by name: it "
            "was changed."
        )
    return state


def _import_ray_train() -> Any:
    """Ray Train, inside one of its workers."""
    require_installed(TORCH, RAY, PANDAS)
    import ray.train  # noqa: PLC0415 - takes seconds

    try:
        ray.train.get_context().get_world_size()
    except RuntimeError as error:
        raise TrainError(
            "This process is no worker of Ray Train. Call this in the function that is given to "
            "TorchTrainer(train_loop_per_worker=...)."
        ) from error
    return ray.train
