"""An example as people write them, with the faults that people make; which one is said by the module's name.

``broken_examples.py`` is copied to ``FAULT.py`` to have one of them.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.examples.job import adamw

# From this step on.
FAULTY = 3


def shuffled(loader, batch):
    """A DataLoader that shuffles: the rows of the next steps, drawn again."""
    rows = [loader.batch(batch.step + ahead) for ahead in range(4)]
    size = len(batch["input_ids"])
    order = torch.randperm(4 * size, generator=torch.Generator().manual_seed(batch.step))[:size]
    return {name: torch.cat([one[name] for one in rows])[order] for name in ("input_ids", "labels", "position_ids")}


def leaky(loader, batch):
    """Positions that run on through the row, as without position_ids."""
    positions = torch.arange(batch["position_ids"].shape[1]).expand_as(batch["position_ids"])
    return {**batch, "position_ids": positions}


def reordered(loader, batch):
    return {name: value.flip(0) for name, value in batch.items()}


def late(loader, batch):
    """One batch behind, as after a state of what was fetched in place of what was trained."""
    return dict(loader.batch(batch.step + 1))


def same(loader, batch):
    """Every rank reads what rank 0 does."""
    spec = loader.spec
    sizes = {"seq_len": loader.plan.spec.seq_len, "seed": loader.plan.spec.seed}
    whole = Loader(
        loader.store,
        **sizes,
        global_batch_size=loader.plan.spec.global_batch_size,
        rank=0,
        world_size=spec.world_size,
        prefetch=0,
    )
    return dict(whole.batch(batch.step))


def dropping(loader, batch):
    return {name: value[:-2] for name, value in batch.items()}


def repeating(loader, batch):
    return {name: torch.cat([value[:-1], value[:1]]) for name, value in batch.items()}


def cut(loader, batch):
    return {name: value[:, :-8] for name, value in batch.items()}


def other(loader, batch):
    return {**batch, "input_ids": batch["input_ids"] ^ 1}


FAULTS = {one.__name__: one for one in (shuffled, leaky, reordered, late, same, dropping, repeating, cut, other)}


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
        given = dict(batch) if batch.step < FAULTY else fault(loader, batch)
        count = max(1, loader.trained_tokens(batch.step))
        parts = (given[name].split(job.batch_size) for name in given)
        total = torch.zeros(())
        for part in zip(*parts, strict=True):
            named = dict(zip(given, part, strict=True))
            loss = model(**named, use_cache=False, num_items_in_batch=count).loss
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
    if ranks > 1:
        held = dist.barrier(async_op=True)  # kept: freeing it, gloo's thread would hang
        held.wait()
        dist.destroy_process_group()
