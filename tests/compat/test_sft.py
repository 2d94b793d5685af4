"""``SFTDataset``: ids, masks and labels equal those of a prepared store."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader

import batchloom
from batchloom import TokenizerError
from batchloom.compat import SFTDataset
from batchloom.core.errors import RecordError, SchemaError
from chat.conftest import tokenizer_folders  # noqa: F401
from preparation.stores import write_jsonl
from sources.hub_server import serve_hub
from sources.test_saved_datasets import save_dataset

QUESTIONS = [{"question": f"How much is {n} and {n}?", "answer": f"It is {2 * n}.", "id": n} for n in range(60)]
CHAT = [
    {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{n} <|im_end|> legs?"},
        {"role": "assistant", "content": "Eight é."},
        {"role": "user", "content": "And a bee?"},
        {"role": "assistant", "content": "Six."},
    ]}
    for n in range(20)
]  # fmt: skip
TEXTS = [{"text": "Déjà\r\nvu"}, {"text": " "}, {"text": "x" * 300}]


def to_lists(dataset):
    return [{name: values.tolist() for name, values in row.items()} for row in dataset]


def read_prepared_rows(folder, rows, seq_len, **settings):
    """Return the unpadded one-document rows of a loader over the prepared store."""
    write_jsonl(folder / "in.jsonl", rows)
    settings = {"val_fraction": 0, **settings}
    store = batchloom.open_store(batchloom.prepare(folder / "in.jsonl", out=folder / "store", **settings).path)
    loader = batchloom.Loader(
        *[store], seq_len=seq_len, global_batch_size=1, packing="none", overlong="truncate",
        shuffle=False, output="numpy", rank=0, world_size=1,
    )  # fmt: skip
    unpadded = []
    for number, batch in enumerate(loader):
        size = min(len(store[number].ids), seq_len)
        unpadded.append(
            {
                "input_ids": batch["input_ids"][0, :size].tolist(),
                "labels": batch["labels"][0, :size].tolist(),
            }
        )
    return unpadded


@pytest.mark.parametrize(
    ("rows", "template", "tokenizer"),
    [
        pytest.param(QUESTIONS, None, "gpt2", marks=pytest.mark.slow),
        (QUESTIONS, "chatml", "bytes"),
        (CHAT, "chatml", "nfc"),
        (CHAT, "llama3", "bytes"),
        (QUESTIONS, None, "metaspace"),
        (TEXTS, None, "bytes"),
    ],
)
def test_rows_are_those_of_the_prepared_store(tmp_path, tokenizer_folders, rows, template, tokenizer):  # noqa: F811
    spec = str(tokenizer_folders.get(tokenizer, tokenizer))
    expected = read_prepared_rows(tmp_path, rows, 100, tokenizer=spec, template=template)
    dataset = SFTDataset(tmp_path / "in.jsonl", spec, 100, formatter=template)
    assert [{k: v for k, v in row.items() if k != "loss_mask"} for row in to_lists(dataset)] == expected
    for row in to_lists(dataset):
        assert row["loss_mask"] == [int(label != -100) for label in row["labels"]]
        assert any(row["loss_mask"])


def test_tokenizers_of_other_libraries(tmp_path, tokenizer_folders):  # noqa: F811
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    write_jsonl(tmp_path / "in.jsonl", QUESTIONS[:5])
    theirs = AutoTokenizer.from_pretrained(tokenizer_folders["bytes"])
    theirs.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    rows = to_lists(SFTDataset(tmp_path / "in.jsonl", theirs, 100))
    for row, question in zip(rows, QUESTIONS, strict=False):
        turns = [
            {"role": "user", "content": question["question"]},
            {"role": "assistant", "content": question["answer"]},
        ]
        encoding = theirs.apply_chat_template(turns, tokenize=True, return_dict=True)
        assert row["input_ids"] == encoding["input_ids"]
        trained = [label for label in row["labels"] if label != -100]
        assert theirs.decode(trained) == question["answer"] + "<|im_end|>"
    ours = batchloom.open_store(
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes").path
    ).tokenizer
    assert len(SFTDataset(tmp_path / "in.jsonl", ours, 100)) == 5
    raw = Tokenizer.from_file(str(tokenizer_folders["bytes"] / "tokenizer.json"))
    assert len(SFTDataset(tmp_path / "in.jsonl", raw, 100)) == 5
    with pytest.raises(TokenizerError, match="is unknown: give a name or a path"):
        SFTDataset(tmp_path / "in.jsonl", object(), 100)


@pytest.mark.slow
def test_encodings_of_tiktoken_are_identified_by_their_names(tmp_path):
    import tiktoken

    write_jsonl(tmp_path / "in.jsonl", QUESTIONS[:5])
    ranks = {bytes([n]): n for n in range(256)}
    byte_encoding = tiktoken.Encoding("gpt2", pat_str="a", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    with pytest.raises(TokenizerError, match="has 257 ids, and gpt2 has 50,257: they differ"):
        SFTDataset(tmp_path / "in.jsonl", byte_encoding, 100)
    long_ranks = {bytes([n // 250, n % 250, 7]): n for n in range(256, 50256)}
    gpt2 = tiktoken.Encoding(
        "gpt2", pat_str="a", mergeable_ranks=ranks | long_ranks, special_tokens={"<|endoftext|>": 50256}
    )
    rows = to_lists(SFTDataset(tmp_path / "in.jsonl", gpt2, 100))
    assert rows == to_lists(SFTDataset(tmp_path / "in.jsonl", "gpt2", 100))


def test_formatters(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    path = tmp_path / "in.jsonl"

    def turns(row):
        return [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]

    detected = to_lists(SFTDataset(path, "bytes", 100))
    assert to_lists(SFTDataset(path, "bytes", 100, formatter=turns)) == detected
    renamed = lambda row: {"instruction": row["question"], "output": row["answer"]}  # noqa: E731
    assert to_lists(SFTDataset(path, "bytes", 100, formatter=renamed)) == detected
    texts = SFTDataset(path, "bytes", 100, formatter=lambda row: row["answer"])
    assert bytes(texts[3]["input_ids"][:-1].tolist()) == QUESTIONS[3]["answer"].encode()
    alpaca = SFTDataset(path, "bytes", 200, formatter="alpaca")
    assert b"### Instruction:" in bytes([n for n in alpaca[0]["input_ids"].tolist() if n < 256])
    with pytest.raises(SchemaError, match="instruction"):
        SFTDataset(path, "bytes", 100, formatter="instruction")


@pytest.mark.parametrize("name", ["messages", "sharegpt", "prompt_completion", "text"])
def test_schemas_by_name(tmp_path, name):
    other_fields = {"prompt": "p", "completion": "c", "text": "t", "conversations": CHAT[0]["messages"]}
    write_jsonl(tmp_path / "in.jsonl", [CHAT[0] | other_fields] * 3)
    beginnings = {"messages": b"System:", "sharegpt": b"System:", "text": b"t"}
    row = SFTDataset(tmp_path / "in.jsonl", "bytes", 500, formatter=name)[0]
    ids = bytes([n for n in row["input_ids"].tolist() if n < 256])
    assert ids.startswith(beginnings.get(name, b"User:\np"))


def test_a_formatter_that_fails_names_the_record(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    with pytest.raises(RecordError, match=r"in.jsonl, line 8: the formatter returned null for it"):
        SFTDataset(tmp_path / "in.jsonl", "bytes", 100, formatter=lambda r: r["answer"] if r["id"] != 7 else None)  # fmt: skip


def test_no_row_without_anything_to_train(tmp_path, caplog):
    long = [{"question": "x" * n, "answer": "yes"} for n in range(60, 120)]
    write_jsonl(tmp_path / "in.jsonl", long)
    dataset = SFTDataset(tmp_path / "in.jsonl", "bytes", 100)
    assert 0 < len(dataset) < 60
    assert dataset.left_out.total() == 60 - len(dataset)
    assert all(max(row["labels"]) != -100 and len(row["labels"]) <= 100 for row in to_lists(dataset))
    assert f"left out: {60 - len(dataset)} nothing to train" in caplog.text
    with pytest.raises(FileNotFoundError, match="gives no row to train"):
        SFTDataset(tmp_path / "in.jsonl", "bytes", 20)


def test_order_by_seed_and_batches_in_workers(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    path = tmp_path / "in.jsonl"
    rows = to_lists(SFTDataset(path, "bytes", 100))
    first, second = (to_lists(SFTDataset(path, "bytes", 100, seed=seed)) for seed in (1, 2))
    assert first == to_lists(SFTDataset(path, "bytes", 100, seed=1)) != second != rows
    assert sorted(map(json.dumps, first)) == sorted(map(json.dumps, rows))
    dataset = pickle.loads(pickle.dumps(SFTDataset(path, "bytes", 100)))
    loader = DataLoader(dataset, batch_size=7, collate_fn=dataset.collate, num_workers=1)
    number = 0
    for batch in loader:
        for ids, labels, mask in zip(*batch.values(), strict=True):
            size = len(rows[number]["input_ids"])
            assert ids[:size].tolist() == rows[number]["input_ids"]
            assert labels.tolist() == rows[number]["labels"] + [-100] * (len(ids) - size)
            assert mask.sum() == sum(rows[number]["loss_mask"])
            number += 1
    assert number == len(rows)


def test_splits(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    with pytest.raises(ValueError, match="which is one file and has no splits"):
        SFTDataset(tmp_path / "in.jsonl", "bytes", split="test")
    for name, rows in (("train", QUESTIONS[:50]), ("test", QUESTIONS[50:])):
        save_dataset(tmp_path / "saved" / name, rows)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(SFTDataset(tmp_path / "saved", "bytes")) == 50
    assert len(SFTDataset(tmp_path / "saved", "bytes", split="test")) == 10


HUB_CARD = b"""---
configs:
- {config_name: default, data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]}
- {config_name: small, data_files: [{split: test, path: small/test.jsonl}]}
---
"""
# Dataset, split, and the name and number of its rows.
HUB_SPLITS = [
    ("org/sums", "train", "a", 1),
    ("org/sums", "test", "b", 3),
    ("org/sums:small@main", "test", "c", 2),
    ("org/sums/train", "test", "b", 3),
    ("tiny_shakespeare", "test", "d", 1),
]


@pytest.mark.slow
def test_splits_of_the_hub(tmp_path):
    code = (
        "from batchloom.compat import SFTDataset\n"
        f"for place, split, _, _ in {HUB_SPLITS}:\n"
        "    rows = SFTDataset(place, 'bytes', split=split, output='numpy')\n"
        "    print(len(rows), bytes(rows[0]['input_ids'].astype('u1'))[6:7].decode())"
    )
    files = {
        f"{file}.jsonl": b'{"question": "%s?", "answer": "yes"}\n' % name.encode() * count
        for file, name, count in (("train", "a", 1), ("test", "b", 3), ("small/test", "c", 2))
    }
    shakespeare = {"test.jsonl": b'{"question": "d?", "answer": "yes"}\n'}
    repos = {"org/sums": {"README.md": HUB_CARD, **files}, "karpathy/tiny_shakespeare": shakespeare}
    with serve_hub(repos) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
        )
    expected = [f"{count} {name}" for _, _, name, count in HUB_SPLITS]
    assert result.stdout.splitlines() == expected, result.stderr


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 4 + "{no json}\n")
    with pytest.raises(json.JSONDecodeError, match="Invalid JSON on line 5 in in.jsonl"):
        SFTDataset(tmp_path / "in.jsonl", "bytes")


def test_real_conversations(real_data):
    dataset = SFTDataset(real_data / "gsm8k_train.jsonl", "bytes", 4000, output="numpy")
    assert len(dataset) == 7473
    lines = (real_data / "gsm8k_train.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    for number in range(0, 7473, 500):
        row = dataset[number]
        trained = row["input_ids"][row["loss_mask"] == 1]
        assert bytes(trained[:-1].astype(np.uint8)).decode() == answers[number]


def test_loss_weights_are_no_whole_numbers(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc", "weight": 0.5}, {"text": "d", "weight": 2}])
    for formatter in (None, dict):
        dataset = SFTDataset(path, tokenizer="bytes", max_seq_length=10, formatter=formatter)
        assert dataset[0]["loss_weights"].tolist() == [0, 0.5, 0.5, 0.5]
        batch = dataset.collate([dataset[0], dataset[1]])
        assert batch["loss_weights"].tolist() == [[0, 0.5, 0.5, 0.5], [0, 2, 0, 0]]
