"""Two workers of Ray Train in its local mode, each in its own process.

``ray_local_worker.py FOLDER``
"""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from adapters.forked_ranks import fork_second_rank
from adapters.test_ray_train import make_worker_settings, run_train_worker
from batchloom import StateError
from batchloom.adapters import ray_train
from batchloom.core.errors import TrainError


def copy_checkpoints(folder):
    """Copy checkpoints to a folder, as Ray's workers do; local mode keeps only paths."""
    report = ray.train.report

    def copy(metrics, checkpoint=None):
        if checkpoint is not None:
            shutil.rmtree(folder, ignore_errors=True)
            checkpoint = ray.train.Checkpoint(str(shutil.copytree(checkpoint.path, folder)))
        report(metrics, checkpoint=checkpoint)

    ray.train.report = copy


def check_states(folder):
    """Report a state, read it back, and damage it in every way."""
    rank, world = ray_train.get_rank_and_world_size()
    assert world == 2
    copy_checkpoints(folder)
    assert ray_train.load_restored_state() is None
    ray_train.report_step({"loss": 2.0})
    assert ray_train.load_restored_state() is None
    ray_train.report_step({"loss": 1.0}, {"model": torch.full((99,), 7.0), "step": 3})
    if rank:
        # Only the first worker saves the state.
        assert ray_train.load_restored_state() is None
        return
    state = ray_train.load_restored_state()
    assert state["step"] == 3
    assert torch.equal(state["model"], torch.full((99,), 7.0))
    file = folder / "batchloom.pt"
    content = file.read_bytes()
    for share in (0.0, 0.01, 0.5, 0.99):
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(StateError, match=f"of the checkpoint {folder} cannot be read .*damag"):
            ray_train.load_restored_state()
    torch.save(3, file)
    with pytest.raises(StateError, match=f"{folder} holds 3, not a state by name"):
        ray_train.load_restored_state()
    file.unlink()
    with pytest.raises(StateError, match=f"{folder} holds no batchloom.pt: it was not made by"):
        ray_train.load_restored_state()


def train_loop(folder):
    check_states(folder / "checkpoint")
    run_train_worker(make_worker_settings(folder))


def main(folder):
    for call in (
        ray_train.get_rank_and_world_size,
        ray_train.load_restored_state,
        partial(ray_train.report_step, {}),
    ):
        with pytest.raises(TrainError, match="not a worker of Ray Train. Call this in the function"):
            call()
    # Without workers Ray trains in the calling process.
    scaling = ScalingConfig(num_workers=0)
    TorchTrainer(train_loop, train_loop_config=folder, scaling_config=scaling).fit()


if __name__ == "__main__":
    with fork_second_rank():
        main(Path(sys.argv[1]))
