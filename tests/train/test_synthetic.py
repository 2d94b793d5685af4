"""Training on synthetic data, by name or as a fallback for missing data."""

import json
import os
import stat

import numpy as np
import pytest

import batchloom
from batchloom.adapters.logging import read_log
from batchloom.cli import run_command_line
from processes import run_ranks, run_two_ranks
from train.runs import BASE_SETTINGS, WORKER, read_steps, run_training, small_store

TEXT = "dummy:documents=2000,vocab=64,lengths=8-120,kind=text"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps({**BASE_SETTINGS, "steps": 6}))
    return path


def train(*args):
    return run_command_line(["train", "--device", "cpu", *map(str, args)])


def compute_unigram_entropy(store):
    """Return the unigram entropy of a store, in nats per token."""
    ids = np.concatenate([store[number].ids for number in range(500)])
    shares = np.bincount(ids) / ids.size
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


@pytest.mark.slow
def test_text_is_learned_and_noise_is_not(tmp_path):
    changes = {"steps": 120, "global_batch_size": 8, "seq_len": 64}
    losses = {}
    for kind in ("text", "random"):
        store = batchloom.open_store(TEXT.replace("text", kind))
        run_training(store, tmp_path / kind, changes)
        losses[kind] = np.mean([loss for _, loss, *_ in read_steps(tmp_path / kind)[-10:]])
    bound = compute_unigram_entropy(batchloom.open_store(TEXT))
    assert bound < np.log(64)
    assert losses["text"] < bound - 1
    assert losses["random"] > np.log(63) - 0.1


def test_every_line_of_a_run_names_synthetic_data(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert train("--data", TEXT, "--config-file", config, "--out", out) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert len(lines) > 10
    assert all(line.count("source=synthetic") == 1 for line in lines)
    assert "real" not in output.out
    entries = read_log(out / "log.jsonl")
    assert {entry["origin"].split()[0] for entry in entries} == {"source=synthetic"}
    assert json.loads((out / "run.json").read_text())["data"]["name"] == TEXT.replace(",kind", ",seed=0,kind")


def test_a_store_of_synthetic_data_is_named_synthetic(config, tmp_path, capsys):
    batchloom.prepare(TEXT, out=tmp_path / "s", val_fraction=0.1)
    out = tmp_path / "run"
    assert train("--data", tmp_path / "s", "--config-file", config, "--out", out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("val loss" in line for line in lines) == 1
    assert all(line.count("source=synthetic") == 1 for line in lines)
    assert all("source=synthetic" in entry["origin"] for entry in read_log(out / "log.jsonl"))


@pytest.mark.parametrize("path", ["s", "s/train/shard_00000", "s/train/shard_00000.bin"])
def test_real_data_is_reported(config, tmp_path, capsys, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    small_store(tmp_path / "s")
    settings = json.loads(config.read_text())
    settings["model"]["vocab_size"] = 257
    (tmp_path / "c.json").write_text(json.dumps(settings))
    assert train("--data", path, "--config-file", "c.json", "--if-missing", "synthetic") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"Loaded real indexed dataset from {path}",
        "Dataset contains 150 documents",
    ]
    assert not any("synthetic" in line for line in lines)


@pytest.mark.parametrize("option", ["--data", "--input-file"])
def test_missing_data_stops_a_run(config, tmp_path, capsys, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    args = [option, "nowhere", "--config-file", config, "--out", "run"]
    assert train(*args) == 1
    assert train(*args, "--if-missing", "error") == 1
    output = capsys.readouterr()
    assert "Falling back" not in output.out + output.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--data", pytest.param("--input-file", marks=pytest.mark.slow)])
def test_missing_data_is_replaced_on_request(config, tmp_path, capsys, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    settings = json.loads(config.read_text())
    settings["model"]["vocab_size"] = 300
    (tmp_path / "c.json").write_text(json.dumps({**settings, "steps": 1}))
    assert train(option, "nowhere", "--config-file", "c.json", "--out", "run", "--if-missing", "synthetic") == 0
    output = capsys.readouterr()
    warning, fallback = output.err.splitlines()
    assert warning.startswith("Could not load real data: ")
    assert "here is no " in warning
    assert fallback == "Falling back to synthetic data"
    assert all("source=synthetic" in line for line in output.out.splitlines())
    assert "Loaded real" not in output.out
    # The ids are those of the model's vocabulary.
    description = json.loads((tmp_path / "run/run.json").read_text())
    assert description["data"]["name"].startswith("distributed_dummy:documents=100000,vocab=300,")


def make_broken_data(folder, fault):
    """Return an existing path that holds no usable data."""
    if fault == "damaged":
        store = small_store(folder / "s")
        (store.path / "dataset_metadata.json").write_text("{")
        return store.path
    if fault == "half a prefix":
        (folder / "p.bin").touch()
        return folder / "p"
    if fault == "a dangling link":
        (folder / "link").symlink_to(folder / "gone")
        return folder / "link"
    if fault == "behind a dangling link":
        (folder / "link").symlink_to(folder / "not mounted")
        return folder / "link/data/s"
    if fault == "a name too long":
        return folder / ("x" * 300)
    if fault == "below a file":
        (folder / "file").touch()
        return folder / "file/s"
    if fault == "no subset train":
        batchloom.prepare("dummy:documents=1,vocab=9", out=folder / "v", val_fraction=0.99999)
        return folder / "v"
    (folder / "empty").mkdir()
    if fault == "unfinished":
        (folder / "empty/.work").mkdir()
    if fault == "text":
        (folder / "empty/text.txt").write_text("words")
    return folder / "empty"


@pytest.mark.parametrize(
    "fault",
    [
        "damaged",
        "half a prefix",
        "a dangling link",
        "behind a dangling link",
        "empty",
        "unfinished",
        "text",
        "no subset train",
        "a name too long",
        "below a file",
    ],
)
def test_existing_data_is_never_replaced(config, tmp_path, capsys, fault):
    path = make_broken_data(tmp_path, fault)
    args = ["--config-file", config, "--out", tmp_path / "run", "--if-missing", "synthetic"]
    assert train("--data", path, *args) == 1
    output = capsys.readouterr()
    assert "Falling back" not in output.out + output.err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_unreadable_data_is_never_replaced(config, tmp_path, capsys):
    closed = tmp_path / "closed"
    small_store(closed / "s")
    closed.chmod(0)
    args = ["--config-file", config, "--out", tmp_path / "run", "--if-missing", "synthetic"]
    try:
        assert train("--data", closed / "s", *args) == 1
    finally:
        closed.chmod(stat.S_IRWXU)
    assert "Falling back" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_real_data_does_not_resume_on_synthetic_data(config, tmp_path, capsys):
    store = small_store(tmp_path / "s")
    out = tmp_path / "run"
    args = ["--data", store.path, "--config-file", config, "--out", out]
    assert train(*args, "--stop-at", 3) == 0
    store.path.rename(tmp_path / "moved")
    assert train(*args, "--resume", "--if-missing", "synthetic") == 1
    assert f"was started on {store.path}, and distributed_dummy" in capsys.readouterr().err
    args[1] = TEXT
    assert train(*args, "--resume") == 1
    assert f"was started on {store.path}, and dummy" in capsys.readouterr().err
    args[1] = tmp_path / "moved"
    assert train(*args, "--resume", "--if-missing", "synthetic") == 0


def test_a_run_on_synthetic_data_resumes_exactly(config, tmp_path):
    args = ["--data", TEXT, "--config-file", config]
    assert train(*args, "--out", tmp_path / "whole") == 0
    assert train(*args, "--out", tmp_path / "cut", "--stop-at", 3) == 0
    assert train(*args, "--out", tmp_path / "cut", "--resume") == 0
    assert read_steps(tmp_path / "cut") == read_steps(tmp_path / "whole")


@pytest.mark.parametrize("fallback", ["synthetc", "Synthetic", ""])
def test_unknown_fallbacks_are_refused(capsys, fallback):
    assert train("--data", "s", "--if-missing", fallback) == 2
    assert f"--if-missing: {fallback!r} is none of error, synthetic" in capsys.readouterr().err


# Of stores, too, each rank reads its share.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dummy", "distributed_dummy"])
def test_two_ranks_of_synthetic_data(tmp_path, config, name):
    data = f"{name}:documents=500,vocab=64,lengths=8-60"
    out = tmp_path / "run"
    args = ["train", "--data", data, "--config-file", config, "--device", "cpu", "--out", out]
    run_two_ranks(WORKER, tmp_path, data, *args)
    first_rank, second_rank = (np.load(tmp_path / f"rank{rank}.npy") for rank in (0, 1))
    assert first_rank.shape == (12, 2, 32)
    store = batchloom.open_store(data)
    loader = batchloom.Loader(store, seq_len=32, global_batch_size=4, steps=12, output="numpy")
    for step in range(12):
        rows = loader[step]["input_ids"]
        assert (first_rank[step] == rows[:2]).all()
        assert (second_rank[step] == (rows[:2] if name == "dummy" else rows[2:])).all()
    assert all(entry["trained"] <= entry["tokens"] for entry in read_log(out / "log.jsonl") if entry["kind"] == "step")


def test_ranks_with_and_without_the_data_are_refused(tmp_path, config):
    """Each rank has a separate folder; that of the second is missing."""
    small_store(tmp_path / "0")
    args = ["train", "--data", tmp_path / "RANK", "--config-file", config, "--device", "cpu"]
    run_options = ["--out", tmp_path / "run", "--if-missing", "synthetic"]
    results = run_ranks(WORKER, tmp_path, tmp_path / "RANK", *args, *run_options)
    assert any(result.returncode for result in results)
    output = "".join(result.stdout + result.stderr for result in results)
    assert "is missing for 1 of 2 ranks only" in output
    assert "Falling back" not in output
