"""Ray Train: killed workers and resizes do not change the trained data."""

import importlib.util
import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom.adapters import ray_train
from batchloom.adapters.logging import read_log
from batchloom.analysis.compare import BatchWitness, iter_expected_entries
from batchloom.examples.job import Job, tiny_model
from batchloom.testing import write_store
from preparation.workers.ray_nodes import OBJECTS
from processes import make_rank_environments, start_processes

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Importing Ray to check for it would take seconds.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="ray is not installed: pip install 'batchloom[ray]'"
)

SIZES = {"seq_len": 32, "global_batch_size": 4}
# Ray starts about ten processes per run; on a busy machine each needs half a minute.
_LIMIT_S = 1500
# (workers, last step): the second run has one worker more, and loses it once.
RUNS = [(1, 10), (2, 22)]
KILLED = 14
EVERY = 4


class BatchRecorder:
    """Recorder of each step's batch hash in a file; kills one worker once."""

    def __init__(self, folder):
        self.folder = Path(folder)

    @contextmanager
    def __call__(self, model):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        rank, world = ray_train.get_rank_and_world_size()
        witness, path = BatchWitness(model), self.folder / f"{time.time_ns()}-{os.getpid()}.jsonl"

        def record_step(optimizer, *_):
            # The optimizer's step count is restored from the checkpoint.
            step = int(next(iter(optimizer.state.values()))["step"])
            entry = witness._hash.to_entry()
            with path.open("a") as file:
                line = {"step": step, "rank": rank, "world": world, "hash": entry["hash"]}
                file.write(json.dumps(line) + "\n")
            if step == KILLED and rank == 1 and not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(record_step)
        yield
        witness.end()


def read_records(folder):
    """Return the records of all workers in their order of start."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().split("\n")[:-1]]


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(400)]
    return write_store(tmp_path / "store", documents)


def run_in_cluster(work, argument):
    import ray

    path = os.pathsep.join(os.path.abspath(part) for part in ("src", "tests"))
    os.environ["PYTHONPATH"] = f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ["OMP_NUM_THREADS"] = "1"
    # On a busy machine a worker process needs minutes to start. With Ray's limit of one minute its actor is cancelled
    # before it starts. Ray also kills workers when other processes take the memory.
    os.environ |= {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "400",
        "RAY_worker_register_timeout_seconds": "400",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=OBJECTS)
    work(argument)
    ray.shutdown()


def run_in_process(work, argument):
    """Run in a separate process; stale handles of an old cluster match a new one."""
    process = multiprocessing.get_context("spawn").Process(target=run_in_cluster, args=(work, argument))
    process.start()
    process.join(_LIMIT_S - 60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def run_twice(argument):
    from batchloom.examples import with_ray

    folder, sizes = argument
    model = tiny_model(batchloom.open_store(sizes["data"]))
    for workers, steps in RUNS:
        job = Job(
            **sizes,
            workers=workers,
            steps=steps,
            resume=(workers, steps) != RUNS[0],
            within=BatchRecorder(folder),
        )
        with_ray.train(model, job)


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
def test_a_killed_worker_and_a_resize_go_on_exactly(store, tmp_path):
    folder = tmp_path / "heard"
    folder.mkdir()
    sizes = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "save_every": EVERY}
    run_in_process(run_twice, (folder, sizes))
    records = read_records(folder)
    assert (folder / "killed").exists()
    # Steps 13 and 14 follow the checkpoint of step 12, so the restart repeats them.
    assert [record["step"] for record in records if record["rank"] == 0].count(13) == 2
    # Records are in order of start: the last record of a step belongs to the surviving weights.
    survived = {}
    for record in records:
        if record["rank"] == 0:
            survived[record["step"]] = {0: record}
    for record in records:
        if record["world"] == survived[record["step"]][0]["world"]:
            survived[record["step"]][record["rank"]] = record
    last = RUNS[-1][1]
    assert sorted(survived) == list(range(1, last + 1))
    # The second run resumes from the newest checkpoint, of step 8.
    worlds = [survived[step][0]["world"] for step in range(1, last + 1)]
    assert worlds == [1] * 8 + [2] * 14
    expected = {}
    for world in (1, 2):
        for rank in range(world):
            loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=world, steps=last)
            expected[world, rank] = [entry["hash"] for entry in iter_expected_entries(loader, last)]
    for step, shares in survived.items():
        world = shares[0]["world"]
        # Each rank's share of the step occurs once.
        assert sorted(shares) == list(range(world))
        for rank, record in shares.items():
            assert record["hash"] == expected[world, rank][step - 1]


def make_worker_settings(folder):
    settings = {"worker_id": "w", "dataset_type": "distributed_dummy", "dataset_name": "documents=500,vocab=300"}
    return settings | {"batch_size": 2, "num_steps": 3, "device": "cpu", "out": folder / "run"}


def run_train_worker(settings):
    from batchloom.train import WorkerConfig, run_worker

    report = run_worker(WorkerConfig(**settings), lambda _: None)
    summary = {"rank": report.rank, "world": report.world_size, "finished": report.finished}
    (settings["out"].parent / f"rank_{report.rank}.json").write_text(json.dumps(summary))


def run_two_workers(settings):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        run_train_worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray", storage_path=str(settings["out"].parent)),
    ).fit()


def check_two_workers(folder):
    for rank in (0, 1):
        report = json.loads((folder / f"rank_{rank}.json").read_text())
        assert report == {"rank": rank, "world": 2, "finished": True}
    start = read_log(folder / "run" / "log.jsonl")[0]
    assert start["run"]["global_batch_size"] == 4


def test_workers_of_the_local_mode_save_states_and_find_each_other(tmp_path):
    worker = Path(__file__).with_name("ray_local_worker.py")
    with start_processes(worker, tmp_path, environments=make_rank_environments()[:1]) as (process,):
        result = process.wait()
    assert result.returncode == 0, result.stderr
    check_two_workers(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(_LIMIT_S)
def test_a_worker_finds_the_others_that_ray_started(tmp_path):
    run_in_process(run_two_workers, make_worker_settings(tmp_path))
    check_two_workers(tmp_path)
