"""Train as lmms-engine's users write it; one process, or a rank."""

import json
import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from batchloom import DatasetConfig
from batchloom.adapters.fsdp2 import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.compat import MultiModalDataset, MultiModalIterableDataset

DATASETS = {"map": MultiModalDataset, "iterable": MultiModalIterableDataset}


def write_conversations(path):
    """Write conversations of texts."""
    turns = ({"role": "user", "content": f"What is {n}?"} for n in range(40))
    answers = ({"role": "assistant", "content": f"{n} is a number. " * 5} for n in range(40))
    path.write_text(json.dumps([{"messages": pair} for pair in zip(turns, answers, strict=True)]))


def train(folder, kind):
    """Train two steps on a data set of texts with the tokenizer of a language model."""
    config = DatasetConfig(
        datasets=[{"path": str(folder / "texts.json")}],
        dataset_type="qwen3_vl_iterable",
        processor_config={"processor_type": str(folder / "tokenizer")},
        packing=True,
        packing_length=256,
        packing_strategy="first_fit",
    )
    dataset = DATASETS[kind](config, out=folder / "store")
    dataset.build()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=600, num_key_value_heads=2, **sizes))
    options = {"max_steps": 2, "per_device_train_batch_size": 1, "use_cpu": True, "logging_steps": 1}
    training_args = FSDP2Arguments(output_dir=str(folder / f"out-{kind}"), **options)
    trainer = FSDP2SFTTrainer(
        model=model, args=training_args, train_dataset=dataset, data_collator=dataset.get_collator()
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
