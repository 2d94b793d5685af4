"""Labelled steps as axolotl tokenizes them, which follows TRL's ``PRMTrainer``.

These tests run only where axolotl is installed. One thing differs: axolotl begins with the tokenizer's ``bos_token``
even if the tokenizer itself does not write it.
"""

import pytest

import batchloom
from batchloom.store import LabelledSteps
from preparation.stores import write_jsonl

steps_module = pytest.importorskip("axolotl.prompt_strategies.stepwise_supervised")
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [
    {"prompt": "2 + 2?", "completions": ["It is 4.", "So\nit is 5."], "labels": [True, False]},
    {"prompt": " ça va 😀 ", "completions": ["日本語"], "labels": [False]},
    {"prompt": "The fox", "completions": [" jumps", "over ", "the dog"], "labels": [True, True, True]},
]


@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
def test_ids_and_labels(tokenizer_folders, tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    write_jsonl(tmp_path / "in.jsonl", ROWS)
    settings = {"tokenizer": str(tokenizer_folders[name]), "val_fraction": 0}
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings)
    store = batchloom.open_store(tmp_path / "out")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folders[name])
    strategy = steps_module.StepwiseSupervisedPromptTokenizingStrategy(tokenizer)
    for row, item in zip(ROWS, LabelledSteps(store), strict=True):
        expected = strategy.tokenize_prompt(row)
        begin = 1 if store.tokenizer.bos_id is None else 0
        assert item == {key: expected[key][begin:] for key in ("input_ids", "labels")}
