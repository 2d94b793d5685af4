"""Ray Train: ``python examples/with_ray.py STORE OUT --workers 2``."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from batchloom import Loader, open_store
from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.ray_train import load_restored_state, report_step
from batchloom.examples.job import Job, adamw, main


def work(config: dict[str, Any]) -> None:
    """Train on a worker, whose rank is that of torch.distributed."""
    model, job = config["model"], config["job"]
    learner, ranks = prepare_model(model), dist.get_world_size()
    optimizer = adamw(model.parameters(), job.lr)
    sizes: Any = {"seq_len": job.seq_len, "global_batch_size": job.global_batch_size}
    store = open_store(job.data)
    loader = Loader(store, seed=job.seed, steps=job.steps, micro_batch_size=job.batch_size, **sizes)
    stateful_objects = {"model": model, "optimizer": optimizer, "loader": loader}
    if state := load_restored_state():
        for name, stateful in stateful_objects.items():
            stateful.load_state_dict(state[name])
    require_agreement(loader)
    with job.within(model):
        for batch in loader:
            count, total = max(1, loader.trained_tokens(batch.step)), torch.zeros(())
            for part in batch.split(job.batch_size):
                loss = learner(**part, use_cache=False, num_items_in_batch=count).loss
                (loss * ranks).backward()  # DDP averages where a sum is required
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if loader.spec.rank == 0:
                job.tell(batch.step, total.item())
            if (batch.step + 1) % job.save_every == 0:
                state = {name: stateful.state_dict() for name, stateful in stateful_objects.items()}
                report_step({"loss": total.item()}, state)


def train(model: Any, job: Job) -> None:
    """Start the workers with Ray, and restart them after a failure."""
    out = str(Path(job.out).resolve())
    if not job.resume:
        shutil.rmtree(f"{out}/ray", ignore_errors=True)  # otherwise Ray would resume the run of this name
    run = RunConfig(name="ray", storage_path=out, failure_config=FailureConfig(max_failures=3))
    workers, config = ScalingConfig(num_workers=job.workers), {"model": model, "job": job}
    TorchTrainer(work, train_loop_config=config, scaling_config=workers, run_config=run).fit()


if __name__ == "__main__":
    main(train)
