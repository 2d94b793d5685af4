"""Example with common faults; the name of the module selects the fault.

A test copies ``broken_examples.py`` to ``FAULT.py``, where ``FAULT`` is a key of ``FAULTS``.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.examples.job import adamw, leave_group

FIRST_FAULTY_STEP = 3


def draw_shuffled_rows(loader, batch):
    """Draw rows from the next steps, as a DataLoader that shuffles does."""
    batches = [loader.batch(batch.step + ahead) for ahead in range(4)]
    size = len(batch["input_ids"])
    rows = torch.randperm(4 * size, generator=torch.Generator().manual_seed(batch.step))[:size]
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.cat([planned[name] for planned in batches])[rows] for name in names}


def continue_positions(loader, batch):
    """Continue positions through the row, as without position_ids."""
    positions = torch.arange(batch["position_ids"].shape[1]).expand_as(batch["position_ids"])
    return {**batch, "position_ids": positions}


def reverse_rows(loader, batch):
    return {name: value.flip(0) for name, value in batch.items()}


def skip_batch(loader, batch):
    """Return the next batch, as after resuming from the last fetched step."""
    return dict(loader.batch(batch.step + 1))


def read_as_rank_0(loader, batch):
    """Return the batch of rank 0 on every rank."""
    spec = loader.spec
    sizes = {"seq_len": loader.plan.spec.seq_len, "seed": loader.plan.spec.seed}
    first_rank_loader = Loader(
        loader.store,
        **sizes,
        global_batch_size=loader.plan.spec.global_batch_size,
        rank=0,
        world_size=spec.world_size,
        prefetch=0,
    )
    return dict(first_rank_loader.batch(batch.step))


def drop_rows(loader, batch):
    return {name: value[:-2] for name, value in batch.items()}


def repeat_first_row(loader, batch):
    return {name: torch.cat([value[:-1], value[:1]]) for name, value in batch.items()}


def cut_tokens(loader, batch):
    return {name: value[:, :-8] for name, value in batch.items()}


def change_tokens(loader, batch):
    return {**batch, "input_ids": batch["input_ids"] ^ 1}


FAULTS = {
    "shuffled": draw_shuffled_rows,
    "leaky": continue_positions,
    "reordered": reverse_rows,
    "late": skip_batch,
    "same": read_as_rank_0,
    "dropping": drop_rows,
    "repeating": repeat_first_row,
    "cut": cut_tokens,
    "other": change_tokens,
}


def train(model, job, fault=None):
    fault = fault or FAULTS[Path(__file__).stem]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    optimizer = adamw(model.parameters(), job.lr)
    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        seed=job.seed,
        steps=job.steps,
    )
    for batch in loader:
        arrays = dict(batch) if batch.step < FIRST_FAULTY_STEP else fault(loader, batch)
        count = max(1, loader.trained_tokens(batch.step))
        splits = (array.split(job.batch_size) for array in arrays.values())
        total = torch.zeros(())
        for values in zip(*splits, strict=True):
            micro_batch = dict(zip(arrays, values, strict=True))
            loss = model(**micro_batch, use_cache=False, num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            if ranks > 1:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        if loader.spec.rank == 0:
            job.tell(batch.step, total.item())
    leave_group()
