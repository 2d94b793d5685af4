"""Preferences as axolotl's prompt strategies write them.

These tests run only where axolotl is installed. Its strategies write the texts of prompt and answers, which TRL then
tokenizes. Two things differ: batchloom's chatml writes (and trains) the line end after the answer's ``<|im_end|>``, as
in the template of Qwen, and its llama3 writes ``<|begin_of_text|>``, which TRL's tokenizer adds.
"""

import importlib

import numpy as np
import pytest

import batchloom
from batchloom.store import LabelledAnswers, PreferencePairs
from preparation.stores import write_jsonl

pytest.importorskip("axolotl.prompt_strategies.dpo.chatml")
pytestmark = pytest.mark.filterwarnings("ignore")


def talk(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


SIDES = {"chosen": "good", "rejected": "bad"}
FULL = {"chosen": talk("q", "good"), "rejected": talk("q", "bad")}
PAIRS = [
    ("default", {"system": "s", "question": "q", **SIDES}),
    ("default", {"instruction": "q", "chosen_response": "good", "rejected_response": "bad"}),
    ("argilla_chat", FULL),
    ("icr", {"system": "s", "input": "q", **SIDES}),
    ("intel", {"system": "", "question": "q", **SIDES}),
    ("prompt_pairs", {"system": "s", "prompt": "q", **SIDES}),
    ("ultra", {"system": "s", "prompt": "q", **FULL}),
]
LABELLED = [
    ("argilla", {"system": "s", "instruction": "q", "completion": "good", "label": True}),
    ("argilla_chat", {"completion": talk("p", "x", "q", "bad"), "label": False}),
    ("intel", {"system": "", "question": "q", "completion": "bad", "label": False}),
    ("prompt_pairs", {"system": "s", "prompt": "q", "completion": "good", "label": True}),
    ("ultra", {"prompt": "q", "completion": "good", "label": True}),
]
TEMPLATES = {"chatml": ("", "\n"), "llama3": ("<|begin_of_text|>", "")}


def prepare_store(record, template, tokenizer, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [record] * 4)
    settings = {"tokenizer": str(tokenizer), "template": template, "val_fraction": 0, "dedup": "none"}
    return batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings).path)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("strategy", "record"), PAIRS)
def test_pairs(strategy, record, template, tokenizer_folders, tmp_path):
    store = prepare_store(record, template, tokenizer_folders["bytes"], tmp_path)
    module = importlib.import_module(f"axolotl.prompt_strategies.dpo.{template}")
    expected = getattr(module, strategy)({})(dict(record))
    start, end = TEMPLATES[template]
    pair = PreferencePairs(store)[0]
    texts = {side: store.tokenizer.decode(np.array(pair[f"{side}_ids"])) for side in ("prompt", "chosen", "rejected")}
    assert texts == {
        "prompt": start + expected["prompt"],
        "chosen": expected["chosen"] + end,
        "rejected": expected["rejected"] + end,
    }


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("strategy", "record"), LABELLED)
def test_labelled_answers(strategy, record, template, tokenizer_folders, tmp_path):
    store = prepare_store(record, template, tokenizer_folders["bytes"], tmp_path)
    module = importlib.import_module(f"axolotl.prompt_strategies.kto.{template}")
    expected = getattr(module, strategy)({})(dict(record))
    start, end = TEMPLATES[template]
    answer = LabelledAnswers(store)[0]
    assert store.tokenizer.decode(np.array(answer["prompt_ids"])) == start + expected["prompt"]
    assert store.tokenizer.decode(np.array(answer["completion_ids"])) == expected["completion"] + end
    assert answer["label"] == record["label"]
