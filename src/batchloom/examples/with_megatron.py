"""Megatron-core: ``torchrun examples/with_megatron.py STORE OUT``."""

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calc, parallel_state
from torch.nn.functional import cross_entropy

from batchloom import Loader, open_store
from batchloom.adapters import megatron
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun names an address, also for a single process.
    alone = None if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0"
    dist.init_process_group("gloo", alone, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    calc.init_num_microbatches_calculator(rank, None, job.global_batch_size, job.batch_size, ranks)
    optimizer = adamw(model.parameters(), job.lr)
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        seed=job.seed,
        steps=job.steps,
        micro_batch_size=job.batch_size,
        **megatron.get_megatron_rank(),
    )
    if state := job.newest():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        megatron.resume_from_samples(loader, state["consumed"])
    batches = megatron.make_megatron_iterator(loader, attention_mask=False)
    for step in range(loader.next_step, job.steps):
        count, total = max(1, loader.trained_tokens(step)), torch.zeros(())
        for part in (next(batches) for _ in range(calc.get_num_microbatches())):
            scores = model(input_ids=part["tokens"], position_ids=part["position_ids"]).logits
            losses = cross_entropy(scores.transpose(1, 2), part["labels"], reduction="none")
            loss = (losses * part["loss_mask"]).sum() / count
            loss.backward()
            total += loss.detach()
        for summed in (total, *(weights.grad for weights in model.parameters())):
            dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            job.tell(step, total.item())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            consumed = megatron.count_consumed_samples(loader, step + 1)
            job.save(step + 1, {**state, "consumed": consumed})
    leave_group()


if __name__ == "__main__":
    main(train)
