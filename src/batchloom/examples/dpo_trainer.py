"""TRL's DPOTrainer: ``python examples/dpo_trainer.py STORE TOKENIZER OUT``."""

import sys
from typing import Any

from datasets import IterableDataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from batchloom import open_store
from batchloom.examples.job import adamw, print_loss, tiny_model
from batchloom.store import PreferencePairs


class StoredPairsTrainer(DPOTrainer):  # type: ignore[misc]  # TRL has no types
    """DPOTrainer for pairs that are tokenized already."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def train(data: str, tokenizer: str, out: str, steps: int = 20) -> list[float]:
    """Train on the pairs of a store; return the loss of each step."""
    store = open_store(data)
    args = DPOConfig(
        out,
        per_device_train_batch_size=4,
        max_steps=steps,
        # The store's --max-tokens has removed longer pairs.
        max_length=None,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    model = tiny_model(store)
    trainer = StoredPairsTrainer(
        model,
        # For your model leave it out: TRL then loads the reference from the model's folder.
        ref_model=tiny_model(store),
        args=args,
        train_dataset=IterableDataset.from_generator(PreferencePairs, gen_kwargs={"store": store}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        optimizers=(adamw(model.parameters(), 1e-3), None),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        print_loss(step, loss)
    return losses


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3])
