"""FSDP2: ``python examples/fsdp2.py STORE OUT``, or with ``torchrun``."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.fsdp2 import load_newest_fsdp2, save_fsdp2, shard_model
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        shard_model(model)  # with rank 0's weights on all ranks
    optimizer = adamw(model.parameters(), job.lr)
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.batch_size,
        seed=job.seed,
        steps=job.steps,
    )
    if job.resume:
        load_newest_fsdp2(Path(job.out), model, optimizer, loader)
    require_agreement(loader)
    for batch in loader:
        count = max(1, loader.trained_tokens(batch.step))  # of all ranks, without communication
        total = torch.zeros(())
        for part in batch.split(job.batch_size):
            loss = model(**part, use_cache=False, num_items_in_batch=count).loss
            (loss * ranks).backward()  # FSDP averages where a sum is required
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        if loader.spec.rank == 0:
            job.tell(batch.step, total.item())
        if (batch.step + 1) % job.save_every == 0:
            save_fsdp2(Path(job.out), batch.step + 1, model, optimizer, loader)
    leave_group()


if __name__ == "__main__":
    main(train)
