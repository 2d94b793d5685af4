"""In Ray Train a worker that is killed, and other numbers of workers, change nothing of what is trained."""

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
from batchloom.analysis.compare import BatchWitness, iter_expected_entries
from batchloom.examples.job import Job, tiny_model
from batchloom.testing import write_store
from batchloom.train import read_log
from preparation.workers.nodes import OBJECTS
from processes import run_two_ranks

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Importing Ray to see whether it is there would take seconds.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="ray is not installed: pip install 'batchloom[ray]'"
)

SIZES = {"seq_len": 32, "global_batch_size": 4}
KILLED = 10
# (workers, the step to stop after): the first run loses a worker; then there is one, and two again.
RUNS = [(2, 14), (1, 24), (2, 32)]
EVERY = 4


class Hears:
    """Notes what a worker's model is given in each step, in a file; kills one worker, once."""

    def __init__(self, folder):
        self.folder = Path(folder)

    @contextmanager
    def __call__(self, model):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        rank, world = ray_train.get_rank_and_world_size()
        witness, told = BatchWitness(model), self.folder / f"{time.time_ns()}-{os.getpid()}.jsonl"

        def made(optimizer, *_):
            # The optimizer's own count, which the checkpoint restores.
            step = int(next(iter(optimizer.state.values()))["step"])
            heard = witness._hash.to_entry()
            with told.open("a") as file:
                line = {"step": step, "rank": rank, "world": world, "hash": heard["hash"]}
                file.write(json.dumps(line) + "\n")
            if step == KILLED and rank == 1 and not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(made)
        yield
        witness.end()


def heard(folder):
    """The lines of all workers, in the order they were started."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().split("\n")[:-1]]


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(400)]
    return write_store(tmp_path / "store", documents)


def with_a_cluster(work, given):
    import ray

    path = os.pathsep.join(os.path.abspath(part) for part in ("src", "tests"))
    os.environ["PYTHONPATH"] = f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=OBJECTS)
    work(given)
    ray.shutdown()


def in_its_own_process(work, given):
    """Handles of a cluster that is gone are taken for those of the next, which has the same numbers."""
    process = multiprocessing.get_context("spawn").Process(target=with_a_cluster, args=(work, given))
    process.start()
    process.join(500)
    process.kill()
    assert process.exitcode == 0


def three_runs(given):
    from batchloom.examples import with_ray

    folder, sizes = given
    model = tiny_model(batchloom.open_store(sizes["data"]))
    for workers, steps in RUNS:
        job = Job(
            **sizes,
            workers=workers,
            steps=steps,
            resume=(workers, steps) != RUNS[0],
            within=Hears(folder),
        )
        with_ray.train(model, job)


@pytest.mark.slow
def test_a_killed_worker_and_a_resize_go_on_exactly(store, tmp_path):
    folder = tmp_path / "heard"
    folder.mkdir()
    sizes = {"data": str(store.path), "out": str(tmp_path / "out"), **SIZES, "save_every": EVERY}
    in_its_own_process(three_runs, (folder, sizes))
    told = heard(folder)
    assert (folder / "killed").exists()
    # Made again after the kill: steps 9 and 10 follow the checkpoint of step 8.
    assert [line["step"] for line in told if line["rank"] == 0].count(9) == 2
    # Later processes come later: of each step the last ones made it for the weights that went on.
    survived = {}
    for line in told:
        if line["rank"] == 0:
            survived[line["step"]] = {0: line}
    for line in told:
        if line["world"] == survived[line["step"]][0]["world"]:
            survived[line["step"]][line["rank"]] = line
    last = RUNS[-1][1]
    assert sorted(survived) == list(range(1, last + 1))
    # Runs 2 and 3 go on from the newest checkpoint before: 12 of 14, 24 of 24.
    worlds = [survived[step][0]["world"] for step in range(1, last + 1)]
    assert worlds == [2] * 12 + [1] * 12 + [2] * 8
    wanted = {}
    for world in (1, 2):
        for rank in range(world):
            loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=world, steps=last)
            wanted[world, rank] = [one["hash"] for one in iter_expected_entries(loader, last)]
    for step, lines in survived.items():
        world = lines[0]["world"]
        # Every share of the step, each once: together they are its sequences.
        assert sorted(lines) == list(range(world))
        for rank, line in lines.items():
            assert line["hash"] == wanted[world, rank][step - 1]


def worker_settings(folder):
    asked = {"worker_id": "w", "dataset_type": "distributed_dummy", "dataset_name": "vocab=300"}
    return asked | {"batch_size": 2, "num_steps": 3, "device": "cpu", "out": folder / "run"}


def be_a_worker(asked):
    from batchloom.train import WorkerConfig, run_worker

    report = run_worker(WorkerConfig(**asked), lambda _: None)
    told = {"rank": report.rank, "world": report.world_size, "finished": report.finished}
    (asked["out"].parent / f"rank_{report.rank}.json").write_text(json.dumps(told))


def two_workers(asked):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        be_a_worker,
        train_loop_config=asked,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray", storage_path=str(asked["out"].parent)),
    ).fit()


def check_two_workers(folder):
    for rank in (0, 1):
        told = json.loads((folder / f"rank_{rank}.json").read_text())
        assert told == {"rank": rank, "world": 2, "finished": True}
    start = read_log(folder / "run" / "log.jsonl")[0]
    assert start["run"]["global_batch_size"] == 4


def test_workers_of_the_local_mode_keep_states_and_find_each_other(tmp_path):
    run_two_ranks(Path(__file__).with_name("ray_local_worker.py"), tmp_path)
    check_two_workers(tmp_path)


@pytest.mark.slow
def test_a_worker_finds_the_others_that_ray_started(tmp_path):
    in_its_own_process(two_workers, worker_settings(tmp_path))
    check_two_workers(tmp_path)
