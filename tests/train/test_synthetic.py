"""Training on synthetic data, asked for by name or to stand in for data that is absent."""

import json
import os
import stat

import numpy as np
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.train import read_log
from processes import run_ranks, run_two_ranks
from train.runs import PLAIN, WORKER, run_training, small_store, steps_of

TEXT = "dummy:documents=2000,vocab=64,lengths=8-120,kind=text"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps({**PLAIN, "steps": 6}))
    return path


def train(*words):
    return run_command_line(["train", "--device", "cpu", *map(str, words)])


def frequencies_alone(store):
    """Nats a token of whoever knows how frequent each id is, and nothing else."""
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
        losses[kind] = np.mean([loss for _, loss, *_ in steps_of(tmp_path / kind)[-10:]])
    bound = frequencies_alone(batchloom.open_store(TEXT))
    assert bound < np.log(64)
    assert losses["text"] < bound - 1
    assert losses["random"] > np.log(63) - 0.1


def test_every_line_of_a_run_says_synthetic(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert train("--data", TEXT, "--config-file", config, "--out", out) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert len(lines) > 10
    assert all(line.count("source=synthetic") == 1 for line in lines)
    assert "real" not in said.out
    entries = read_log(out / "log.jsonl")
    assert {entry["origin"].split()[0] for entry in entries} == {"source=synthetic"}
    assert json.loads((out / "run.json").read_text())["data"]["name"] == TEXT.replace(",kind", ",seed=0,kind")


def test_a_prepared_store_of_it_says_so_too(config, tmp_path, capsys):
    batchloom.prepare(TEXT, out=tmp_path / "s", val_fraction=0.1)
    out = tmp_path / "run"
    assert train("--data", tmp_path / "s", "--config-file", config, "--out", out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("val loss" in line for line in lines) == 1
    assert all(line.count("source=synthetic") == 1 for line in lines)
    assert all("source=synthetic" in entry["origin"] for entry in read_log(out / "log.jsonl"))


@pytest.mark.parametrize("path", ["s", "s/train/shard_00000", "s/train/shard_00000.bin"])
def test_real_data_is_told(config, tmp_path, capsys, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    small_store(tmp_path / "s")
    settings = json.loads(config.read_text())
    settings["model"]["vocab_size"] = 257
    (tmp_path / "c.json").write_text(json.dumps(settings))
    assert train("--data", path, "--config-file", "c.json", "--if-missing", "synthetic") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"Loaded real indexed dataset from {path}",
        "Dataset contains 150 sequences",
    ]
    assert not any("synthetic" in line for line in lines)


@pytest.mark.parametrize("option", ["--data", "--input-file"])
def test_what_is_absent_stands_aside_only_where_asked(config, tmp_path, capsys, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    words = [option, "nowhere", "--config-file", config, "--out", "run"]
    assert train(*words) == 1
    assert train(*words, "--if-missing", "error") == 1
    said = capsys.readouterr()
    assert "Falling back" not in said.out + said.err
    assert not (tmp_path / "run").exists()
    assert train(*words, "--if-missing", "synthetic") == 0
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith("Could not load real data: ")
    assert "here is no " in first
    assert second == "Falling back to synthetic data"
    assert all("source=synthetic" in line for line in said.out.splitlines())
    assert "Loaded real" not in said.out


def test_the_model_says_which_ids_stand_in(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = json.loads(config.read_text())
    settings["model"]["vocab_size"] = 300
    (tmp_path / "c.json").write_text(json.dumps(settings))
    words = ["--data", "nowhere", "--config-file", "c.json", "--if-missing", "synthetic"]
    assert train(*words, "--out", "run") == 0
    run_of = json.loads((tmp_path / "run/run.json").read_text())
    assert run_of["data"]["name"].startswith("distributed_dummy:documents=100000,vocab=300,")


def broken(folder, how):
    """A path where something is, that is no data one can train on."""
    if how == "damaged":
        store = small_store(folder / "s")
        (store.path / "dataset_metadata.json").write_text("{")
        return store.path
    if how == "half a prefix":
        (folder / "p.bin").touch()
        return folder / "p"
    if how == "a dangling link":
        (folder / "link").symlink_to(folder / "gone")
        return folder / "link"
    if how == "behind a dangling link":
        (folder / "link").symlink_to(folder / "not mounted")
        return folder / "link/data/s"
    if how == "a name too long":
        return folder / ("x" * 300)
    if how == "below a file":
        (folder / "file").touch()
        return folder / "file/s"
    if how == "no subset train":
        batchloom.prepare("dummy:documents=1,vocab=9", out=folder / "v", val_fraction=0.99999)
        return folder / "v"
    (folder / "empty").mkdir()
    if how == "unfinished":
        (folder / "empty/.work").mkdir()
    if how == "text":
        (folder / "empty/text.txt").write_text("words")
    return folder / "empty"


@pytest.mark.parametrize(
    "how",
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
def test_nothing_stands_in_for_what_is_there(config, tmp_path, capsys, how):
    path = broken(tmp_path, how)
    words = ["--config-file", config, "--out", tmp_path / "run", "--if-missing", "synthetic"]
    assert train("--data", path, *words) == 1
    said = capsys.readouterr()
    assert "Falling back" not in said.out + said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_nothing_stands_in_for_what_may_not_be_looked_at(config, tmp_path, capsys):
    closed = tmp_path / "closed"
    small_store(closed / "s")
    closed.chmod(0)
    words = ["--config-file", config, "--out", tmp_path / "run", "--if-missing", "synthetic"]
    try:
        assert train("--data", closed / "s", *words) == 1
    finally:
        closed.chmod(stat.S_IRWXU)
    assert "Falling back" not in capsys.readouterr().err


def test_a_run_on_real_data_does_not_go_on_with_synthetic(config, tmp_path, capsys):
    store = small_store(tmp_path / "s")
    out = tmp_path / "run"
    words = ["--data", store.path, "--config-file", config, "--out", out]
    assert train(*words, "--stop-at", 3) == 0
    store.path.rename(tmp_path / "moved")
    assert train(*words, "--resume", "--if-missing", "synthetic") == 1
    assert "data.fingerprint was" in capsys.readouterr().err
    words[1] = TEXT
    assert train(*words, "--resume") == 1
    assert "data.fingerprint was" in capsys.readouterr().err
    words[1] = tmp_path / "moved"
    assert train(*words, "--resume", "--if-missing", "synthetic") == 0


def test_a_run_on_synthetic_data_goes_on_exactly(config, tmp_path):
    words = ["--data", TEXT, "--config-file", config]
    assert train(*words, "--out", tmp_path / "whole") == 0
    assert train(*words, "--out", tmp_path / "cut", "--stop-at", 3) == 0
    assert train(*words, "--out", tmp_path / "cut", "--resume") == 0
    assert steps_of(tmp_path / "cut") == steps_of(tmp_path / "whole")


@pytest.mark.parametrize("how", ["synthetc", "Synthetic", ""])
def test_other_words_for_what_stands_in_are_refused(capsys, how):
    assert train("--data", "s", "--if-missing", how) == 2
    assert f"--if-missing: {how!r} is none of error, synthetic" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dummy", "distributed_dummy"])
def test_two_ranks_of_synthetic_data(tmp_path, config, name):
    data = f"{name}:documents=500,vocab=64,lengths=8-60"
    out = tmp_path / "run"
    words = ["train", "--data", data, "--config-file", config, "--device", "cpu", "--out", out]
    run_two_ranks(WORKER, tmp_path, data, *words)
    one, two = (np.load(tmp_path / f"rank{rank}.npy") for rank in (0, 1))
    assert one.shape == (12, 2, 32)
    store = batchloom.open_store(data)
    whole = batchloom.Loader(store, seq_len=32, global_batch_size=4, steps=12, output="numpy")
    for step in range(12):
        rows = whole[step]["input_ids"]
        assert (one[step] == rows[:2]).all()
        assert (two[step] == (rows[:2] if name == "dummy" else rows[2:])).all()
    assert all(entry["trained"] <= entry["tokens"] for entry in read_log(out / "log.jsonl") if entry["kind"] == "step")


def test_ranks_of_which_some_have_the_data_are_refused(tmp_path, config):
    """Each rank names a place of its own, of which the second is empty."""
    small_store(tmp_path / "0")
    words = ["train", "--data", tmp_path / "RANK", "--config-file", config, "--device", "cpu"]
    more = ["--out", tmp_path / "run", "--if-missing", "synthetic"]
    done = run_ranks(WORKER, tmp_path, tmp_path / "RANK", *words, *more)
    assert any(one.returncode for one in done)
    said = "".join(one.stdout + one.stderr for one in done)
    assert "is missing for 1 of 2 ranks only" in said
    assert "Falling back" not in said
