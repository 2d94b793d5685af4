"""Two DeepSpeed ranks: refused engines, and ZeRO stages against a plain model."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from batchloom import Loader, StateError, open_store
from batchloom.adapters.deepspeed import (
    check_engine,
    init_process_group,
    load_newest_engine_checkpoint,
    loss_multiplier,
    make_batch_size_config,
    save_engine_checkpoint,
)
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw, tiny_model

SIZES = {
    "seq_len": 64,
    "global_batch_size": 4,
    "steps": 4,
    "micro_batch_size": 1,
}


def make_engine(store, stage, sizes, **options):
    import deepspeed

    model = tiny_model(store)
    config = {
        **sizes,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, optimizer=adamw(model.parameters(), 3e-3), config=config, **options)[0]


def train_with_deepspeed(store, stage, folder):
    loader = Loader(store, **SIZES)
    engine = make_engine(store, stage, make_batch_size_config(loader))
    check_engine(engine, loader)
    losses = []
    for batch in loader:
        total = torch.zeros(())
        for part in batch.split(1):
            count = max(1, loader.trained_tokens(batch.step))
            loss = engine(**part, use_cache=False, num_items_in_batch=count).loss
            engine.backward(loss * loss_multiplier(engine))
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    save_engine_checkpoint(engine, folder, 4, loader)
    resumed_loader = Loader(store, **SIZES)
    assert load_newest_engine_checkpoint(engine, folder, resumed_loader) == resumed_loader.next_step == 4
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        load_newest_engine_checkpoint(engine, folder, Loader(store, **{**SIZES, "seq_len": 32}))
    engine.save_checkpoint(str(folder), tag="without")
    with pytest.raises(StateError, match="holds no loader state"):
        load_newest_engine_checkpoint(engine, folder, resumed_loader)
    client_state = {"batchloom": {"step": 9, "loader": loader.state_at(4)}}
    engine.save_checkpoint(str(folder), tag="changed", client_state=client_state)
    with pytest.raises(StateError, match="changed.* holds the loader state before step 4"):
        load_newest_engine_checkpoint(engine, folder, resumed_loader)
    return losses


def train_with_torch(store):
    model = tiny_model(store)
    optimizer = adamw(model.parameters(), 3e-3)
    options = {**SIZES, "micro_batch_size": 4}
    loader = Loader(store, **options, rank=0, world_size=1)
    losses = []
    for batch in loader:
        count = loader.trained_tokens(batch.step)
        loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    data, out = sys.argv[1:]
    init_process_group()
    store = open_store(data)
    expected_losses = train_with_torch(store)
    for stage in (1, 3):
        assert train_with_deepspeed(store, stage, Path(out) / str(stage)) == pytest.approx(expected_losses, rel=1e-4)
    loader = Loader(store, **SIZES)
    wrong_sizes = {
        **make_batch_size_config(loader),
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    }
    with pytest.raises(TrainError, match=r"train_batch_size 2 instead of 4, gradient_acc.* 1 instead of 2"):
        check_engine(make_engine(store, 1, wrong_sizes), loader)
    sizes = make_batch_size_config(loader)
    with pytest.raises(TrainError, match=r"DistributedSampler gives .* Instead, leave training_data out"):
        make_engine(store, 1, sizes, training_data=LoaderDataset(loader))
    engine = make_engine(store, 1, sizes, training_data=[1, 2, 3, 4])
    with pytest.raises(TrainError, match=r"given training_data \(list\).*leave training"):
        check_engine(engine, loader)
    # Nothing destroys the groups: torch joins their threads while it holds the GIL, and a thread may wait for it.
    dist.barrier()
