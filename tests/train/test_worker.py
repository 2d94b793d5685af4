"""Elastic runs train each sequence once while workers join, die and leave."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from batchloom import Loader, SettingsError
from batchloom.adapters.logging import read_log
from batchloom.cli import run_command_line as command
from batchloom.train import RunFolder, WorkerConfig, read_checkpoint_state
from processes import find_free_port, make_rank_environments, run_ranks, start_processes
from sources.hub_server import serve_hub
from train.elastic_worker import SEQ_LEN, decode_numbers, read_step_lines, select_surviving_lines, write_numbered
from train.runs import long_conversations, small_store, wait_for_step
from train.test_ranks import ENVIRONMENT
from waiting import wait_until

WORKER = Path(__file__).with_name("elastic_worker.py")
DOCUMENTS = 60_000
# Seconds to wait for an event on a busy machine.
TIMEOUT = 240
# Steps between checkpoints of a run whose workers are killed.
SAVE_INTERVAL = 20


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("data") / "s", DOCUMENTS)


def make_worker_args(store, folder, steps, *extra_args):
    options = {
        "--dataset-type": "store",
        "--dataset-name": store.path,
        "--batch-size": 2,
        "--seq-len": SEQ_LEN,
        "--num-steps": steps,
        "--out": folder / "run",
        "--device": "cpu",
    }
    option_args = [str(value) for pair in options.items() for value in pair]
    return [str(WORKER), str(folder / "heard"), "worker", *option_args, *map(str, extra_args)]


def check_once(store, folder, steps):
    """Require that the weights were trained once on each sequence of the run's steps."""
    newest = RunFolder(folder / "run").find_newest_checkpoint()
    saved_step, state, _ = read_checkpoint_state(newest)
    assert saved_step == steps
    loader = Loader(store, seq_len=SEQ_LEN, global_batch_size=2, world_size=1, rank=0, uneven="pad")
    # The run may have begun with several workers; its journal then has an edit at step 0.
    loader.load_state_dict(state)
    history = select_surviving_lines(folder / "heard")
    trained_rows = []
    for step in range(1, steps + 1):
        lines = history[step]
        assert sorted(lines) == list(range(lines[0]["world"]))
        rows = [row for rank in sorted(lines) for row in lines[rank]["rows"]]
        assert rows == decode_numbers(loader.batch(step - 1)["input_ids"])
        assert len(rows) == 2 * lines[0]["world"]
        trained_rows += rows
    assert state["position"] == len(trained_rows) == len(set(trained_rows)) < len(store)
    logged = [entry["step"] for entry in read_log(folder / "run" / "log.jsonl") if entry["kind"] == "step"]
    assert logged == list(range(steps))
    return history


def wait_for_agents(event, condition, agents):
    """Wait for a result of ``condition``; on timeout fail with the agents' output."""
    try:
        return wait_until(condition, event)
    except AssertionError as error:
        pytest.fail(f"{error}: {[start_agent.log.read_text()[-3000:] for start_agent in agents]}")


class Agent:
    """torchrun of one of up to two nodes."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    def worker(self):
        return psutil.Process(self.process.pid).children()[0]

    def kill(self):
        """Kill torchrun and its worker, as a power failure of the node does."""
        for process in (psutil.Process(self.process.pid), *self.children()):
            process.kill()
        self.process.wait(60)

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def start_agent(port, host, command, log):
    conf = f"is_host={host:d},last_call_timeout=2,join_timeout=200,keep_alive_interval=1,keep_alive_max_attempt=3"
    launch = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d"]
    launch += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", f"--rdzv-conf={conf}"]
    launch += ["--local-addr=127.0.0.1", "--monitor-interval=0.2"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, *command],
            # Without it torch 2.13 does not tell a joining node the address of the others.
            env={**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=file,
            stderr=file,
        )
    new_agent = Agent(process, log)
    try:
        yield new_agent
    finally:
        if process.poll() is None:
            new_agent.kill()


def list_world_sizes(history):
    """Return the successive numbers of workers that made the steps."""
    worlds = [history[step][0]["world"] for step in sorted(history)]
    return [a for a, b in zip(worlds, [0, *worlds], strict=False) if a != b]


def test_a_run_resumes_with_other_workers_and_after_a_kill(tmp_path):
    (tmp_path / "heard").mkdir()
    store = write_numbered(tmp_path / "s", 2000)
    (result,) = run_ranks(*make_worker_args(store, tmp_path, 3, "--save-interval", 2), ranks=1)
    assert result.returncode == 0, result.stderr
    command = make_worker_args(store, tmp_path, 400, "--save-interval", 2)
    with start_processes(*command, environments=make_rank_environments()) as (first, second):
        wait_for_step(first, tmp_path / "run", 6)
        # The first rank may wait in native code for the second, so both are killed.
        for rank in (second, first):
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    saved_step = read_checkpoint_state(RunFolder(tmp_path / "run").find_newest_checkpoint())[0]
    assert saved_step >= 4
    (result,) = run_ranks(*make_worker_args(store, tmp_path, saved_step + 2, "--save-interval", 3), ranks=1)
    assert result.returncode == 0, result.stderr
    assert list_world_sizes(check_once(store, tmp_path, saved_step + 2)) == [1, 2, 1]


@pytest.mark.slow
def test_workers_join_are_killed_and_leave(numbered, tmp_path):
    (tmp_path / "heard").mkdir()
    command = make_worker_args(numbered, tmp_path, 10**6, "--save-interval", SAVE_INTERVAL)
    port = find_free_port()

    def make_condition(world, old_pids):
        """Return a condition for steps of ``world`` new processes after a checkpoint.

        It gives their last step once they have made further steps, which a kill then loses.
        """

        def find_last_step():
            steps = [
                line["step"]
                for line in read_step_lines(tmp_path / "heard")
                if line["world"] == world and line["rank"] == 0 and line["pid"] not in old_pids
            ]
            if not steps or steps[-1] < steps[0] + SAVE_INTERVAL + 10:
                return None
            return steps[-1] if SAVE_INTERVAL / 4 <= steps[-1] % SAVE_INTERVAL <= 3 * SAVE_INTERVAL / 4 else None

        return find_last_step

    def read_pids():
        return {line["pid"] for line in read_step_lines(tmp_path / "heard")}

    with ExitStack() as stack:
        first = stack.enter_context(start_agent(port, True, command, tmp_path / "first.log"))
        step = wait_for_agents("the first alone", make_condition(1, ()), [first])
        second = stack.enter_context(start_agent(port, False, command, tmp_path / "second.log"))
        both = [first, second]
        step = wait_for_agents("a second joins", make_condition(2, read_pids()), both)
        known_pids = read_pids()
        second.worker().kill()
        step = wait_for_agents("a worker is killed", make_condition(2, known_pids), both)
        known_pids = read_pids()
        second.kill()
        step = wait_for_agents("a node is lost", make_condition(1, known_pids), both)
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(TIMEOUT)
    newest = RunFolder(tmp_path / "run").find_newest_checkpoint()
    saved_step = read_checkpoint_state(newest)[0]
    assert saved_step >= step
    # On SIGTERM the run saves its current step.
    assert saved_step == max(select_surviving_lines(tmp_path / "heard"))
    result = subprocess.run(
        [sys.executable, *make_worker_args(numbered, tmp_path, saved_step + 5, "--save-interval", 3)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    history = check_once(numbered, tmp_path, saved_step + 5)
    assert list_world_sizes(history) == [1, 2, 1]
    # Steps of the killed processes were repeated.
    assert len([line for line in read_step_lines(tmp_path / "heard") if line["rank"] == 0]) > len(history)
    assert "lost contact with the other ranks" in (tmp_path / "first.log").read_text()
    assert os.path.exists(tmp_path / "run" / "loss.png")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dataset_type": ""}, "--dataset-type: missing; give dummy, distributed_dummy, huggingface or store"),
        ({"dataset_type": "hugingface"}, "'hugingface' is none of .*did you mean 'huggingface'"),
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
        ({"tokenizer_name": "gpt2"}, "requires dataset_type huggingface; stores have their own tokenizer"),
        ({"num_steps": 0}, "num_steps: 0 is not a whole number from 1"),
        ({"batch_size": 0}, "batch_size: 0 is not"),
        ({"overlong": "spilt"}, "overlong: 'spilt' is none of split, drop, .*mean 'split'"),
        (
            {"model_size": "mediun"},
            "'mediun' is none of tiny, medium; did you mean 'medium'",
        ),
    ],
)
def test_invalid_worker_settings_are_refused(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        WorkerConfig(**{"worker_id": "w", "dataset_type": "dummy", **settings})


def test_problems_name_the_options(capsys):
    args = ["worker", "--dataset-name", "wiki=1", "--num-steps", "0"]
    assert command([*args, "--dataset-type", "dummy", "--tokenizer", "gpt2"]) == 2
    error = capsys.readouterr().err
    assert "--tokenizer: 'gpt2' requires dataset_type huggingface; stores" in error
    assert "--num-steps: 0 is not" in error
    assert "For real data give dataset_type huggingface or store" in error
    assert command(args) == 2
    assert "--dataset-type: missing; give dummy, distributed_dummy, huggingface or store" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_without_its_peers_can_be_stopped(tmp_path, number):
    port = str(find_free_port())
    rank_variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    args = ["worker", "--dataset-type", "dummy", "--device", "cpu", "--out", str(tmp_path / "run")]
    environment = {**rank_variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with start_processes("-m", "batchloom", *args, environments=[environment]) as (process,):
        # The worker listens on the port once it waits in native code.
        wait_until(lambda: is_listening(int(port)), "the worker listens")
        line = process.out.read_text()
        assert line == f"rank 0 of 2 waits for the other ranks at 127.0.0.1:{port}\n"
        process.send_signal(number)
        assert process.wait().returncode == -number


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_is_resumed_and_another_is_refused(tmp_path, capsys):
    args = ["worker", "--dataset-type", "dummy", "--dataset-name", "documents=500,vocab=300", "--device", "cpu"]
    args += ["--batch-size", "2", "--out", str(tmp_path / "run"), "--worker-id", "w1"]
    assert command([*args, "--num-steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("source=synthetic" in line for line in lines)
    assert any(
        line.startswith("worker w1 (rank 0 of 1)  2 sequences of each step (the same on every worker); ")
        and "effective global batch 2 = 2 local x 1 worker; steps 0 to 1" in line
        for line in lines
    )
    assert any(line.startswith("worker w1 (rank 0 of 1)  2 steps, 128 tokens, ") for line in lines)
    assert command([*args, "--num-steps", "2"]) == 0
    assert "0 steps, 0 tokens" in capsys.readouterr().out
    assert command([*args, "--num-steps", "4", "--seq-len", "16"]) == 1
    assert "seq_len was 32 and is 16" in capsys.readouterr().err
    changed_args = [*args, "--num-steps", "4", "--dataset-name=documents=500,vocab=301"]
    del changed_args[3:5]
    assert command(changed_args) == 1
    error = capsys.readouterr().err
    assert "was started on dummy:documents=" in error
    assert "documents=500" in error.partition(", and ")[2]


def test_conversations_longer_than_a_sequence(tmp_path, capsys):
    """They are left out by default; if none remains, the error's advice works."""
    store = str(long_conversations(tmp_path).path)
    args = ["worker", "--dataset-type", "store", "--dataset-name", store, "--device", "cpu"]
    args += ["--seq-len", "200", "--num-steps", "2", "--batch-size", "1"]
    assert command([*args, "--out", str(tmp_path / "a")]) == 1
    assert "use --overlong split" in capsys.readouterr().err
    args += ["--out", str(tmp_path / "b")]
    assert command([*args, "--overlong", "split"]) == 0
    assert "2 steps, " in capsys.readouterr().out
    assert command([*args, "--overlong", "truncate"]) == 1
    assert "order.overlong was 'split' and is 'truncate'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_prepared_once(tmp_path, monkeypatch, capsys):
    text = b"".join(b'{"text": "document %d of them"}\n' % number for number in range(300))
    args = ["worker", "--dataset-type", "huggingface", "--dataset-name", "team/set"]
    args += ["--tokenizer", "bytes", "--device", "cpu", "--out", str(tmp_path / "run")]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serve_hub({"team/set": {"train.jsonl": text}}) as hub:
        # huggingface_hub reads the address when it is imported.
        result = subprocess.run(
            [sys.executable, "-m", "batchloom", *args, "--num-steps", "2"],
            env={**ENVIRONMENT, **os.environ, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    assert result.returncode == 0, result.stderr
    assert "team/set is prepared in" in result.stdout
    # Resuming needs no network.
    assert command([*args, "--num-steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "is prepared in" not in printed
    assert "1 step, " in printed


@pytest.mark.parametrize(
    ("differing_option", "problem"),
    [
        (
            ["--dataset-name", "sRANK"],
            "The ranks do not read the same data: .* on rank 0 and .* on rank 1",
        ),
        (
            ["--num-steps", "1RANK"],
            "num_steps is 10 on rank 0 and 11 on rank 1. Start all of them with the same options",
        ),
    ],
)
def test_workers_that_differ_are_stopped_before_a_step(tmp_path, monkeypatch, differing_option, problem):
    small_store(tmp_path / "s0")
    small_store(tmp_path / "s1", longest=50)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys\nfrom batchloom.cli import run_command_line\n"
        "sys.exit(run_command_line([word.replace('RANK', os.environ['RANK']) for word in sys.argv[1:]]))\n"
    )
    options = {"--dataset-name": "s0", "--num-steps": "5", **dict([differing_option])}
    args = ["worker", "--dataset-type", "store", "--device", "cpu", "--out", "run"]
    results = run_ranks(script, *args, *(value for pair in options.items() for value in pair))
    assert any(result.returncode for result in results)
    errors = "".join(result.stderr for result in results)
    assert re.search(problem, errors), errors
    assert not (tmp_path / "run" / "run.json").exists()
