"""Gradient of one step, as the optimizer receives it; runs under torchrun too."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from batchloom.adapters.rank_group import RankGroup, join_ranks
from batchloom.train import (
    RunFolder,
    RunLog,
    make_settings,
    run_optimizer_step,
    set_up_run,
)
from train.runs import BASE_SETTINGS


def compute_first_gradient(data, changes):
    """Return loss, trained tokens and unclipped gradients by name of the first step."""
    with join_ranks("cpu") as ranks:
        return compute_rank_gradient(ranks, data, changes)


def compute_rank_gradient(ranks: RankGroup, data, changes):
    settings = {**BASE_SETTINGS, "optim": {"clip": 1e9}, **changes}
    run = set_up_run(Path(data), make_settings(settings, {}), RunFolder(Path()), ranks, RunLog(None, print))
    gradients = {}
    run.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: w.grad.clone() for n, w in run.model.named_parameters()})
    )
    loss, _, trained = run_optimizer_step(run, run.loader[0], lr=0.0)
    return loss, trained, gradients


if __name__ == "__main__":
    torch.set_num_threads(1)
    data, size, folder, init = sys.argv[1:]
    sizes = {"global_batch_size": int(size), "batch_size": 1}
    with join_ranks("cpu") as ranks:
        for model, changes in (("gpt", {}), ("llama", {"model": {"init": init}})):
            loss, trained, gradients = compute_rank_gradient(ranks, data, {**sizes, **changes})
            if ranks.first:
                tensors = {**gradients, "loss": torch.tensor(loss), "trained": torch.tensor(trained)}
                save_file(tensors, Path(folder, f"{model}.safetensors"))
