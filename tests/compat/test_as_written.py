"""Calls that people bring along from other systems, as they stand there."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchloom.compat import (
    WorkerClient,
    WorkerConfig,
    create_huggingface_dataset,
    list_available_datasets,
    load_jsonl_file,
)
from batchloom.core.errors import SettingsError
from batchloom.preparation.settings import ProcessorConfig
from batchloom.train import DataRequest, TrainRequest
from chat.conftest import make_byte_level_tokenizer
from compat import multimodal_worker
from compat.multimodal_worker import write_conversations
from processes import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
VERSE = "\n\n".join(f"First Citizen {n}:\nBefore we proceed any further, hear me speak {n} times." for n in range(400))


def run_script(folder, name, *words):
    command = [sys.executable, SCRIPTS / name, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_name_is_free(tmp_path, monkeypatch, ranks):
    """``train.py`` on a text, and on a store with a file of sizes."""
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(VERSE)
    prepared = run_script(tmp_path, "prepare_dataset.py", "--input_files", "input.txt", "--out_dir", "D")
    assert prepared.returncode == 0, prepared.stderr
    size = ["--seq_len", "32", "--global_batch_size", "2", "--max_iters", "2"]
    calls = {
        "my_model": ["--model_name", "my_model", "--input_file", "input.txt"],
        "wiki_gpt": [
            "--dataset_dir",
            "D",
            "--model_name",
            "wiki_gpt",
            "--config_file",
            str(ROOT / "configs/tiny.json"),
        ],
    }
    for name, words in calls.items():
        for result in run_ranks(SCRIPTS / "train.py", *words, *size, ranks=ranks):
            assert result.returncode == 0, result.stderr[-4000:]
        assert (tmp_path / "runs" / name / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "config", "folder", "note"),
    [
        ("my_model", None, "runs/my_model", "'my_model' names the run; its sizes are those of tiny"),
        ("wiki_gpt", "configs/150M_1024.json", "runs/wiki_gpt", ""),
        ("150M_1024", None, "runs/150M_1024", ""),
        (None, "configs/own.json", "runs/own", ""),
    ],
)
def test_the_name_is_that_of_the_run(name, config, folder, note):
    data = DataRequest(data=Path("D"))
    request = TrainRequest(data=data, model_name=name, config_file=config and Path(config))
    assert request.run_path == Path(folder)
    assert note in request.describe_name()
    assert bool(request.describe_name()) == bool(note)


@pytest.mark.parametrize("name", ["150M_1025", "../x", ".."])
def test_a_name_that_resembles_a_configuration_is_refused(name):
    with pytest.raises(SettingsError, match="--model-name"):
        TrainRequest(data=DataRequest(data=Path("D")), model_name=name)


def test_a_worker_needs_neither_name_nor_type(tmp_path):
    lines = []
    config = WorkerConfig(batch_size=1, seq_len=16, num_steps=2, out=tmp_path / "run", device="cpu")
    assert config.worker_id != WorkerConfig().worker_id

    async def train():
        worker = WorkerClient(config, lines.append)
        await worker.start()
        report = await worker.run_training(use_distributed=True)
        await worker.stop()
        return report

    report = asyncio.run(train())
    assert report.finished
    assert report.source == "synthetic"
    assert any("synthetic data" in line for line in lines)


def test_data_sets_with_short_names():
    known = {entry["name"]: entry["description"] for entry in list_available_datasets()}
    assert known.keys() == {"fineweb", "fineweb-edu", "pile", "tiny_shakespeare", "shakespeare"}
    assert all(known.values())
    config = WorkerConfig(dataset_type="huggingface", dataset_name="tiny_shakespeare", batch_size=16, seq_len=256)
    assert config.data_source == "tiny_shakespeare"


def test_batches_of_a_data_set(tmp_path):
    (tmp_path / "verse.txt").write_text(VERSE)
    dataset = create_huggingface_dataset(
        dataset_name=tmp_path / "verse.txt",
        rank=0,
        world_size=1,
        num_batches=3,
        batch_size=2,
        seq_len=64,
        streaming=True,
    )
    assert len(dataset) == 3
    assert [tuple(inputs.shape) for inputs, _ in dataset] == [(2, 64)] * 3


@pytest.mark.parametrize("text", ['{"a": 1}', '{\n"a": 1\n}\n'])
def test_a_json_file_with_an_object_is_no_list(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="JSON file must contain a list of objects"):
        load_jsonl_file(tmp_path / "a.json")


def test_data_loading_is_checked_where_the_data_is(tmp_path):
    nothing = run_script(tmp_path, "check_data_loading.py")
    assert (nothing.returncode, nothing.stdout.split(":")[0]) == (
        1, "found neither data/train.jsonl nor a store nor a data file here",
    )  # fmt: skip
    (tmp_path / "data").mkdir()
    for path in ("b.jsonl", "data/train.jsonl"):
        (tmp_path / path).write_text(json.dumps({"text": "x"}) + "\n")
        found = run_script(tmp_path, "check_data_loading.py")
        assert found.stdout.startswith(f"found {path}\n")
        assert "1 documents" in found.stdout or "1 document" in found.stdout


@pytest.fixture
def multimodal_folder(tmp_path):
    write_conversations(tmp_path / "texts.json")
    make_byte_level_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def check_log(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(f"perf/global_seq_len_{name}" in lines[0] for name in ("avg", "min", "max"))


def test_a_trainer_takes_a_multimodal_dataset_and_its_collator(multimodal_folder):
    trainer = multimodal_worker.train(multimodal_folder, "iterable")
    check_log(multimodal_folder / "out-iterable" / "log.jsonl")
    assert trainer.loader.plan.spec.seq_len == 256


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_train_on_a_multimodal_dataset(multimodal_folder, kind, ranks):
    for result in run_ranks(Path(multimodal_worker.__file__), multimodal_folder, kind, ranks=ranks):
        assert result.returncode == 0, result.stderr[-4000:]
    check_log(multimodal_folder / f"out-{kind}" / "log.jsonl")


def test_the_kind_of_a_processor_is_its_place_if_it_names_one(tmp_path):
    make_byte_level_tokenizer(tmp_path / "tokenizer")
    for kind, name in ((str(tmp_path / "tokenizer"), str(tmp_path / "tokenizer")), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")):
        assert ProcessorConfig(processor_type=kind).processor_name == name
    assert ProcessorConfig(processor_name="own", processor_type="qwen3_vl").processor_name == "own"
    with pytest.raises(SettingsError, match="processor_name: missing; give a path or a Hub id"):
        ProcessorConfig(processor_type="qwen3_vl")
