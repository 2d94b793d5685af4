"""DeepSpeed: batch sizes, loss scaling, and checkpoints with the loader's state.

DeepSpeed's checkpoints are pickles, which are read unchecked: load only those of people whose code you would run.
The loader's state in them is plain JSON values.
"""

from batchloom.adapters.requirements import DEEPSPEED, TORCH, require_installed

require_installed(TORCH)

import os
from pathlib import Path
from typing import Any

import torch

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import resume_loader
from batchloom.batches import Loader
from batchloom.batches.loading import make_run_share
from batchloom.core.errors import StateError, TrainError

_STATE_KEY = "batchloom"


def init_process_group() -> None:
    """Join the launcher's processes, or a group of one, before the loader is made.

    Raises:
        MissingDependencyError: DeepSpeed is missing, or older than required.
    """
    require_installed(DEEPSPEED)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it on import.
    import deepspeed

    # DeepSpeed compiles this operator for CPUs here, which takes minutes, and uses it only for inference.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    single_process_env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(single_process_env, MASTER_PORT="0")
    deepspeed.init_distributed()


def make_batch_size_config(loader: Loader) -> dict[str, int]:
    """Return the three batch sizes of a DeepSpeed config for the loader's next steps.

    Raises:
        PlanError: edits change the number of passes per step, which an engine cannot do.
    """
    share = make_run_share(loader, loader.next_step)
    return {
        "train_batch_size": share.rows * share.placement.world_size,
        "train_micro_batch_size_per_gpu": share.micro_batch_size,
        "gradient_accumulation_steps": share.passes,
    }


def check_engine(engine: Any, loader: Loader) -> None:
    """Check that engine and loader have the same steps and ranks; all ranks call it.

    Raises:
        PlanError: edits change the number of passes per step.
        TrainError: the engine has other sizes or ranks, or reads its own data; the error names what to pass.
    """
    if engine.training_dataloader is not None:
        dataset_name = type(engine.training_dataloader.dataset).__name__
        raise TrainError(
            f"deepspeed.initialize was given training_data ({dataset_name}), which DeepSpeed shuffles and "
            "distributes by itself: leave training_data out, and iterate the Loader, which already reads this rank's "
            "share."
        )
    _check_gradient_accumulation(engine, loader)
    ranks = loader.feed.share_at(0).placement.world_size
    if engine.dp_world_size != ranks:
        raise TrainError(
            f"The engine has {engine.dp_world_size} data-parallel ranks and the loader has {ranks}: make the loader "
            "after batchloom.adapters.deepspeed.init_process_group()."
        )
    require_agreement(loader)


def _check_gradient_accumulation(engine: Any, loader: Loader) -> None:
    expected = make_batch_size_config(loader)
    actual = {
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }
    if actual != expected:
        differences = ", ".join(
            f"{name} {actual[name]} instead of {expected[name]}" for name in expected if actual[name] != expected[name]
        )
        raise TrainError(
            f"The engine has {differences}: its steps would not match the loader's. Add "
            "batchloom.adapters.deepspeed.make_batch_size_config(loader) to its configuration."
        )


def loss_multiplier(engine: Any) -> int:
    """Return the factor for a loss that is divided by the step's trained tokens.

    DeepSpeed divides it by the accumulation steps and averages gradients over ranks, where a sum is required.
    """
    return int(engine.gradient_accumulation_steps() * engine.dp_world_size)


def save_engine_checkpoint(engine: Any, folder: Path, step: int, loader: Loader) -> None:
    """Write ``folder/checkpoint-N`` with the loader's state; every rank calls it.

    DeepSpeed names it in ``folder/latest`` when it is complete.
    """
    client_state = {_STATE_KEY: {"step": step, "loader": loader.state_at(step)}}
    engine.save_checkpoint(str(folder), tag=f"checkpoint-{step}", client_state=client_state)


def load_newest_engine_checkpoint(engine: Any, folder: Path, loader: Loader) -> int:
    """Resume from the checkpoint in ``folder/latest``, if any; return the steps done.

    ZeRO's part of it needs as many ranks as wrote it; for other numbers see DeepSpeed's universal checkpoints.

    Raises:
        StateError: the checkpoint belongs to another plan or store (names each field that differs), was saved without
            the loader, or its loader is at another step.
        PlanError, TrainError: with its edits, the passes per step differ from the engine's.
    """
    if not (folder / "latest").is_file():
        return 0
    path, client_state = engine.load_checkpoint(str(folder))
    if path is None:
        raise StateError(
            f"{folder}/latest names {(folder / 'latest').read_text().strip()}, which DeepSpeed cannot load: write "
            "the name of a complete checkpoint of the folder into it."
        )
    if _STATE_KEY not in client_state:
        raise StateError(
            f"{path} holds no loader state: it was not saved by batchloom.adapters.deepspeed.save_engine_checkpoint. "
            "Its weights can be loaded, but it does not record which data the run has seen."
        )
    steps_done = resume_loader(loader, client_state[_STATE_KEY]["loader"], str(path), client_state[_STATE_KEY]["step"])
    _check_gradient_accumulation(engine, loader)
    return steps_done
