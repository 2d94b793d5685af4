"""Accelerate: ``accelerate launch examples/with_accelerate.py STORE OUT``."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from batchloom import Loader, open_store
from batchloom.adapters import accelerate as adapter
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.batch_size,
        seed=job.seed,
        steps=job.steps,
        rank=accelerator.process_index,
        world_size=ranks,
    )
    accelerator.gradient_accumulation_steps = job.global_batch_size // ranks // job.batch_size
    # Do not pass the loader: it reads this process's share, and prepare would distribute its batches again.
    learner, optimizer = accelerator.prepare(model, adamw(model.parameters(), job.lr))
    adapter.attach(accelerator, loader)
    adapter.require_isolation(accelerator, learner, loader)
    if job.resume:
        adapter.load_newest_checkpoint(accelerator, Path(job.out))
    for batch in loader:
        count = max(1, loader.trained_tokens(batch.step))  # of all ranks, without communication
        total = torch.zeros((), device=accelerator.device)
        for part in batch.split(job.batch_size):
            model_inputs = {name: value.to(accelerator.device) for name, value in part.items()}
            with accelerator.accumulate(learner):
                loss = learner(**model_inputs, use_cache=False, num_items_in_batch=count).loss
                # Accelerate averages where a sum is required.
                accelerator.backward(loss * adapter.get_loss_scale(accelerator))
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        total = accelerator.reduce(total, "sum")
        if accelerator.is_main_process:
            job.tell(batch.step, total.item())
        if (batch.step + 1) % job.save_every == 0:
            adapter.save_checkpoint(accelerator, Path(job.out), batch.step + 1)
    leave_group()


if __name__ == "__main__":
    main(train)
