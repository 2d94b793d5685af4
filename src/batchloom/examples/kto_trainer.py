"""TRL's KTOTrainer: ``python examples/kto_trainer.py STORE TOKENIZER OUT``."""

import sys
from typing import Any

from datasets import IterableDataset
from transformers import AutoTokenizer
from trl import KTOConfig, KTOTrainer

from batchloom import open_store
from batchloom.examples.job import adamw, print_loss, tiny_model
from batchloom.store import LabelledAnswers


class StoredLabelsTrainer(KTOTrainer):  # type: ignore[misc]  # TRL has no types
    """KTOTrainer for answers that are tokenized already."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def train(data: str, tokenizer: str, out: str, steps: int = 20) -> list[float]:
    """Train on the labelled answers, or the pairs, of a store; return the losses."""
    store = open_store(data)
    args = KTOConfig(
        out,
        # Losses with a KL term need the answers of neighbours, which TRL's own preparation adds.
        loss_type="apo_zero_unpaired",
        per_device_train_batch_size=4,
        max_steps=steps,
        max_length=None,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    model = tiny_model(store)
    trainer = StoredLabelsTrainer(
        model,
        # For your model leave it out: TRL then loads the reference from the model's folder.
        ref_model=tiny_model(store),
        args=args,
        train_dataset=IterableDataset.from_generator(LabelledAnswers, gen_kwargs={"store": store}),
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
