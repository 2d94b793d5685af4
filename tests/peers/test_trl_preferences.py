"""Stored preferences in TRL: agreement with its trainers, use by its collators.

These tests run only where TRL is installed (the extra ``bench-chat``).
"""

import json

import pytest

import batchloom
from batchloom.store import LabelledAnswers, PreferencePairs
from chat.conversations import CHATML
from preparation.stores import write_jsonl

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


PROMPTS = ["hi", "2 + 2?", " spaces ", "ça va, 日本語 😀"]
PAIRS = [
    {"prompt": [user(p)], "chosen": [assistant(f"good {p}")], "rejected": [assistant(f"bad {p}")]} for p in PROMPTS
]
IMPLICIT = [
    {side: [*row["prompt"], assistant("a"), user("b"), *row[side]] for side in ("chosen", "rejected")}
    for row in PAIRS
]  # fmt: skip
TEXTS = [
    {"chosen": f"Human: {p}\n\nAssistant:{good}", "rejected": f"Human: {p}\n\nAssistant:{bad}"}
    for p in PROMPTS
    for good, bad in (
        (" good", " bad"),
        ("\n\nyes", "\n\nno"),
        (" good", " good, or not"),
        ("  a", " b"),
    )
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


@pytest.fixture
def tokenizer_folder(tokenizer_folders, tmp_path):
    """Folder of a tokenizer with a template, which batchloom and TRL load."""
    import shutil

    shutil.copytree(tokenizer_folders["bytes"], tmp_path / "tokenizer")
    config = tmp_path / "tokenizer/tokenizer_config.json"
    plain = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    settings = {"chat_template": plain, "pad_token": "<|endoftext|>", "bos_token": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return tmp_path / "tokenizer"


def make_model(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=1, **sizes)
    return LlamaForCausalLM(config)


def make_config(config_class, tmp_path, **options):
    return config_class(
        output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True, bf16=False, max_length=None,
        per_device_train_batch_size=2, max_steps=1, save_strategy="no", **options,
    )  # fmt: skip


def prepare_store(rows, tokenizer_folder, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": str(tokenizer_folder), "val_fraction": 0}
    return batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "store", **settings).path)


@pytest.mark.parametrize("rows", [PAIRS, IMPLICIT, TEXTS], ids=["pairs", "implicit", "texts"])
def test_pairs_are_those_that_the_dpo_trainer_prepares(tokenizer_folder, tmp_path, rows):
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    trainer = trl.DPOTrainer(
        make_model(tokenizer),
        ref_model=make_model(tokenizer),
        args=make_config(trl.DPOConfig, tmp_path),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
    )
    pairs = list(PreferencePairs(prepare_store(rows, tokenizer_folder, tmp_path)))
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert pairs == [{name: row[name] for name in columns} for row in trainer.train_dataset]


@pytest.mark.slow
def test_the_dpo_trainer_accepts_stored_pairs(tokenizer_folder, tmp_path):
    import datasets
    from transformers import AutoTokenizer

    class PreparedDPOTrainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    store = prepare_store(PAIRS, tokenizer_folder, tmp_path)
    trainer = PreparedDPOTrainer(
        make_model(tokenizer),
        ref_model=make_model(tokenizer),
        args=make_config(trl.DPOConfig, tmp_path),
        processing_class=tokenizer,
        train_dataset=datasets.IterableDataset.from_generator(PreferencePairs, gen_kwargs={"store": store}),
    )
    assert trainer.train().training_loss > 0


def test_labels_are_those_that_the_kto_trainer_prepares(tokenizer_folder, tmp_path):
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    trainer = trl.KTOTrainer(
        make_model(tokenizer),
        ref_model=make_model(tokenizer),
        args=make_config(trl.KTOConfig, tmp_path, loss_type="apo_zero_unpaired"),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(LABELLED),
    )
    answers = LabelledAnswers(prepare_store(LABELLED, tokenizer_folder, tmp_path))
    columns = ("prompt_ids", "completion_ids", "label")
    assert list(answers) == [{name: row[name] for name in columns} for row in trainer.train_dataset]


def test_collators_accept_stored_preferences(tokenizer_folder, tmp_path):
    import torch
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    store = prepare_store(PAIRS, tokenizer_folder, tmp_path)
    pairs = PreferencePairs(store)
    collate = DataCollatorForPreference(pad_token_id=store.end_id)
    (batch,) = torch.utils.data.DataLoader(pairs, batch_size=4, collate_fn=collate)
    assert batch["input_ids"].shape[0] == 8
    answer_tokens = sum(len(pair[side]) for pair in pairs for side in ("chosen_ids", "rejected_ids"))
    assert int(batch["completion_mask"].sum()) == answer_tokens == store.contents.trained_tokens
    collate = DataCollatorForUnpairedPreference(pad_token_id=store.end_id)
    (batch,) = torch.utils.data.DataLoader(LabelledAnswers(store), batch_size=8, collate_fn=collate, num_workers=1)
    assert batch["label"].tolist() == [True, False] * 4
