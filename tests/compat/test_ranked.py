"""``create_huggingface_dataset``: document i for rank i mod world_size, against a hub on loopback."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from batchloom.compat import create_huggingface_dataset
from prepare.stores import jsonl
from sources.hub_server import hub_serving

WORDS = ["spider", "bee", "legs", "how many", "eight", "six"]
TEXTS = [f"{n}: " + " ".join(WORDS[n % 6 :]) * (n % 7 + 1) for n in range(203)]


def documents_of(batches):
    """The documents in rows of inputs, whole, from their end tokens."""
    found = []
    for inputs, _ in batches:
        for row in inputs.tolist():
            piece = []
            for token in row:
                if token != 256:
                    piece.append(token)
                elif piece:
                    found.append(bytes(piece).decode())
                    piece = []
            assert not piece
    return found


def first_epoch(dataset, documents):
    """Documents of the rows in which the first ``documents`` documents lie."""
    found = []
    for batch in dataset:
        found += documents_of([batch])
        if len(found) >= documents:
            return found
    return found


@pytest.fixture
def here(tmp_path):
    jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    return str(tmp_path / "in.jsonl")


def made(name, rank=0, world_size=1, **settings):
    known = {"num_batches": 400, "batch_size": 1, "seq_len": 300, "buffer_size": 20}
    return create_huggingface_dataset(
        name, rank, world_size, tokenizer_name="bytes", output="numpy", **known | settings
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_documents_exactly(here, world_size):
    for rank in range(world_size):
        expected = TEXTS[rank::world_size]
        assert sorted(first_epoch(made(here, rank, world_size), len(expected))) == sorted(expected)


def test_empty_and_bad_records_are_nobodys(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a", "", "b", " \n", "c", "d"]]
    (tmp_path / "in.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]))
    where = str(tmp_path / "in.jsonl")
    assert [sorted(first_epoch(made(where, rank, 2), 2)) for rank in (0, 1)] == [
        ["a", "c"],
        ["b", "d"],
    ]


CODE = """
import json, sys
from batchloom.compat import create_huggingface_dataset
from batchloom.core.errors import BatchloomError
made = [
    create_huggingface_dataset(
        name, rank, 3, num_batches=4, batch_size=2, tokenizer_name="bytes", seq_len=64,
        streaming=streaming, buffer_size=10, output="numpy",
    )
    for name in sys.argv[1:] for rank in range(3) for streaming in (True, False)
]
print("lazy" if "huggingface_hub" not in sys.modules else "not lazy")
for one in made:
    try:
        print(json.dumps([inputs.tolist() for inputs, _ in one]))
    except BatchloomError as error:
        print(json.dumps([[base.__name__ for base in type(error).__mro__], str(error)]))
"""


def test_data_sets_of_the_hub(tmp_path):
    lines = b"".join(json.dumps({"text": f"{n:03d}"}).encode() + b"\n" for n in range(40))
    with hub_serving({"org/plain": {"README.md": b"# hi", "train.jsonl": lines}}) as hub:
        known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CODE, "org/plain", "org/none"],
            capture_output=True, text=True, env=os.environ | known, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *answers = done.stdout.splitlines()
    assert first == "lazy"
    for number, answer in enumerate(answers[:6]):
        rank = number // 2
        found = documents_of([(np.array(inputs), None) for inputs in json.loads(answer)])
        mine = [f"{n:03d}" for n in range(rank, 40, 3)]
        assert set(found) == set(mine)
        assert sorted(found[: len(mine)]) == mine
    for answer in answers[6:]:
        kinds, sentence = json.loads(answer)
        assert "FileNotFoundError" in kinds
        assert sentence.startswith("Dataset 'org/none' not found")
