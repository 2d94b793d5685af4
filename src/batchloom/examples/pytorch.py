"""Plain PyTorch and DDP: ``python examples/pytorch.py STORE OUT``, or torchrun."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.adapters.agreement import require_agreement
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    learner = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = adamw(model.parameters(), job.lr)
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.batch_size,
        seed=job.seed,
        steps=job.steps,
    )
    if state := job.newest():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    require_agreement(loader)
    for batch in loader:
        count = max(1, loader.trained_tokens(batch.step))  # of all ranks, without communication
        total = torch.zeros(())
        parts = batch.split(job.batch_size)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last or ranks == 1 else learner.no_sync():
                loss = learner(**part, use_cache=False, num_items_in_batch=count).loss
                (loss * ranks).backward()  # DDP averages where a sum is required
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        if loader.spec.rank == 0:
            job.tell(batch.step, total.item())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            job.save(batch.step + 1, {**state, "loader": loader.state_dict()})
    leave_group()


if __name__ == "__main__":
    main(train)
