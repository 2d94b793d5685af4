"""DeepSpeed: batch sizes that are the loader's, what divides the loss, and the loader's place in its checkpoints.

DeepSpeed's checkpoints are pickles, read without a check: load none from people you would not run code of. The
loader's place in them is plain JSON values.
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
    """Be one of the launcher's processes, or without a launcher a group of one; call it before the loader is made.

    Raises:
        MissingDependencyError: DeepSpeed is missing, or older than this needs.
    """
    require_installed(DEEPSPEED)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at DeepSpeed's import
    import deepspeed  # noqa: PLC0415 - behind the line above

    single_process_env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(single_process_env, MASTER_PORT="0")
    deepspeed.init_distributed()


def make_batch_size_config(loader: Loader) -> dict[str, int]:
    """The three sizes of a DeepSpeed configuration that make the loader's steps, from that on it goes on with.

    Raises:
        PlanError: edits change how many passes a step takes; an engine does as many in all.
    """
    share = make_run_share(loader, loader.next_step)
    return {
        "train_batch_size": share.rows * share.placement.world_size,
        "train_micro_batch_size_per_gpu": share.micro_batch_size,
        "gradient_accumulation_steps": share.passes,
    }


def check_engine(engine: Any, loader: Loader) -> None:
    """Make sure that an engine steps where the loader's steps end, and all ranks read the same; every rank calls it.

    Raises:
        PlanError: edits change how many passes a step takes.
        TrainError: the engine has other sizes, ranks, or reads its data by itself; names what to give.
    """
    if engine.training_dataloader is not None:
        dataset_name = type(engine.training_dataloader.dataset).__name__
        raise TrainError(
            f"deepspeed.initialize was given training_data ({dataset_name}), which "
            "DeepSpeed shuffles and deals by itself: leave training_data out, and iterate the Loader, which reads this "
            "rank's share already."
        )
    _check_gradient_accumulation(engine, loader)
    ranks = loader.share_at(0).placement.world_size
    if engine.dp_world_size != ranks:
        raise TrainError(
            f"The engine has {engine.dp_world_size} data-parallel ranks and the loader {ranks}: "
            "make the loader after batchloom.adapters.deepspeed.join()."
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
            f"The engine has {differences}: its steps would not be those of the loader. Give its configuration "
            "batchloom.adapters.deepspeed.make_batch_size_config(loader)."
        )


def loss_multiplier(engine: Any) -> int:
    """What a loss summed over the step's trained tokens and divided by their number is multiplied by.

    DeepSpeed divides it by the accumulation steps, and averages gradients over ranks, where the sum is meant.
    """
    return int(engine.gradient_accumulation_steps() * engine.dp_world_size)


def save_engine_checkpoint(engine: Any, folder: Path, step: int, loader: Loader) -> None:
    """Have DeepSpeed write ``folder/checkpoint-N`` after N steps, with the loader's place; every rank calls it.

    DeepSpeed names it in ``folder/latest`` when all is written.
    """
    client_state = {_STATE_KEY: {"step": step, "loader": loader.state_at(step)}}
    engine.save_checkpoint(str(folder), tag=f"checkpoint-{step}", client_state=client_state)


def load_newest_engine_checkpoint(engine: Any, folder: Path, loader: Loader) -> int:
    """Go on from the checkpoint that ``folder/latest`` names, or from the start; the steps done.

    ZeRO's part of it is read by as many ranks as wrote it; for others see DeepSpeed's universal checkpoints.

    Raises:
        StateError: it is of another plan or store (names each field that differs), was saved without the loader, or its
            loader stands before another step than the checkpoint says.
        PlanError, TrainError: by its edits the steps are others than the engine's.
    """
    if not (folder / "latest").is_file():
        return 0
    path, client_state = engine.load_checkpoint(str(folder))
    if path is None:
        raise StateError(
            f"{folder}/latest names {(folder / 'latest').read_text().strip()}, which DeepSpeed cannot load: write the "
            "name of a whole checkpoint of the folder into it."
        )
    if _STATE_KEY not in client_state:
        raise StateError(
            f"{path} holds no place of a loader: it was not saved by batchloom.adapters.deepspeed.save. The weights "
            "can be had from it; which data the run has seen cannot."
        )
    steps_done = resume_loader(loader, client_state[_STATE_KEY]["loader"], str(path), client_state[_STATE_KEY]["step"])
    _check_gradient_accumulation(engine, loader)
    return steps_done
