"""Workers of an elastic run come, are killed and leave, and no sequence is lost or trained twice."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from batchloom import Loader
from batchloom.train.checkpoint import read_state
from batchloom.train.folder import RunFolder
from batchloom.train.log import read_log
from train.elastic_worker import SEQ_LEN, heard, numbers, surviving, write_numbered
from train.test_ranks import ENVIRONMENT

WORKER = Path(__file__).with_name("elastic_worker.py")
DOCUMENTS = 60_000
# Seconds in which whatever is waited for happens on a busy machine.
PATIENCE = 240


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("data") / "s", DOCUMENTS)


def words(store, folder, steps, *more):
    asked = {
        "--dataset-type": "store",
        "--dataset-name": store.path,
        "--batch-size": 2,
        "--seq-len": SEQ_LEN,
        "--num-steps": steps,
        "--out": folder / "run",
        "--device": "cpu",
    }
    flat = [str(word) for pair in asked.items() for word in pair]
    return [str(WORKER), str(folder / "heard"), "worker", *flat, *map(str, more)]


def check_once(store, folder, steps):
    """Every sequence of the run's steps is in what its weights have seen, once, and no other."""
    newest = RunFolder(folder / "run").newest()
    done, state, _ = read_state(newest)
    assert done == steps
    loader = Loader(store, seq_len=SEQ_LEN, global_batch_size=2, world_size=1, rank=0, uneven="pad")
    # The run may have begun with more workers than one; then its journal says so at step 0.
    loader.load_state_dict(state)
    history = surviving(folder / "heard")
    seen = []
    for step in range(1, steps + 1):
        lines = history[step]
        assert sorted(lines) == list(range(lines[0]["world"]))
        rows = [row for rank in sorted(lines) for row in lines[rank]["rows"]]
        assert rows == numbers(loader.batch(step - 1)["input_ids"])
        assert len(rows) == 2 * lines[0]["world"]
        seen += rows
    assert state["position"] == len(seen) == len(set(seen)) < DOCUMENTS
    logged = [
        one["step"] for one in read_log(folder / "run" / "log.jsonl") if one["kind"] == "step"
    ]
    assert logged == list(range(1, steps + 1))
    return history


def until(what, condition, agents):
    """Wait for something; whoever waits in vain is told what the agents said."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        if (found := condition()) is not None:
            return found
        time.sleep(0.05)
    pytest.fail(f"{what}: {[agent.said.read_text()[-3000:] for agent in agents]}")


class Agent:
    """torchrun of one node of the two there may be."""

    def __init__(self, process, said):
        self.process, self.said = process, said

    def worker(self):
        return psutil.Process(self.process.pid).children()[0]

    def kill(self):
        """As a node without power: torchrun is gone, and its worker with it."""
        for one in (psutil.Process(self.process.pid), *self.children()):
            one.kill()
        self.process.wait(60)

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def agent(port, host, command, said):
    conf = f"is_host={host:d},last_call_timeout=2,join_timeout=200,keep_alive_interval=1,keep_alive_max_attempt=3"
    launch = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d"]
    launch += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", f"--rdzv-conf={conf}"]
    launch += ["--local-addr=127.0.0.1", "--monitor-interval=0.2"]
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, *command],
            # Else torch 2.13 does not tell a node that joins where the others are.
            env={**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=file,
            stderr=file,
        )
    made = Agent(process, said)
    try:
        yield made
    finally:
        if process.poll() is None:
            made.kill()


def test_workers_join_are_killed_and_leave(numbered, tmp_path):
    (tmp_path / "heard").mkdir()
    command = words(numbered, tmp_path, 10**6, "--save-interval", 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def made(world, before):
        """The last step of processes not known before, so many together, once they made ten."""

        def look():
            steps = [
                one["step"]
                for one in heard(tmp_path / "heard")
                if one["world"] == world and one["rank"] == 0 and one["pid"] not in before
            ]
            return steps[-1] if steps and steps[-1] >= steps[0] + 10 else None

        return look

    def pids():
        return {one["pid"] for one in heard(tmp_path / "heard")}

    with ExitStack() as stack:
        first = stack.enter_context(agent(port, True, command, tmp_path / "first.log"))
        step = until("the first alone", made(1, ()), [first])
        second = stack.enter_context(agent(port, False, command, tmp_path / "second.log"))
        both = [first, second]
        step = until("a second joins", made(2, pids()), both)
        old = pids()
        second.worker().kill()
        step = until("a worker is killed", made(2, old), both)
        old = pids()
        second.kill()
        step = until("a node is lost", made(1, old), both)
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(PATIENCE)
    newest = RunFolder(tmp_path / "run").newest()
    done = read_state(newest)[0]
    assert done >= step
    # Asked politely it saved the step it was at.
    assert done == max(surviving(tmp_path / "heard"))
    last = subprocess.run(
        [sys.executable, *words(numbered, tmp_path, done + 5, "--save-interval", 3)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert last.returncode == 0, last.stderr
    history = check_once(numbered, tmp_path, done + 5)
    worlds = [history[step][0]["world"] for step in sorted(history)]
    assert [a for a, b in zip(worlds, [0, *worlds], strict=False) if a != b] == [1, 2, 1]
    # What was killed had made steps that were made again.
    assert len([one for one in heard(tmp_path / "heard") if one["rank"] == 0]) > len(history)
    assert "waited for the others in vain" in (tmp_path / "first.log").read_text()
    assert os.path.exists(tmp_path / "run" / "loss.png")
