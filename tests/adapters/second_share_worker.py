"""One of two processes that give a loader's batches to a framework, which may divide them again."""

import os
import sys

import torch
from torch.utils.data import DataLoader

import batchloom
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.core.errors import TrainError

DATASETS = {"iterable": LoaderIterable, "map": LoaderDataset, "loader": lambda loader: loader}
STEPS = 12


def _make_loader(store):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return batchloom.Loader(
        batchloom.open_store(store), seq_len=64, global_batch_size=4, steps=STEPS, rank=rank, world_size=world_size
    )


def _take_one(items):
    return items[0]


def _read_with_accelerate(dataset, workers):
    from accelerate import Accelerator

    # Without a batch size, Accelerate takes no map-style data sets.
    options = (
        {"batch_size": None} if isinstance(dataset, LoaderIterable) else {"batch_size": 1, "collate_fn": _take_one}
    )
    return sum(1 for _ in Accelerator(cpu=True).prepare(DataLoader(dataset, num_workers=workers, **options)))


def _read_with_accelerate_shard(dataset, workers):
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    dataloader = DataLoader(dataset, batch_size=1, collate_fn=_take_one, num_workers=workers)
    return sum(1 for _ in accelerator.prepare(dataloader))


def _read_with_trainer(dataset, workers):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_layer=1, n_head=2, n_embd=8, n_positions=64))
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments("unused", max_steps=3, dataloader_num_workers=workers, **options)
    Trainer(model, arguments, train_dataset=dataset, data_collator=_take_one).train()
    return 3


def _read_with_lightning(dataset, workers):
    import lightning

    steps = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            steps.append(batch.step)
            return self.layer(torch.ones(1, 1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **options)
    trainer.fit(Model(), DataLoader(dataset, batch_size=None, num_workers=workers))
    return len(steps)


FRAMEWORKS = {
    "accelerate": _read_with_accelerate,
    "accelerate shards": _read_with_accelerate_shard,
    "trainer": _read_with_trainer,
    "lightning": _read_with_lightning,
}

if __name__ == "__main__":
    store, framework, dataset, workers = sys.argv[1:]
    try:
        served = FRAMEWORKS[framework](DATASETS[dataset](_make_loader(store)), int(workers))
    except TrainError as error:
        print(f"refused: {error}", flush=True)
    else:
        print(f"served {served}", flush=True)
    # Nothing destroys the groups: torch joins their threads while it holds the GIL, and a thread may wait for it.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
