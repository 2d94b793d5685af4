"""FSDP2: sharded layers, and model, optimizer and loader state in one checkpoint.

Any number of ranks can read a torch.distributed checkpoint, sharded or not. torch stores its index as a pickle:
load only those of people whose code you would run.
"""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from batchloom.adapters.checkpoints import (
    begin_checkpoint,
    commit_checkpoint,
    find_newest_checkpoint,
    parse_checkpoint_step,
    resume_loader,
    unusable_checkpoint_error,
    writing_checkpoint,
)
from batchloom.batches import Loader


def shard_model(model: nn.Module, *, bf16: bool = False) -> None:
    """Shard a model over all ranks with the weights of rank 0; every rank calls it.

    Args:
        model: model on its device; the modules named in its ``_no_split_modules`` are sharded one by one.
        bf16: forward and backward in bfloat16; gradients are summed in float32.
    """
    for weight in (*model.parameters(), *model.buffers()):
        # Without it each rank would shard its own random initialization.
        dist.broadcast(weight.detach(), 0)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    layer_names = set(getattr(model, "_no_split_modules", None) or ())
    for layer in (module for module in model.modules() if type(module).__name__ in layer_names):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def save_fsdp2(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, loader: Loader) -> Path:
    """Write ``folder/checkpoint-N``; every rank calls it.

    If it is killed, earlier checkpoints are unchanged and no incomplete one counts as a checkpoint.

    Args:
        folder: folder of the run, the same for all ranks.
        step: N, the number of steps done.
        model: model, sharded or not.
        optimizer: optimizer of its parameters.
        loader: loader whose state before that step is saved, without prefetched batches.

    Raises:
        OutputError: the folder cannot be written.
    """
    with writing_checkpoint(folder, step) as partial_folder:
        state = _make_checkpoint_state(step, model, optimizer, loader)
        with _silence_single_process_warning():
            state_dict_saver.save(state, checkpoint_id=partial_folder, no_dist=_is_single_process())
    return folder / f"checkpoint-{step}"


def begin_async_save(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer, loader: Loader
) -> Callable[[], Path]:
    """Copy the state that :func:`save_fsdp2` writes, and write it during training.

    Returns:
        Function that waits for the files and renames the checkpoint. Every rank calls it, before the next save and at
        the end.
    """
    partial_folder = begin_checkpoint(folder, step)
    state = _make_checkpoint_state(step, model, optimizer, loader)
    save_future = state_dict_saver.async_save(state, checkpoint_id=partial_folder, no_dist=_is_single_process())

    def finish() -> Path:
        save_future.result()  # type: ignore[union-attr] # only a custom stager returns a response of several futures
        return commit_checkpoint(partial_folder)

    return finish


def load_fsdp2(checkpoint: Path, model: nn.Module, optimizer: Optimizer, loader: Loader) -> int:
    """Resume from a checkpoint on any number of ranks; every rank calls it.

    Returns:
        The number of steps done.

    Raises:
        StateError: the checkpoint belongs to another plan or store (names each field that differs; nothing is changed
            then), its loader is at another step, it belongs to another model or optimizer, or it is damaged.
    """
    step = parse_checkpoint_step(checkpoint)
    checkpoint_state = {"loader": ""}
    _read_checkpoint(checkpoint, checkpoint_state)
    try:
        state = json.loads(checkpoint_state["loader"])
    except (TypeError, ValueError) as error:
        raise unusable_checkpoint_error(checkpoint, error) from error
    steps_done = resume_loader(loader, state, checkpoint.name, step)
    weights, moments = get_state_dict(model, optimizer)
    _read_checkpoint(checkpoint, {"model": weights, "optimizer": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return steps_done


def load_newest_fsdp2(folder: Path, model: nn.Module, optimizer: Optimizer, loader: Loader) -> int:
    """Resume from the newest complete checkpoint, if any, and return the steps done.

    Raises:
        StateError: as :func:`load_fsdp2` does.
    """
    checkpoint = find_newest_checkpoint(folder)
    return load_fsdp2(checkpoint, model, optimizer, loader) if checkpoint else 0


def _make_checkpoint_state(step: int, model: nn.Module, optimizer: Optimizer, loader: Loader) -> dict[str, Any]:
    """Return the state to save; the loader's is a copy that later steps do not change."""
    weights, moments = get_state_dict(model, optimizer)
    loader_state = json.dumps(loader.state_at(step))
    return {"model": weights, "optimizer": moments, "loader": loader_state}


def _read_checkpoint(checkpoint: Path, state: dict[str, Any]) -> None:
    try:
        with _silence_single_process_warning():
            state_dict_loader.load(state, checkpoint_id=checkpoint, no_dist=_is_single_process())
    except CheckpointException as error:
        first_error = next(iter(error.failures.values()))[0]
        raise unusable_checkpoint_error(checkpoint, first_error) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise unusable_checkpoint_error(checkpoint, error) from error


def _is_single_process() -> bool:
    return not dist.is_initialized()


@contextlib.contextmanager
def _silence_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
