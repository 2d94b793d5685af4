"""DeepSpeed, ZeRO 2: ``torchrun examples/with_deepspeed.py STORE OUT``."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchloom import Loader, open_store
from batchloom.adapters import deepspeed as adapter
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    adapter.init_process_group()
    import deepspeed

    loader = Loader(
        open_store(job.data),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.batch_size,
        seed=job.seed,
        steps=job.steps,
    )
    config: dict[str, Any] = {
        **adapter.make_batch_size_config(loader),
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # otherwise some versions clip at 1.0
    }
    optimizer = adamw(model.parameters(), job.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    adapter.check_engine(engine, loader)
    if job.resume:
        adapter.load_newest_engine_checkpoint(engine, Path(job.out), loader)
    for batch in loader:
        count = max(1, loader.trained_tokens(batch.step))  # of all ranks, without communication
        total = torch.zeros(())
        for part in batch.split(job.batch_size):
            loss = engine(**part, use_cache=False, num_items_in_batch=count).loss
            # DeepSpeed averages where a sum is required.
            engine.backward(loss * adapter.loss_multiplier(engine))
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        if loader.spec.rank == 0:
            job.tell(batch.step, total.item())
        if (batch.step + 1) % job.save_every == 0:
            adapter.save_engine_checkpoint(engine, Path(job.out), batch.step + 1, loader)
    leave_group()


if __name__ == "__main__":
    main(train)
