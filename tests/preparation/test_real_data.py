"""Real files from other sources, in the folder BATCHLOOM_REAL_DATA."""

import gzip
import json
import subprocess
import sys

import pytest

from batchloom import open_store
from preparation.stores import hash_store_files, prepare_store, read_texts


def test_plain_text_is_kept_completely(real_data, tmp_path):
    path = real_data / "tinyshakespeare.txt"
    result = prepare_store(path, tmp_path / "out", val_fraction=0.1)
    assert 10 < result.counts.documents < 20
    assert "".join(read_texts(tmp_path / "out")) == path.read_text()


@pytest.mark.parametrize(
    ("name", "field", "count"),
    [
        ("c4_demo.jsonl", "text", 300),
        pytest.param("gsm8k_train.jsonl", "question", 7473, marks=pytest.mark.slow),
        ("HumanEval.jsonl.gz", "prompt", 164),
    ],
)
def test_records_of_three_kinds(real_data, tmp_path, name, field, count):
    path, out = real_data / name, tmp_path / "out"
    prepare_store(path, out, text_field=field, val_fraction=0.1, normalize=False)
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    records = [json.loads(line)[field] for line in data.splitlines()]
    assert len(records) == count
    assert read_texts(out) == records


@pytest.mark.slow
def test_a_learned_tokenizer_gives_the_text_back(real_data, tmp_path):
    inputs = [real_data / "tinyshakespeare.txt", real_data / "c4_demo.jsonl"]
    result = prepare_store(inputs, tmp_path / "out", tokenizer="train:4096", val_fraction=0.1)
    assert set(result.subsets) == {"train", "val"}
    for split in ("train", "val"):
        store = open_store(tmp_path / "out", split)
        document = store[len(store) // 2]
        assert document.text.endswith("<|endoftext|>")
        assert document.text.removesuffix("<|endoftext|>") in _join_texts(inputs)
    prepare_store(inputs, tmp_path / "again", tokenizer="train:4096", val_fraction=0.1)
    assert hash_store_files(tmp_path / "again") == hash_store_files(tmp_path / "out")


def _join_texts(inputs):
    text, records = inputs
    return text.read_text() + "\0".join(json.loads(line)["text"] for line in records.read_text().splitlines())


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path):
    """A line of 150 MB, and short lines around it, are read in under 210 MiB."""
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write('{"text":"first"}\n{"text":"')
        for _ in range(150):
            file.write("x" * 10**6)
        file.write('"}\n{"text":"last"}\n')
    code = (
        "import sys\n"
        "from preparation.stores import prepare_store\n"
        "prepare_store(sys.argv[1], sys.argv[2])\n"
        # Not getrusage: its value begins with the memory of the forking process.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.jsonl", tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert int(process.stdout) < 210 * 1024
    assert read_texts(tmp_path / "out") == ["first", "last"]
