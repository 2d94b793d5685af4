"""One of several processes that read a ``MultiModalIterableDataset`` through a framework."""

import json
import sys

import torch
from torch.utils.data import DataLoader

from batchloom import DatasetConfig
from batchloom.compat import MultiModalIterableDataset


def read_with_accelerate(dataset, workers):
    from accelerate import Accelerator

    dataloader = DataLoader(dataset, batch_size=2, collate_fn=dataset.get_collator(), num_workers=workers)
    return [batch["input_ids"] for batch in Accelerator(cpu=True).prepare(dataloader)]


def read_with_trainer(dataset, workers):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    seen = []

    class SeeingTrainer(Trainer):
        def compute_loss(self, model, inputs, **_):
            seen.append(inputs["input_ids"])
            return sum(parameter.sum() for parameter in model.parameters())

    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_layer=1, n_head=2, n_embd=8, bos_token_id=1, eos_token_id=1))
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "num_train_epochs": 1}
    arguments = TrainingArguments(
        "unused", per_device_train_batch_size=2, dataloader_num_workers=workers, remove_unused_columns=False, **options
    )
    SeeingTrainer(model, arguments, train_dataset=dataset, data_collator=dataset.get_collator()).train()
    return seen


if __name__ == "__main__":
    config, out, framework, workers = sys.argv[1:]
    dataset = MultiModalIterableDataset(DatasetConfig.load(config), out=out)
    dataset.build()
    batches = globals()[f"read_with_{framework}"](dataset, int(workers))
    rows = [row.tolist() for batch in batches for row in batch]
    print("rows", json.dumps([len(batches), rows]), flush=True)
    # Nothing destroys the groups: torch joins their threads while it holds the GIL, and a thread may wait for it.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
