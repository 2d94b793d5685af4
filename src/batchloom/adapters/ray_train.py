"""Ray Train: a worker's share, and loader state in Ray's checkpoints.

Inside the function that a ``TorchTrainer`` runs on each worker no translation is needed. torch.distributed is
initialized there, so a ``Loader`` finds its rank and ``adapters.agreement`` can compare ranks. With a trainer without
torch.distributed, use ``Loader(..., rank=rank, world_size=world_size)`` with the values of
:func:`get_rank_and_world_size`, and ``require_agreement(loader, world_size=world_size)``.

When a worker fails, or their number changes, Ray restarts all of them from the newest checkpoint. The training after
it is discarded with its weights, and its sequences are read again by the new set of workers. So the final weights have
seen every sequence once.
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
    """Return the rank of this worker and the number of workers.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this process is not a worker of Ray Train.
    """
    context = _import_ray_train().get_context()
    return context.get_world_rank(), context.get_world_size()


def report_step(metrics: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
    """Report a step and a checkpoint to Ray; all workers call it after the same step.

    It returns when the checkpoint is stored.

    Args:
        metrics: as ``ray.train.report`` takes them.
        state: state to resume from: of the model, the optimizer and the ``Loader``; tensors and plain values.
            Only that of the first worker is stored. So gather the full state of a sharded model before
            (``torch.distributed.checkpoint.state_dict.get_state_dict`` with ``full_state_dict=True``): the parts of
            other workers are lost. None on all workers makes no checkpoint.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this process is not a worker of Ray Train.
    """
    train = _import_ray_train()
    if state is None or get_rank_and_world_size()[0]:
        train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(dict(state), Path(folder) / _STATE_FILE)
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder))


def load_restored_state() -> dict[str, Any] | None:
    """Return the newest checkpoint's state, on the CPU; None at the start of a run.

    Raises:
        MissingDependencyError: Ray is not installed, or too old.
        TrainError: this process is not a worker of Ray Train.
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
                "batchloom.adapters.ray_train.report_step. Read it as it was written, with "
                "ray.train.get_checkpoint()."
            )
        return _read_state(file, checkpoint.path)


def _read_state(file: Path, checkpoint_path: str) -> dict[str, Any]:
    """Return the state in a file; ``checkpoint_path`` is for error messages."""
    try:
        # With weights_only a checkpoint cannot run code.
        state = torch.load(file, map_location="cpu", weights_only=True)
    # Errors of torch for truncated or overwritten files.
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        message = " ".join(str(error).split())[:300]
        raise StateError(
            f"{_STATE_FILE} of the checkpoint {checkpoint_path} cannot be read ({type(error).__name__}: {message}): "
            "it is damaged. Start a run with another name (RunConfig) from the state of an earlier checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise StateError(
            f"{_STATE_FILE} of the checkpoint {checkpoint_path} holds {quote_value(state)}, not a state by name: it "
            "was changed."
        )
    return state


def _import_ray_train() -> Any:
    """Import Ray Train and check that this process is one of its workers."""
    require_installed(TORCH, RAY, PANDAS)
    import ray.train

    try:
        ray.train.get_context().get_world_size()
    except RuntimeError as error:
        raise TrainError(
            "This process is not a worker of Ray Train. Call this in the function given to "
            "TorchTrainer(train_loop_per_worker=...)."
        ) from error
    return ray.train
