"""Small stores and settings for tests of the trainer, and access to a run's log."""

import json
import re
from pathlib import Path

import numpy as np

import batchloom
from batchloom.adapters.logging import read_log
from batchloom.adapters.rank_group import join_ranks
from batchloom.testing import write_store
from batchloom.train import (
    RunFolder,
    RunLog,
    TrainRequest,
    make_settings,
    set_up_run,
    start_training,
    train,
)
from waiting import wait_until

# Script that trains on a rank and saves its batches.
WORKER = Path(__file__).with_name("worker.py")
BASE_SETTINGS = {
    "model": {"layers": 2, "heads": 2, "width": 32},
    "optim": {"lr": 0.01, "warmup_steps": 5},
    "steps": 80,
    "seq_len": 32,
    "global_batch_size": 4,
    "eval_interval": 0,
    "save_interval": 0,
}


def counting_documents(count, seed, longest=40):
    """Return documents that count in steps of three, which a model can learn."""
    rng = np.random.default_rng(seed)
    starts, lengths = rng.integers(0, 256, count), rng.integers(1, longest, count)
    return [
        [*((start + 3 * np.arange(length)) % 256).tolist(), 256] for start, length in zip(starts, lengths, strict=True)
    ]


def small_store(folder, longest=40):
    documents = {
        "train": counting_documents(150, 0, longest),
        "val": counting_documents(20, 1, longest),
    }
    return write_store(folder, documents)


def long_conversations(folder, count=20, letters=160):
    """Prepare a store of conversations with more than ``letters`` tokens each."""
    rng = np.random.default_rng(0)
    questions = ["".join(rng.choice([*"abcdefgh "], letters)) for _ in range(count)]
    rows = [json.dumps({"question": question, "answer": question[::-1]}) + "\n" for question in questions]
    (folder / "conversations.jsonl").write_text("".join(rows))
    result = batchloom.prepare(
        folder / "conversations.jsonl",
        out=folder / "conversations",
        tokenizer="bytes",
        workers=1,
        val_fraction=0,
    )
    return batchloom.open_store(result.path)


def run_training(store, out, changes=None, *, resume=False, stop_at=None):
    """Train in this process; return the outcome and the printed lines."""
    changes, lines = changes or {}, []
    # The folder of a pretrained model replaces the shape of the small one.
    has_folder = isinstance(model := changes.get("model"), dict) and "init" in model
    base = {**BASE_SETTINGS, "model": {}} if has_folder else BASE_SETTINGS
    folder = RunFolder(out)
    with join_ranks("cpu") as ranks:
        run = set_up_run(
            store.path,
            make_settings(base, changes),
            folder,
            ranks,
            RunLog(folder.log, lines.append),
        )
        return train(run, resume=resume, stop_at=stop_at), lines


def start_run(data, out, settings, *, resume=False, stop_at=None):
    """Run the train command in this process; return the outcome and the printed lines."""
    config, lines = out.with_name(f"{out.name}.json"), []
    config.write_text(json.dumps(settings))
    request = TrainRequest(data=data, config_file=config, device="cpu", out=out, resume=resume, stop_at=stop_at)
    return start_training(request, lines.append), lines


def read_steps(out):
    """Return (step, loss, gradient norm, tokens) of every step in a run's log."""
    return [
        (entry["step"], entry["loss"], entry["norm"], entry["tokens"])
        for entry in read_log(out / "log.jsonl")
        if entry["kind"] == "step"
    ]


def wait_for_step(running, out, step):
    """Wait until the log of a running process has so many steps; return their number."""

    def find_last_step():
        is_alive = running.process.is_alive()
        log = (out / "log.jsonl").read_bytes() if (out / "log.jsonl").exists() else b""
        steps = [int(number) for number in re.findall(rb'"kind": "step", "step": (\d+)', log)]
        if steps and steps[-1] + 1 >= step:
            return steps[-1] + 1
        assert is_alive, f"the run ended before {step} steps: {running.err.read_text()[-2000:]}"
        return None

    return wait_until(find_last_step, f"{step} steps of {out}")
