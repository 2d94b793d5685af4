"""A pool of processes: dying, greedy and failing workers; a dying coordinator."""

import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from batchloom.core.errors import RecordError, WorkerError
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.preparation.workers.process_pool import ProcessPool
from batchloom.preparation.workers.protocols import TaskLoss, TaskMessage, TaskResult, iter_task_events
from preparation.workers.executor_contract import next_event, run_tasks, wait_for
from preparation.workers.worker_tasks import (
    dying_setup,
    failing_setup,
    greedy_setup,
    set_environment,
    setup,
    slow_setup,
)
from processes import have_ended
from waiting import LIMIT_S

DEATHS = [
    (("tell then die", signal.SIGKILL), "was killed by signal 9 (out of memory?)"),
    (("tell then die", signal.SIGTERM), "was killed by signal 15 (Terminated)"),
    (("exit", 3), "exited with code 3"),
    (("exit", 0), "exited with code 0"),
    (("segfault", None), "was killed by signal 11 (Segmentation fault)"),
    (("no memory", None), "ran out of memory"),
]


def test_a_dead_worker_loses_only_its_own_task():
    with ProcessPool(setup, 2) as pool:
        for task, reason in DEATHS:
            pool.submit(0, task)
            for number in range(1, 10):
                pool.submit(number, ("square", number))
            events = []
            while pool.unfinished:
                events.append(next_event(pool))
            task_events = [event for event in events if event.number == 0]
            messages = [TaskMessage(0, n) for n in range(3)] if task[0] == "tell then die" else []
            assert task_events == [*messages, TaskLoss(0, reason)]
            assert {event.number: event.result for event in events if isinstance(event, TaskResult)} == {
                number: number**2 for number in range(1, 10)
            }
            assert run_tasks(pool, [("square", 5)] * 4) == dict.fromkeys(range(4), 25)


def test_a_server_that_is_already_started_forks_the_workers():
    with ForkServer("preparation.workers.worker_tasks") as server, ProcessPool(setup, 2, server=server) as pool:
        assert run_tasks(pool, [("pid", None)] * 8).keys() == set(range(8))
        process_ids = [worker.process.pid for worker in pool._workers]
        assert {psutil.Process(pid).ppid() for pid in process_ids} == {server.pid}
    assert not any(map(psutil.pid_exists, [server.pid, *process_ids]))


def test_a_server_with_a_failing_import_is_reported(capfd):
    with ForkServer("preparation.workers.nowhere") as server, ProcessPool(setup, 1, server=server) as pool:
        # The pool starts another server, which imports the modules of its setup.
        assert run_tasks(pool, [("square", 3)]) == {0: 9}
    assert "No module named 'preparation.workers.nowhere'" in capfd.readouterr().err


def test_what_a_server_has_called_is_known_to_the_workers():
    with ForkServer() as server:
        server.call(set_environment)
        with ProcessPool(setup, 2, server=server) as pool:
            assert run_tasks(pool, [("environment", "CALLED")] * 4) == dict.fromkeys(range(4), "before the fork")


def test_an_error_of_a_call_is_raised_as_it_is():
    with ForkServer() as server:
        server.call(failing_setup)
        with ProcessPool(setup, 2, server=server) as pool:
            pool.submit(0, ("square", 3))
            with pytest.raises(RecordError, match="the setup does not like it"):
                next_event(pool)


def test_workers_end_with_their_server_and_lose_their_tasks():
    with ProcessPool(setup, 2) as pool:
        for number in range(2):
            pool.submit(number, ("sleep in C", 600))
        process_ids = [wait_for(pool, TaskMessage).message for _ in range(2)]
        os.kill(pool._server.pid, signal.SIGKILL)
        losses = [wait_for(pool, TaskLoss) for _ in range(2)]
        assert sorted(loss.number for loss in losses) == [0, 1]
        assert {loss.reason for loss in losses} == {"was killed by signal 9 (out of memory?)"}
        assert have_ended(process_ids, LIMIT_S)
        # Another server takes the place of the dead one.
        assert run_tasks(pool, [("square", 5)] * 4) == dict.fromkeys(range(4), 25)


def test_a_lost_task_is_retried_or_dropped(tmp_path):
    losses = []

    def handle_crash(number, task, reason):
        losses.append((number, task, reason))
        return task if number == 0 else None

    with ProcessPool(setup, 2) as pool:
        tasks = [("once", tmp_path / "mark"), ("exit", 1), ("square", 3)]
        assert run_tasks(pool, tasks, handle_crash) == {0: "second time", 2: 9}
    assert sorted(loss[0] for loss in losses) == [0, 1]
    assert (1, ("exit", 1), "exited with code 1") in losses


def test_results_come_once_whatever_is_killed():
    rng = random.Random(5)
    results_by_number, kill_count = {}, 0
    with ProcessPool(slow_setup, 3) as pool:
        for event in iter_task_events(pool, [(n, ("flaky", n)) for n in range(200)], lambda number, task, reason: task):
            if isinstance(event, TaskResult):
                assert event.number not in results_by_number
                results_by_number[event.number] = event.result
            if rng.random() < 0.1:
                victim = rng.choice(pool._workers).process.pid
                os.kill(victim, signal.SIGKILL)
                kill_count += 1
    assert results_by_number == {number: number * 3 for number in range(200)}
    assert kill_count > 10


def test_a_worker_above_its_memory_is_killed():
    with ProcessPool(setup, 2, memory=100 << 20) as pool:
        pool.submit(0, ("hold", 180 << 20))
        pool.submit(1, ("hold", 1 << 20))
        loss = wait_for(pool, TaskLoss)
        assert loss.number == 0
        # Memory is checked whenever the pool has time, also while the worker allocates it.
        assert loss.reason.startswith(("used 1", "used 2"))
        assert loss.reason.endswith(" MiB of memory, more than the 100 MiB that a worker may use")
        assert pool.unfinished == 1


@pytest.mark.parametrize(
    ("setup_function", "message"),
    [
        (dying_setup, "the last one exited with code 7.* give --workers 1"),
        pytest.param(
            greedy_setup,
            r"the last one used 1.. MiB of memory, more than the 100 MiB .*\. Give more \(--memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_that_never_start_end_the_job(setup_function, message):
    with ProcessPool(setup_function, 2, memory=100 << 20) as pool:
        pool.submit(0, ("square", 3))
        with pytest.raises(WorkerError, match=message):
            next_event(pool)


def test_an_error_of_the_setup_is_raised_as_it_is():
    with ProcessPool(failing_setup, 2) as pool:
        pool.submit(0, ("square", 3))
        with pytest.raises(RecordError, match="the setup does not like it"):
            next_event(pool)


def test_messages_wait_in_the_pipes_of_workers_for_a_slow_coordinator():
    """Workers wait for the coordinator: few of 400 messages of 64 kB are in transit."""
    with ProcessPool(setup, 2) as pool:
        for number in range(400):
            pool.submit(number, ("bytes", 1 << 16))
        next_event(pool)
        assert pool.unfinished == 399
        assert sum(worker.number is not None for worker in pool._workers) <= 2


def test_closing_ends_every_worker():
    with ProcessPool(setup, 2) as pool:
        for number in range(2):
            pool.submit(number, ("sleep in C", 600))
        pids = [wait_for(pool, TaskMessage).message for _ in range(2)]
    assert not any(map(psutil.pid_exists, pids))


def test_workers_compute_on_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    with ProcessPool(setup, 1) as pool:
        tasks = [("environment", "OMP_NUM_THREADS"), ("environment", "RAYON_NUM_THREADS")]
        assert run_tasks(pool, tasks) == {0: "1", 1: "3"}


COORDINATOR = """
    import sys
    from batchloom.preparation.workers.process_pool import ProcessPool
    from preparation.workers.worker_tasks import setup

    pool = ProcessPool(setup, 2)
    try:
        for number in range(2):
            pool.submit(number, eval(sys.argv[1]))
        while True:
            event = pool.next(20)
            if event is not None:
                print(event.message, flush=True)
    finally:
        pool.close()
        print("closed", flush=True)
"""


def start_coordinator(task, tmp_path):
    """Start a process with a pool of two busy workers; return it and their ids."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COORDINATOR))
    tests_folder = str(Path(__file__).parents[2])
    paths = os.pathsep.join([tests_folder, *(path for path in sys.path if path)])
    process = subprocess.Popen(
        [sys.executable, str(script), repr(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    return process, [int(process.stdout.readline()) for _ in range(2)]


@pytest.mark.parametrize("kind", ["sleep in C", "write"])
def test_workers_end_with_a_coordinator_that_is_killed(kind, tmp_path):
    written_file = tmp_path / "written"
    process, pids = start_coordinator((kind, 600 if kind == "sleep in C" else str(written_file)), tmp_path)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert have_ended(pids, LIMIT_S)
    assert kind != "write" or written_file.stat().st_size > 0


def test_interrupting_all_processes_is_the_coordinators_to_handle(tmp_path):
    process, pids = start_coordinator(("sleep in C", 600), tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert out == "closed\n"
    assert err.count("Traceback") == 1
    assert have_ended(pids, LIMIT_S)


def test_a_plain_script_and_a_notebook_can_use_a_pool(tmp_path):
    """Workers do not run the main module again, even without a main guard."""
    program = """
        print("main runs")
        from batchloom.preparation.workers.process_pool import ProcessPool
        from preparation.workers.worker_tasks import setup
        with ProcessPool(setup, 2) as pool:
            pool.submit(0, ("square", 12))
            while pool.unfinished:
                print(getattr(pool.next(20), "result", ""))
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for command in ([str(script)], ["-"]):
        process = subprocess.run(
            [sys.executable, *command],
            input=script.read_text() if command == ["-"] else "",
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
        )
        assert (process.stdout, process.stderr) == ("main runs\n144\n", "")


def test_standard_streams_that_are_closed_do_not_become_pipes(tmp_path):
    program = """
        from batchloom.preparation.workers.process_pool import ProcessPool
        from preparation.workers.worker_tasks import setup
        with ProcessPool(setup, 1) as pool:
            pool.submit(0, ("print", "said"))
            while pool.unfinished:
                event = pool.next(20)
            open("result", "w").write(str(event.result))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = f"exec {sys.executable} -c {shlex.quote(textwrap.dedent(program))} <&- >&- 2>&-"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=LIMIT_S, check=True)
    assert (tmp_path / "result").read_text() == "printed"
