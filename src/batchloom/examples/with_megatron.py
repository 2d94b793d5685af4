"""Megatron-core's processes and counters: ``python examples/with_megatron.py STORE OUT``, or behind ``torchrun``."""

import os
from typing import Any

import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from torch import zeros
from torch.nn.functional import cross_entropy

from batchloom import Loader, open_store
from batchloom.adapters import megatron
from batchloom.examples.job import Job, adamw, main


def train(model: Any, job: Job) -> None:
    """Do the steps of a job."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = "0"
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_data_parallel_group()
    sizes = (job.global_batch_size, job.batch_size, group.size())
    calculator.init_num_microbatches_calculator(dist.get_rank(), None, *sizes)
    optimizer = adamw(model.parameters(), job.lr)
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.batch_size,
        seed=job.seed,
        steps=job.steps,
        **megatron.megatron_place(),
    )
    if state := job.newest():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        megatron.go_on_from(loader, state["consumed_samples"])
    batches = megatron.megatron_iterator(loader)
    for step in range(loader.next_step, job.steps):
        count, total = max(1, loader.trained_tokens(step)), zeros(())
        for _ in range(calculator.get_num_microbatches()):
            part = next(batches)
            scores = model(input_ids=part["tokens"], position_ids=part["position_ids"]).logits
            losses = cross_entropy(scores.transpose(1, 2), part["labels"], reduction="none")
            loss = (losses * part["loss_mask"]).sum() / count
            loss.backward()
            total += loss.detach()
        for summed in (total, *(weights.grad for weights in model.parameters())):
            dist.all_reduce(summed, group=group)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            job.tell(step, total.item())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            job.save(
                step + 1, state | {"consumed_samples": megatron.consumed_samples(loader, step + 1)}
            )
    dist.barrier()  # gloo's thread is done with the last sum then: torch may wait for it for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main(train)
