"""What axolotl makes of records."""

from pathlib import Path
from typing import Any

from peers.cases import Case

PACKAGE = "axolotl"


def run_case(case: Case, tokenizer_folder: Path) -> list[dict[str, Any]]:
    """Return the rows that its prompt strategy makes of the records of a case."""
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter, PromptStyle
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    dataset = dict(case.peer)
    kind, train_on_inputs = dataset.pop("type"), dataset.pop("train_on_inputs", False)
    settings = DictDefault(
        {
            "train_on_inputs": train_on_inputs,
            "sequence_len": 4096,
            "chat_template": "chatml",
            # chatml ends turns with another token than the end token of the tokenizer.
            "eot_tokens": ["<|im_end|>"],
            "pretraining_dataset": [{"text_column": "text"}],
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if kind == "alpaca":
        prompter = AlpacaPrompter(PromptStyle.INSTRUCT.value)
        strategy = AlpacaPromptTokenizingStrategy(prompter, tokenizer, train_on_inputs, settings.sequence_len)
    else:
        strategy = load(kind, tokenizer, settings, {"type": kind, **dataset})
    rows = [_tokenize(strategy, record) for record in case.records]
    return [{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])} for row in rows]


def _tokenize(strategy: Any, record: dict[str, Any]) -> dict[str, Any]:
    """Tokenize one record; strategies that work on tables get a table of one row."""
    if not strategy.supports_batched:
        return strategy.tokenize_prompt(record)
    columns = strategy.tokenize_prompt({name: [value] for name, value in record.items()})
    return {name: values[0] for name, values in columns.items()}
