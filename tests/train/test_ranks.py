"""Several ranks train like one."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from batchloom import InputError, Loader
from batchloom.adapters.logging import read_log
from batchloom.adapters.rank_group import choose_device, join_ranks
from batchloom.core.errors import TrainError
from processes import make_rank_environments, run_ranks, run_two_ranks, start_processes
from train.runs import BASE_SETTINGS, WORKER, read_steps, run_training, small_store, wait_for_step

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps({**BASE_SETTINGS, "steps": 6}))
    return path


def test_two_ranks_train_as_one(tmp_path, config):
    store = small_store(tmp_path / "s")
    out, single = tmp_path / "two", tmp_path / "one"
    args = ["train", "--data", store.path, "--config-file", config, "--device", "cpu"]
    args += ["--out", out, "--batch-size", 1, "--stop-at", 4]
    printed = run_two_ranks(WORKER, tmp_path, store.path, *args)
    assert printed.count("step 0/6") == 1
    assert "2 ranks x 2 passes x 1 row" in printed

    run_training(store, single, {"steps": 6})
    # The two ranks stopped at step 4; one rank goes on from their checkpoint.
    run_training(store, out, {"steps": 6}, resume=True)
    actual, reference = read_steps(out), read_steps(single)
    assert [tokens for *_, tokens in actual] == [tokens for *_, tokens in reference]
    assert [loss for _, loss, *_ in actual] == pytest.approx([loss for _, loss, *_ in reference], abs=1e-4)

    ranks = [np.load(tmp_path / f"rank{rank}.npy") for rank in (0, 1)]
    loader = Loader(store, seq_len=32, global_batch_size=4, steps=6, output="numpy")
    for step, batch in enumerate(loader):
        step_rows = np.concatenate([ranks[0][step], ranks[1][step]])
        rows = sorted(map(tuple, step_rows.tolist()))
        assert len(set(rows)) == 4
        assert rows == sorted(map(tuple, batch["input_ids"].tolist()))


@pytest.mark.slow
def test_two_ranks_share_an_odd_batch_and_balance_it(tmp_path, config):
    store = small_store(tmp_path / "s")
    out, single = tmp_path / "two", tmp_path / "one"
    sizes = ["--global-batch-size", 5, "--batch-size", 2, "--uneven", "pad", "--balance", "--log-row-loss", 2]
    args = ["train", "--data", store.path, "--config-file", config, "--device", "cpu", *sizes]
    printed = run_two_ranks(WORKER, tmp_path, store.path, *args, "--out", out, "--stop-at", 4)
    assert "2 ranks x 2 passes x 2 rows" in printed
    assert re.search(r"step 0/6 .* imbalance 1\.", printed)

    changes = {"steps": 6, "global_batch_size": 5, "log_row_loss": 2}
    run_training(store, single, changes)
    # One rank resumes their run without padding and balancing.
    run_training(store, out, changes, resume=True)
    actual, reference = read_steps(out), read_steps(single)
    assert [tokens for *_, tokens in actual] == [tokens for *_, tokens in reference]
    assert [loss for _, loss, *_ in actual] == pytest.approx([loss for _, loss, *_ in reference], abs=1e-4)
    logged = read_log(out / "log.jsonl")
    measured = [entry for entry in logged if "imbalance" in entry]
    assert len(measured) == 4
    assert all(1 <= entry["imbalance"] <= entry["imbalance_in_order"] for entry in measured)
    # The losses of single rows are in the order of the plan.
    row_losses, expected = (
        {entry["step"]: entry["row_loss"] for entry in read_log(folder / "log.jsonl") if "row_loss" in entry}
        for folder in (out, single)
    )
    assert list(row_losses) == [1, 3, 5]
    for step, losses in row_losses.items():
        assert len(losses) == 5
        assert losses == pytest.approx(expected[step], abs=1e-4)


@pytest.mark.slow
def test_two_ranks_share_one_temporary_store(tmp_path, config):
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{n} times {n} is {n * n}." for n in range(100)))
    args = ["train", "--input-file", text, "--tokenizer", "bytes", "--config-file", config]
    store = small_store(tmp_path / "s")
    args += ["--out", tmp_path / "run", "--max-iters", 2]
    printed = run_two_ranks(WORKER, tmp_path, store.path, *args)
    assert len(read_steps(tmp_path / "run")) == 2
    lines = [line for line in printed.splitlines() if line.startswith("input")]
    assert len(lines) == 1
    store_path = Path(lines[0].split(" is prepared in ")[1].split(",")[0])
    assert not store_path.parent.exists()


@pytest.mark.slow
def test_one_of_two_ranks_prepares_the_data_sets_of_a_file(tmp_path, config):
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{n} times {n} is {n * n}." for n in range(100)))
    manifest = tmp_path / "all.yaml"
    manifest.write_text("datasets: [{path: words.txt, data_type: jsonl}]")
    args = ["train", "--dataset-config", manifest, "--tokenizer", "bytes", "--config-file", config]
    args += ["--out", tmp_path / "run", "--max-iters", 2]
    store = small_store(tmp_path / "s")
    results = run_ranks(WORKER, tmp_path, store.path, *args)
    assert any(result.returncode for result in results)
    assert any("holds plain text, and data_type says jsonl" in result.stderr for result in results)
    manifest.write_text("datasets: [{path: words.txt}]")
    printed = run_two_ranks(WORKER, tmp_path, store.path, *args)
    assert len(read_steps(tmp_path / "run")) == 2
    assert printed.count("all.yaml was prepared in") == 1


@pytest.fixture
def endless_command(tmp_path, config):
    store = small_store(tmp_path / "s")
    args = ["--data", store.path, "--config-file", config, "--out", tmp_path / "run"]
    run_options = ["--device", "cpu", "--max-iters", 10**6, "--save-interval", 5]
    return ["-m", "batchloom", "train", *map(str, args), *map(str, run_options)]


def check_checkpoints(run):
    """Require the two newest checkpoints of a run, whole."""
    assert not list(run.rglob("*.partial"))
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    assert all(len(list(folder.iterdir())) == 3 for folder in checkpoints)


@pytest.mark.slow
def test_ctrl_c_prints_one_message_on_the_first_of_two_ranks(tmp_path, endless_command):
    with start_processes(*endless_command, environments=make_rank_environments()) as (first, second):
        wait_for_step(first, tmp_path / "run", 12)
        for rank in (first, second):
            rank.send_signal(signal.SIGINT)
        result, other = first.wait(), second.wait()
    assert result.returncode == 130
    assert result.stderr.strip().startswith(f"Stopped the run in {tmp_path / 'run'}; its newest checkpoint has ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert other.returncode != 0
    assert not re.search("Stopped|Traceback", other.stderr)
    check_checkpoints(tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_under_torchrun_prints_one_message(tmp_path, endless_command):
    with subprocess.Popen(
        [*TORCHRUN, *endless_command],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert any(line.split("/")[0].split() == ["step", "12"] for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert errors.count("Stopped the run in") == 1
    # torchrun prints its own traceback, as for every script.
    assert errors.count("Traceback") == errors.count("SignalException: ") == 1
    check_checkpoints(tmp_path / "run")


def test_the_loss_of_a_rank_ends_the_others_with_a_message(tmp_path, endless_command):
    with start_processes(*endless_command, environments=make_rank_environments()) as (first, second):
        wait_for_step(first, tmp_path / "run", 3)
        second.send_signal(signal.SIGKILL)
        result = first.wait()
    assert result.returncode == 1
    assert "batchloom: Rank 0 lost contact with the other ranks" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("rank", "size", "local"), [("x", "2", "0"), ("2", "2", "0"), ("0", "2", "1"), ("-1", "2", "0")]
)
def test_invalid_rank_variables_are_refused(monkeypatch, rank, size, local):
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match=f"RANK='{rank}'.*not a valid rank"), join_ranks("cpu"):
        pass


def test_a_missing_device_is_refused():
    with pytest.raises(InputError, match="none of auto, cpu"):
        choose_device("tpu", 0)
    count = torch.cuda.device_count()
    with pytest.raises(InputError, match=f"GPU {count} does not exist; torch .* sees {count}"):
        choose_device(f"cuda:{count}", 0)


SLOW_FIRST = """
import datetime, os, sys, time, torch, torch.distributed as dist
from batchloom.adapters.rank_group import RankGroup
rank, place, seconds = int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", f"file://{place}", world_size=2, rank=rank)
ranks = RankGroup(rank, 2, rank, torch.device("cpu"))
ranks.run_exclusively(None)
# Both are here, and from now on any other collective fails if a rank comes half a second late.
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), dist.group.WORLD)
def work():
    time.sleep(seconds)
    if not seconds:
        os._exit(7)
ranks.run_exclusively(None if rank else work)
print("went on")
"""


@pytest.mark.parametrize(
    ("seconds", "message"), [(1, "went on"), (0, "TrainError: Rank 1 lost contact with the other ranks")]
)
def test_others_wait_for_the_first_rank_as_long_as_it_works(tmp_path, seconds, message):
    script = tmp_path / "slow_first.py"
    script.write_text(SLOW_FIRST)
    with start_processes(script, tmp_path / "meet", seconds, environments=make_rank_environments()) as processes:
        first, other = (process.wait() for process in processes)
    assert message in other.stdout + other.stderr
    assert first.returncode == (0 if seconds else 7)


def test_missing_rendezvous_variables_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TrainError, match="MASTER_ADDR"), join_ranks("cpu"):
        pass
