"""What TRL's trainers make of records."""

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.cases import COLUMNS, Case

# The date that batchloom's templates write.
TEMPLATE_DATE = dt.datetime(2024, 7, 26, tzinfo=dt.UTC)


@contextmanager
def freeze_template_date() -> Iterator[None]:
    """Let the chat templates of transformers write batchloom's date."""
    from transformers.utils import chat_template_utils

    class FrozenDate(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return TEMPLATE_DATE

    real = chat_template_utils.datetime
    chat_template_utils.datetime = FrozenDate
    chat_template_utils._compile_jinja_template.cache_clear()
    try:
        yield
    finally:
        chat_template_utils.datetime = real
        chat_template_utils._compile_jinja_template.cache_clear()


def prepare_with_trl(case: Case, tokenizer_folder: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the rows that the trainer of the objective prepares."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    with freeze_template_date():
        if case.objective == "prompts":
            return [{"prompt_ids": tokenize_prompt(record, tokenizer)} for record in case.records]
        columns = COLUMNS[case.objective]
        return [{name: row[name] for name in columns} for row in _train_rows(case, tokenizer, folder)]


def tokenize_prompt(record: dict[str, Any], tokenizer: Any) -> list[int]:
    """Tokenize a prompt as the trainers that generate answers do."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return tokenizer(text=prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def _train_rows(case: Case, tokenizer: Any, folder: Path) -> Any:
    import datasets
    import trl

    options = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
        **case.peer,
    }
    # Without it, a table adds the arguments of every call to every other call.
    mixed = {"on_mixed_types": "use_json"} if "tool_calls" in repr(case.records) else {}
    dataset = datasets.Dataset.from_list(case.records, **mixed)
    settings = {"processing_class": tokenizer, "train_dataset": dataset}
    if case.objective == "sft":
        config = trl.SFTConfig(**options)
        return trl.SFTTrainer(_make_model(tokenizer), args=config, **settings).train_dataset
    models = {"model": _make_model(tokenizer), "ref_model": _make_model(tokenizer)}
    if case.objective == "pairs":
        return trl.DPOTrainer(**models, args=trl.DPOConfig(**options), **settings).train_dataset
    # Its other losses need pairs of neighbours.
    config = trl.KTOConfig(**options, loss_type="apo_zero_unpaired", per_device_train_batch_size=2)
    return trl.KTOTrainer(**models, args=config, **settings).train_dataset


def _make_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
