"""TRL's GRPOTrainer: ``python examples/grpo_trainer.py STORE TOKENIZER OUT``.

The store holds prompts that carry a column ``answer`` (``batchloom prepare --prompts --carry answer``).
"""

import difflib
import sys
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from batchloom import open_store
from batchloom.examples.job import adamw, tiny_model
from batchloom.store import StoredPrompts


def reward_likeness(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return how much each completion is like the answer that its prompt carries."""
    texts = [completion[0]["content"] for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [difflib.SequenceMatcher(None, text, expected).ratio() for text, expected in pairs]


def train(
    data: str, tokenizer: str, out: str, steps: int = 5, reward: Callable[..., list[float]] = reward_likeness
) -> list[float]:
    """Train on the prompts of a store; return the mean reward of each step."""
    store = open_store(data)
    args = GRPOConfig(
        out,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    model = tiny_model(store)
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(list(StoredPrompts(store))),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        optimizers=(adamw(model.parameters(), 1e-3), None),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2], sys.argv[3]))
