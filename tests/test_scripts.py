"""The four files of ``scripts/``: the old commands in a few lines each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchloom
from batchloom.testing import write_store
from processes import start_processes
from sources.hub_server import serve_hub

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def run_script_in_folder(tmp_path, monkeypatch):
    """Return a function that runs a script in ``tmp_path``, in a separate process."""
    monkeypatch.chdir(tmp_path)

    def run_script(name, *words):
        with start_processes(SCRIPTS / name, *words) as (process,):
            return process.wait()

    return run_script


def test_there_are_four_short_scripts():
    sizes = {path.name: path.read_text().count("\n") for path in SCRIPTS.iterdir() if path.is_file()}
    names = ("check_data_loading", "convert_to_jsonl", "prepare_dataset", "train")
    assert set(sizes) == {f"{name}.py" for name in names}
    assert max(sizes.values()) <= 26


def test_from_texts_to_a_trained_model(tmp_path, run_script_in_folder):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\n\n".join(f"{name} says {n}" for n in range(400)))
    prepare = ["--input_files", "a.txt", "b.txt", "--out_dir", "store", "--tokenization", "bytes"]
    options = ["--tokens_per_shard", "4000", "--no_dedup", "--no_normalize"]
    result = run_script_in_folder("prepare_dataset.py", *prepare, *options, "--split_on", "paragraph")
    assert result.returncode == 0, result.stderr
    recipe = json.loads((tmp_path / "store/dataset_metadata.json").read_text())["recipe"]
    assert (recipe["inputs"], recipe["tokens_per_shard"]) == (["a.txt", "b.txt"], 4000)
    assert (recipe["dedup"], recipe["reading"]["normalize"]) == ("none", False)

    result = run_script_in_folder("check_data_loading.py", "store")
    assert result.returncode == 0, result.stderr
    assert "first batch: (4, 128)" in result.stdout
    assert "source=real store/train" in result.stdout

    size = ["--max_iters", "1", "--seq_len", "32", "--global_batch_size", "2"]
    result = run_script_in_folder("train.py", "--model_name", "tiny", "--dataset_dir", "store", *size)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/tiny/log.jsonl").exists()


def test_training_on_a_file_with_a_configuration(tmp_path, run_script_in_folder):
    (tmp_path / "in.txt").write_text("some words to learn from. " * 200)
    config = json.loads((SCRIPTS.parent / "configs/tiny.json").read_text())
    config["model"] = {"layers": 1, "heads": 1, "width": 16}
    (tmp_path / "small.json").write_text(json.dumps(config))
    words = ["--input_file", "in.txt", "--tokenizer", "bytes", "--config_file", "small.json"]
    size = ["--max_iters", "1", "--seq_len", "16", "--global_batch_size", "2"]
    result = run_script_in_folder("train.py", *words, *size)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/small/log.jsonl").exists()


def test_to_json_lines(tmp_path, run_script_in_folder):
    (tmp_path / "in.csv").write_text('q,a\n"one, two",3\n')
    result = run_script_in_folder("convert_to_jsonl.py", "--csv", "in.csv", "--output", "out.jsonl")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"q": "one, two", "a": "3"}


@pytest.mark.slow
def test_a_data_set_of_the_hub_to_json_lines(tmp_path):
    """Run the script in a separate process, as a user does."""
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    with serve_hub({"org/plain": {"README.md": b"# hi", "train.jsonl": lines}}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        words = ["--dataset", "org/plain", "--output", "hub.jsonl"]
        result = subprocess.run(
            [sys.executable, SCRIPTS / "convert_to_jsonl.py", *words],
            capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "hub.jsonl").read_text().splitlines()]
    assert rows == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        ("store", 1, "FAULT"),
        ("nowhere", 1, "nowhere"),
        ("in.txt", 1, "batchloom prepare in.txt"),
        ("unseen", 1, "no batches: "),
        ("pairs", 1, "holds preference pairs"),
    ],
)
def test_checking_data_without_batches(tmp_path, run_script_in_folder, data, code, message):
    (tmp_path / "in.txt").write_text("words")
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    batchloom.prepare(tmp_path / "pairs.jsonl", out=tmp_path / "pairs", tokenizer="bytes")
    write_store(tmp_path / "unseen", {"val": [[1, 2, 256]]})
    write_store(tmp_path / "store", [[1, 2, 3]])
    (tmp_path / "store/train/shard_00000.bin").write_bytes(b"\0" * 6)
    result = run_script_in_folder("check_data_loading.py", data)
    assert result.returncode == code
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
