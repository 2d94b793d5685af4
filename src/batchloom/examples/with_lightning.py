"""Lightning: ``python examples/with_lightning.py STORE OUT``, or with torchrun."""

import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from batchloom import Loader, open_store
from batchloom.adapters.lightning import LoaderDataModule
from batchloom.examples.job import Job, adamw, main


class Learner(LightningModule):  # type: ignore[misc]
    """Transformers model that reports the loss of each step."""

    def __init__(self, model: Any, job: Job) -> None:
        super().__init__()
        self.model = model
        self.job = job
        self.total = 0.0

    def training_step(self, batch: Any, number: int) -> Any:
        """Return the loss of a micro-batch, which Lightning averages over all of them."""
        count = self.trainer.datamodule.loss_divisor
        passes = self.trainer.accumulate_grad_batches
        loss = self.model(**batch, use_cache=False, num_items_in_batch=count).loss
        self.total *= number % passes > 0
        self.total += self.trainer.strategy.reduce(loss.detach()).item() / passes
        if (number + 1) % passes == 0 and self.trainer.is_global_zero:
            self.job.tell(self.trainer.global_step, self.total)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all examples."""
        return adamw(self.model.parameters(), self.job.lr)


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    sizes: Any = {
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
        "micro_batch_size": job.batch_size,
    }
    data = LoaderDataModule(train=lambda: Loader(open_store(job.data), seed=job.seed, steps=job.steps, **sizes))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        devices=ranks,
        max_steps=job.steps,
        accumulate_grad_batches=job.global_batch_size // (ranks * job.batch_size),
        callbacks=ModelCheckpoint(job.out, every_n_train_steps=job.save_every, save_last=True),
        logger=False,
    )
    trainer.fit(Learner(model, job), data, ckpt_path="last" if job.resume else None)


if __name__ == "__main__":
    main(train)
