"""Losses of single rows in the log: right, and without effect on training.

test_ranks.py checks those of several ranks.
"""

import numpy as np
import pytest
import torch

import batchloom
from batchloom import SettingsError
from batchloom.adapters.logging import read_log
from batchloom.adapters.weighted_loss import shift_left
from batchloom.batches import IGNORE_INDEX
from batchloom.train import DataRequest, RunFolder
from train.runs import BASE_SETTINGS, read_steps, run_training, small_store, start_run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "s")


def read_row_losses(out):
    """Return the row losses of the logged steps that hold them, by step."""
    entries = read_log(out / "log.jsonl")
    return {entry["step"]: entry["row_loss"] for entry in entries if "row_loss" in entry}


def count_trained(store, settings, step):
    """Return the trained tokens of each row of a step of the log."""
    sizes = {name: settings[name] for name in ("seq_len", "global_batch_size", "steps")}
    batch = batchloom.Loader(store, **sizes, output="numpy")[step]
    return (batch["labels"] != IGNORE_INDEX).sum(1)


def test_row_losses_are_those_of_the_rows_before_the_step(store, tmp_path):
    changes = {"steps": 7, "log_row_loss": 2}
    before, _ = run_training(store, tmp_path / "run", changes, stop_at=3)
    run_training(store, tmp_path / "run", changes, resume=True, stop_at=5)
    batch = batchloom.Loader(store, seq_len=32, global_batch_size=4, steps=7)[3]
    with torch.no_grad():
        logits = before.model.logits(batch["input_ids"], batch["position_ids"])
    losses = torch.nn.functional.cross_entropy(
        logits.mT, shift_left(batch["labels"], IGNORE_INDEX), ignore_index=IGNORE_INDEX, reduction="none"
    )
    row_losses = read_row_losses(tmp_path / "run")
    assert list(row_losses) == [1, 3]
    assert row_losses[3] == pytest.approx((losses.sum(1) / (batch["labels"] != IGNORE_INDEX).sum(1)).tolist(), rel=1e-5)


def test_row_losses_weighted_by_their_tokens_make_the_loss_of_the_step(store, tmp_path):
    run_training(store, tmp_path / "run", {"steps": 6, "log_row_loss": 3, "batch_size": 2})
    losses = {step: loss for step, loss, *_ in read_steps(tmp_path / "run")}
    row_losses = read_row_losses(tmp_path / "run")
    assert list(row_losses) == [2, 5]
    for step, rows in row_losses.items():
        trained = count_trained(store, {**BASE_SETTINGS, "steps": 6}, step)
        assert np.average(rows, weights=trained) == pytest.approx(losses[step], rel=1e-5)


def test_logging_row_losses_does_not_change_training(store, tmp_path):
    for interval in (0, 1):
        run_training(store, tmp_path / str(interval), {"steps": 6, "log_row_loss": interval})
    assert read_steps(tmp_path / "0") == read_steps(tmp_path / "1")
    weights = [
        (RunFolder(tmp_path / name).find_newest_checkpoint() / "model.safetensors").read_bytes() for name in "01"
    ]
    assert weights[0] == weights[1]
    assert not read_row_losses(tmp_path / "0")


def test_a_stream_has_no_rows_to_name(tmp_path):
    (tmp_path / "words.txt").write_text("one two three four five six seven " * 50)
    request = DataRequest(stream=(str(tmp_path / "words.txt"),), tokenizer="bytes")
    with pytest.raises(SettingsError, match="log_row_loss"):
        start_run(request, tmp_path / "run", {**BASE_SETTINGS, "log_row_loss": 1})
