"""Workers of an elastic run come, are killed and leave, and no sequence is lost or trained twice."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from batchloom import Loader, SettingsError
from batchloom.batches import BatchOptions
from batchloom.cli import run_command_line as command
from batchloom.train import RunFolder, WorkerConfig, read_checkpoint_state, read_log
from processes import rank_environments, run_ranks, start_processes
from sources.hub_server import hub_serving
from train.elastic_worker import SEQ_LEN, heard, numbers, surviving, write_numbered
from train.runs import long_conversations, small_store, wait_for_step
from train.test_ranks import ENVIRONMENT

WORKER = Path(__file__).with_name("elastic_worker.py")
DOCUMENTS = 60_000
# Seconds in which whatever is waited for happens on a busy machine.
PATIENCE = 240
# Steps between two states of a run whose workers are killed.
BETWEEN = 20


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
    """Require every sequence of the run's steps once in what its weights have seen, and no other."""
    newest = RunFolder(folder / "run").find_newest_checkpoint()
    done, state, _ = read_checkpoint_state(newest)
    assert done == steps
    padded = BatchOptions(uneven="pad")
    loader = Loader(store, seq_len=SEQ_LEN, global_batch_size=2, world_size=1, rank=0, batch=padded)
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
    assert state["position"] == len(seen) == len(set(seen)) < len(store)
    logged = [one["step"] for one in read_log(folder / "run" / "log.jsonl") if one["kind"] == "step"]
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


def worlds_of(history):
    """The numbers of workers, one after the other, that made the steps."""
    worlds = [history[step][0]["world"] for step in sorted(history)]
    return [a for a, b in zip(worlds, [0, *worlds], strict=False) if a != b]


def test_a_run_goes_on_with_other_workers_and_after_a_kill(tmp_path):
    (tmp_path / "heard").mkdir()
    store = write_numbered(tmp_path / "s", 5000)
    (alone,) = run_ranks(*words(store, tmp_path, 6, "--save-interval", 4), ranks=1)
    assert alone.returncode == 0, alone.stderr
    command = words(store, tmp_path, 10**6, "--save-interval", 4)
    with start_processes(*command, environments=rank_environments()) as (first, second):
        wait_for_step(first, tmp_path / "run", 15)
        # Both: the first may wait in native code for the second, until torchrun kills it.
        for rank in (second, first):
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    done = read_checkpoint_state(RunFolder(tmp_path / "run").find_newest_checkpoint())[0]
    assert done >= 12
    (alone,) = run_ranks(*words(store, tmp_path, done + 5, "--save-interval", 3), ranks=1)
    assert alone.returncode == 0, alone.stderr
    assert worlds_of(check_once(store, tmp_path, done + 5)) == [1, 2, 1]


@pytest.mark.slow
def test_workers_join_are_killed_and_leave(numbered, tmp_path):
    (tmp_path / "heard").mkdir()
    command = words(numbered, tmp_path, 10**6, "--save-interval", BETWEEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def made(world, before):
        """The last step of processes not known before, so many together: one of theirs is saved
        for good, and they have made more since, which whoever kills them takes away."""

        def look():
            steps = [
                one["step"]
                for one in heard(tmp_path / "heard")
                if one["world"] == world and one["rank"] == 0 and one["pid"] not in before
            ]
            if not steps or steps[-1] < steps[0] + BETWEEN + 10:
                return None
            return steps[-1] if BETWEEN / 4 <= steps[-1] % BETWEEN <= 3 * BETWEEN / 4 else None

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
    newest = RunFolder(tmp_path / "run").find_newest_checkpoint()
    done = read_checkpoint_state(newest)[0]
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
    assert worlds_of(history) == [1, 2, 1]
    # What was killed had made steps that were made again.
    assert len([one for one in heard(tmp_path / "heard") if one["rank"] == 0]) > len(history)
    assert "lost contact with the other ranks" in (tmp_path / "first.log").read_text()
    assert os.path.exists(tmp_path / "run" / "loss.png")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dataset_type": ""}, "dataset_type: missing; give one of dummy, distributed_dummy, "),
        ({"dataset_type": "hugingface"}, "'hugingface' is not a type.*did you mean 'huggingface'"),
        ({"dataset_type": "store"}, "dataset_name: missing; store is read from the folder or"),
        (
            {"dataset_type": "huggingface"},
            "dataset_name: missing; .* a data set of the Hub, as org/",
        ),
        (
            {"dataset_name": "wiki"},
            "dummy: 'wiki' is not a setting.* or leave it out",
        ),
        ({"dataset_name": "vocab=1"}, "vocab: 1 is not a whole number from 2"),
        ({"tokenizer_name": "gpt2"}, "requires huggingface; synthetic data has no text"),
        ({"num_steps": 0}, "num_steps: 0 is not a whole number from 1"),
        ({"batch_size": 0}, "batch_size: 0 is not"),
        ({"overlong": "spilt"}, "overlong: 'spilt' is none of split, drop, .*mean 'split'"),
        (
            {"model_size": "mediun"},
            "'mediun' is not a size; give one of tiny, medium; did you mean 'medium'",
        ),
    ],
)
def test_what_a_worker_cannot_be_is_said(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        WorkerConfig(**{"worker_id": "w", "dataset_type": "dummy", **settings})


def test_what_is_wrong_is_said_of_the_options(capsys):
    words = ["worker", "--dataset-name", "wiki=1", "--num-steps", "0"]
    assert command([*words, "--dataset-type", "dummy", "--tokenizer", "gpt2"]) == 2
    said = capsys.readouterr().err
    assert "--tokenizer: 'gpt2' requires huggingface" in said
    assert "--num-steps: 0 is not" in said
    assert "For real data give --dataset-type huggingface or store" in said
    assert command(words) == 2
    assert "--dataset-type: missing; give one of" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_whose_peers_never_come_is_ended(tmp_path, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    words = ["worker", "--dataset-type", "dummy", "--device", "cpu", "--out", str(tmp_path / "run")]
    environment = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with start_processes("-m", "batchloom", *words, environments=[environment]) as (alone,):
        # It listens once it waits in native code.
        ends = time.monotonic() + PATIENCE
        while not listens(int(port)) and time.monotonic() < ends:
            time.sleep(0.02)
        line = alone.out.read_text()
        assert line == f"rank 0 of 2 waits for the other ranks at 127.0.0.1:{port}\n"
        alone.send_signal(number)
        assert alone.wait().returncode == -number


def listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_goes_on_and_another_is_refused(tmp_path, capsys):
    asked = ["worker", "--dataset-type", "dummy", "--dataset-name", "vocab=300", "--device", "cpu"]
    asked += ["--batch-size", "2", "--out", str(tmp_path / "run"), "--worker-id", "w1"]
    assert command([*asked, "--num-steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("source=synthetic" in line for line in lines)
    assert any(
        line.startswith("worker w1 (rank 0 of 1)  2 sequences of each step (the same on every worker); ")
        and "effective global batch 2 = 2 local x 1 worker; steps 1 to 2" in line
        for line in lines
    )
    assert any(line.startswith("worker w1 (rank 0 of 1)  2 steps, 128 tokens, ") for line in lines)
    assert command([*asked, "--num-steps", "2"]) == 0
    assert "0 steps, 0 tokens" in capsys.readouterr().out
    assert command([*asked, "--num-steps", "4", "--seq-len", "16"]) == 1
    assert "seq_len was 32 and is 16" in capsys.readouterr().err
    words = [*asked, "--num-steps", "4", "--dataset-name=vocab=301"]
    del words[3:5]
    assert command(words) == 1
    assert "data.fingerprint was" in capsys.readouterr().err


def test_conversations_longer_than_a_sequence(tmp_path, capsys):
    """Left out unless it is said otherwise; where that leaves nothing, what is advised can be typed."""
    store = str(long_conversations(tmp_path).path)
    asked = ["worker", "--dataset-type", "store", "--dataset-name", store, "--device", "cpu"]
    asked += ["--seq-len", "200", "--num-steps", "2", "--batch-size", "1"]
    assert command([*asked, "--out", str(tmp_path / "a")]) == 1
    assert "use overlong='split'" in capsys.readouterr().err
    asked += ["--out", str(tmp_path / "b")]
    assert command([*asked, "--overlong", "split"]) == 0
    assert "2 steps, " in capsys.readouterr().out
    assert command([*asked, "--overlong", "truncate"]) == 1
    assert "order.overlong was 'split' and is 'truncate'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_prepared_once(tmp_path, monkeypatch, capsys):
    text = b"".join(b'{"text": "document %d of them"}\n' % number for number in range(300))
    words = ["worker", "--dataset-type", "huggingface", "--dataset-name", "team/set"]
    words += ["--tokenizer", "bytes", "--device", "cpu", "--out", str(tmp_path / "run")]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub_serving({"team/set": {"train.jsonl": text}}) as hub:
        # The Hub's library reads its address when it is imported.
        first = subprocess.run(
            [sys.executable, "-m", "batchloom", *words, "--num-steps", "2"],
            env={**ENVIRONMENT, **os.environ, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert first.returncode == 0, first.stderr
    assert "team/set is prepared in" in first.stdout
    # What goes on needs no network.
    assert command([*words, "--num-steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "is prepared in" not in printed
    assert "1 step, " in printed


@pytest.mark.parametrize(
    ("unlike", "problem"),
    [
        (
            ["--dataset-name", "sRANK"],
            "The ranks do not read the same data: .* on rank 0 and .* on rank 1",
        ),
        (["--num-steps", "1RANK"], "num_steps is 10 on rank 0 and 11 on rank 1. Start all of them"),
    ],
)
def test_workers_that_differ_are_stopped_before_a_step(tmp_path, monkeypatch, unlike, problem):
    small_store(tmp_path / "s0")
    small_store(tmp_path / "s1", longest=50)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys\nfrom batchloom.cli import run_command_line\n"
        "sys.exit(run_command_line([word.replace('RANK', os.environ['RANK']) for word in sys.argv[1:]]))\n"
    )
    asked = {"--dataset-name": "s0", "--num-steps": "5", **dict([unlike])}
    words = ["worker", "--dataset-type", "store", "--device", "cpu", "--out", "run"]
    done = run_ranks(script, *words, *(word for pair in asked.items() for word in pair))
    assert any(one.returncode for one in done)
    said = "".join(one.stderr for one in done)
    assert re.search(problem, said), said
    assert not (tmp_path / "run" / "run.json").exists()
