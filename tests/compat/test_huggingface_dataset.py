"""``create_huggingface_dataset``: documents by rank, from files and a local hub."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from batchloom import InputError
from batchloom.compat import SFTDataset, create_huggingface_dataset
from preparation.stores import write_jsonl
from sources.hub_server import serve_hub

WORDS = ["spider", "bee", "legs", "how many", "eight", "six"]
TEXTS = [f"{n}: " + " ".join(WORDS[n % 6 :]) * (n % 7 + 1) for n in range(203)]


def list_documents(batches):
    """Return the documents in rows of inputs, cut at their end tokens."""
    documents = []
    for inputs, _ in batches:
        for row in inputs.tolist():
            document = []
            for token in row:
                if token != 256:
                    document.append(token)
                elif document:
                    documents.append(bytes(document).decode())
                    document = []
            assert not document
    return documents


def read_first_epoch(dataset, documents):
    """Return the documents of the batches that hold the first ``documents`` ones."""
    received = []
    for batch in dataset:
        received += list_documents([batch])
        if len(received) >= documents:
            return received
    return received


@pytest.fixture
def texts_path(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    return str(tmp_path / "in.jsonl")


def make_dataset(name, rank=0, world_size=1, **settings):
    defaults = {"num_batches": 400, "batch_size": 1, "seq_len": 300, "buffer_size": 20}
    return create_huggingface_dataset(
        name, rank, world_size, tokenizer_name="bytes", output="numpy", **defaults | settings
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_documents_exactly(texts_path, world_size):
    for rank in range(world_size):
        expected = TEXTS[rank::world_size]
        assert sorted(read_first_epoch(make_dataset(texts_path, rank, world_size), len(expected))) == sorted(expected)


def test_empty_and_bad_records_belong_to_no_rank(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a", "", "b", " \n", "c", "d"]]
    (tmp_path / "in.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]))
    path = str(tmp_path / "in.jsonl")
    assert [sorted(read_first_epoch(make_dataset(path, rank, 2), 2)) for rank in (0, 1)] == [
        ["a", "c"],
        ["b", "d"],
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"chosen": "q: yes", "rejected": "q: no"},
        {"prompt": "q", "completion": "yes", "label": True},
    ],
)
def test_preferences_are_refused(tmp_path, row):
    write_jsonl(tmp_path / "in.jsonl", [row] * 3)
    with pytest.raises(InputError, match="holds (preference pairs|labelled answers)"):
        make_dataset(str(tmp_path / "in.jsonl"))[0]
    with pytest.raises(InputError, match="holds (preference pairs|labelled answers)"):
        SFTDataset(tmp_path / "in.jsonl", "bytes")
    dataset = SFTDataset(tmp_path / "in.jsonl", "bytes", formatter=lambda _: "q: yes")
    assert len(dataset) == 3


def test_labels_are_the_next_tokens_inside_each_document(texts_path):
    inputs, labels = make_dataset(texts_path)[0]
    for row, targets in zip(inputs, labels, strict=True):
        following = np.append(row[1:], 0)
        ends = row == 256
        assert (targets[ends] == -100).all()
        assert (targets[~ends] == following[~ends]).all()


def test_the_order_is_by_seed_within_the_buffer(texts_path):
    orders = [read_first_epoch(make_dataset(texts_path, seed=seed), 203) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(orders[0][n : n + 20]) for n in range(0, 200, 20)] == [
        sorted(TEXTS[n : n + 20]) for n in range(0, 200, 20)
    ]


def test_the_data_begins_anew_in_another_order(texts_path):
    documents = read_first_epoch(make_dataset(texts_path), 406)
    assert sorted(documents[:203]) == sorted(documents[203:406]) == sorted(TEXTS)
    assert documents[:203] != documents[203:406]


def test_a_sequence(texts_path):
    dataset = make_dataset(texts_path, num_batches=7, batch_size=3)
    batches = list(dataset)
    assert len(dataset) == len(batches) == 7
    for number in (3, 0, 6, -1, 5):
        for actual, expected in zip(dataset[number], batches[number], strict=True):
            assert actual.shape == (3, 300)
            assert (actual == expected).all()
    assert [pair[0].tolist() for pair in dataset[2:4]] == [b[0].tolist() for b in batches[2:4]]
    unpickled = pickle.loads(pickle.dumps(dataset))
    assert all((unpickled[n][0] == batches[n][0]).all() for n in range(7))
    for number in (7, -8):
        with pytest.raises(IndexError, match="there are 7"):
            dataset[number]
    x, y = create_huggingface_dataset(texts_path, tokenizer_name="bytes", num_batches=1, seq_len=64)[0]
    assert x.shape == y.shape == (8, 64)
    assert str(x.dtype) == "torch.int64"


def test_conversations_are_masked(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"question": "one?", "answer": "two"}] * 30)
    inputs, labels = make_dataset(str(tmp_path / "in.jsonl"))[0]
    trained = bytes(n % 256 for n in labels[labels != -100].tolist()).split(b"\0")
    assert set(trained) == {b"two", b""}
    assert b"one?" in bytes(n % 256 for n in inputs[0].tolist())


def test_bad_records_have_a_budget(tmp_path, caplog):
    rows = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("\n".join([*rows[:5], "{broken", *rows[5:]]))
    assert sorted(read_first_epoch(make_dataset(str(tmp_path / "in.jsonl")), 203)) == sorted(TEXTS)
    assert "Left out: Invalid JSON on line 6 in in.jsonl" in caplog.text
    (tmp_path / "in.jsonl").write_text("\n".join(rows + ["{broken"] * 11))
    with pytest.raises(ValueError, match="11 of 214 records are bad|11 bad records"):
        read_first_epoch(make_dataset(str(tmp_path / "in.jsonl")), 203)


def test_misuse_and_a_rank_without_documents(texts_path, tmp_path):
    with pytest.raises(ValueError, match=r"num_batches: 0 is not .*; buffer_size: 'x' is not"):
        make_dataset(texts_path, num_batches=0, buffer_size="x")
    with pytest.raises(ValueError, match="rank: 4 is not one of 0 to 3"):
        make_dataset(texts_path, 4, 4)
    for rank in ("1", None):
        with pytest.raises(ValueError, match="rank: .* is not one of 0 to 3"):
            make_dataset(texts_path, rank, 4)
    write_jsonl(tmp_path / "few.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(ValueError, match="has no document for rank 3 of 8; use fewer ranks"):
        make_dataset(str(tmp_path / "few.jsonl"), 3, 8)[0]
    # The data set is looked up at the first batch.
    dataset = make_dataset("no/such")
    assert len(dataset) == 400
    with pytest.raises((FileNotFoundError, ImportError, ConnectionError)):
        dataset[0]


SCRIPT = """
import json, sys
from batchloom.compat import SFTDataset, create_huggingface_dataset
from batchloom.core.errors import InputError
from batchloom.core.errors import BatchloomError
datasets = [
    create_huggingface_dataset(
        name, rank, 3, num_batches=4, batch_size=2, tokenizer_name="bytes", seq_len=64,
        streaming=streaming, buffer_size=10, output="numpy",
    )
    for name in sys.argv[1:] for rank in range(3) for streaming in (True, False)
]
print("lazy" if "huggingface_hub" not in sys.modules else "not lazy")
for dataset in datasets:
    try:
        print(json.dumps([inputs.tolist() for inputs, _ in dataset]))
    except BatchloomError as error:
        print(json.dumps([[base.__name__ for base in type(error).__mro__], str(error)]))
"""


@pytest.mark.slow
def test_data_sets_of_the_hub(tmp_path):
    lines = b"".join(json.dumps({"text": f"{n:03d}"}).encode() + b"\n" for n in range(40))
    with serve_hub({"org/plain": {"README.md": b"# hi", "train.jsonl": lines}}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, "org/plain", "org/none"],
            capture_output=True, text=True, env=os.environ | environment, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, *answers = result.stdout.splitlines()
    assert first == "lazy"
    for number, answer in enumerate(answers[:6]):
        rank = number // 2
        documents = list_documents([(np.array(inputs), None) for inputs in json.loads(answer)])
        expected = [f"{n:03d}" for n in range(rank, 40, 3)]
        assert set(documents) == set(expected)
        assert sorted(documents[: len(expected)]) == expected
    for answer in answers[6:]:
        kinds, sentence = json.loads(answer)
        assert "FileNotFoundError" in kinds
        assert sentence.startswith("Dataset 'org/none' not found")
