"""A pool of processes: workers that die, hold too much or never start; a coordinator that dies."""

import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from batchloom import SettingsError
from batchloom.core.errors import RecordError, WorkerError
from batchloom.preparation.workers import (
    PrestartedWorkers,
    ProcessPool,
    TaskLoss,
    TaskMessage,
    TaskResult,
    iter_task_events,
)
from preparation.workers.contract import results, until
from preparation.workers.works import dying_setup, failing_setup, greedy_setup, setup, slow_setup


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (("tell then die", signal.SIGKILL), "was killed by signal 9 (out of memory?)"),
        (("tell then die", signal.SIGTERM), "was killed by signal 15 (Terminated)"),
        (("exit", 3), "exited with code 3"),
        (("exit", 0), "exited with code 0"),
        (("segfault", None), "was killed by signal 11 (Segmentation fault)"),
        (("no memory", None), "ran out of memory"),
    ],
)
def test_a_dead_worker_takes_its_own_order_with_it(order, reason):
    with ProcessPool(setup, 2) as pool:
        pool.submit(0, order)
        for number in range(1, 10):
            pool.submit(number, ("square", number))
        events = []
        while pool.unfinished:
            events.append(pool.next(30))
        mine = [one for one in events if one.number == 0]
        told = [TaskMessage(0, n) for n in range(3)] if order[0] == "tell then die" else []
        assert mine == [*told, TaskLoss(0, reason)]
        assert {one.number: one.result for one in events if isinstance(one, TaskResult)} == {
            number: number**2 for number in range(1, 10)
        }
        assert results(pool, [("square", 5)] * 4) == dict.fromkeys(range(4), 25)


def test_processes_that_began_before_their_work_was_known_do_it():
    with PrestartedWorkers(2, "preparation.workers.works") as ready:
        begun = {one.process.pid for one in ready._workers}
        with ProcessPool(setup, 2, ready=ready) as pool:
            assert results(pool, [("pid", None)] * 8).keys() == set(range(8))
            assert {one.process.pid for one in pool._workers} == begun
    assert not any(psutil.pid_exists(pid) for pid in begun)


def test_processes_that_nobody_took_are_ended():
    with PrestartedWorkers(2, "preparation.workers.works") as ready:
        processes = [one.process for one in ready._workers]
    assert [one.poll() for one in processes] == [-signal.SIGKILL] * 2
    assert not ready.take()


def test_a_process_that_cannot_import_its_work_is_told(capfd):
    with (
        PrestartedWorkers(1, "preparation.workers.nowhere") as ready,
        ProcessPool(setup, 1, ready=ready) as pool,
    ):
        # The pool starts another one, which imports what its setup needs.
        assert results(pool, [("square", 3)]) == {0: 9}
    assert "No module named 'preparation.workers.nowhere'" in capfd.readouterr().err


def test_a_lost_order_is_given_again_or_left(tmp_path):
    asked = []

    def lost(number, order, reason):
        asked.append((number, order, reason))
        return order if number == 0 else None

    with ProcessPool(setup, 2) as pool:
        orders = [("once", tmp_path / "mark"), ("exit", 1), ("square", 3)]
        assert results(pool, orders, lost) == {0: "second time", 2: 9}
    assert sorted(one[0] for one in asked) == [0, 1]
    assert (1, ("exit", 1), "exited with code 1") in asked


def test_results_come_once_whatever_is_killed():
    drawn = random.Random(5)
    found, killed = {}, 0
    with ProcessPool(slow_setup, 3) as pool:
        for event in iter_task_events(
            pool, [(n, ("flaky", n)) for n in range(200)], lambda number, order, reason: order
        ):
            if isinstance(event, TaskResult):
                assert event.number not in found
                found[event.number] = event.result
            if drawn.random() < 0.1:
                victim = drawn.choice(pool._workers).process.pid
                os.kill(victim, signal.SIGKILL)
                killed += 1
    assert found == {number: number * 3 for number in range(200)}
    assert killed > 10


def test_a_worker_above_its_memory_is_killed():
    with ProcessPool(setup, 2, memory=200 << 20) as pool:
        pool.submit(0, ("hold", 300 << 20))
        pool.submit(1, ("hold", 1 << 20))
        lost = until(pool, TaskLoss)
        assert lost.number == 0
        # It is looked at whenever there is time, also while the memory is being filled.
        assert lost.reason.startswith(("used 2", "used 3"))
        assert lost.reason.endswith(" MiB of memory, more than the 200 MiB that a worker may use")
        assert pool.unfinished == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dying_setup, "the last one exited with code 7.* give --workers 1"),
        (
            greedy_setup,
            r"the last one used 1.. MiB of memory, more than the 100 MiB .*\. Give more \(--memory",
        ),
    ],
)
def test_workers_that_never_start_end_the_job(make, words):
    with ProcessPool(make, 2, memory=100 << 20) as pool:
        pool.submit(0, ("square", 3))
        with pytest.raises(WorkerError, match=words):
            pool.next(20)


def test_an_error_of_the_setup_is_raised_as_it_is():
    with ProcessPool(failing_setup, 2) as pool:
        pool.submit(0, ("square", 3))
        with pytest.raises(RecordError, match="the setup does not like it"):
            pool.next(20)


def test_a_number_of_workers_is_at_least_one():
    with pytest.raises(SettingsError, match="workers: 0 is too few; give 1 or more"):
        ProcessPool(setup, 0)


def test_a_slow_coordinator_holds_what_workers_say_in_their_pipes():
    """Workers wait until they are heard: of 400 messages of 64 kB each few are under way."""
    with ProcessPool(setup, 2) as pool:
        for number in range(400):
            pool.submit(number, ("bytes", 1 << 16))
        pool.next(20)
        time.sleep(0.5)
        assert pool.unfinished == 399
        assert sum(one.number is not None for one in pool._workers) <= 2


def test_closing_ends_every_worker_within_a_second():
    with ProcessPool(setup, 2) as pool:
        for number in range(2):
            pool.submit(number, ("sleep in C", 60))
        pids = [until(pool, TaskMessage).message for _ in range(2)]
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert not any(map(psutil.pid_exists, pids))


def test_workers_compute_on_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    with ProcessPool(setup, 1) as pool:
        orders = [("environment", "OMP_NUM_THREADS"), ("environment", "RAYON_NUM_THREADS")]
        assert results(pool, orders) == {0: "1", 1: "3"}


COORDINATOR = """
    import sys
    from batchloom.preparation.workers.process_pool import ProcessPool, PrestartedWorkers
    from preparation.workers.works import setup

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


def coordinator(order, tmp_path):
    """A process with a pool of two that are at work, and their ids."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COORDINATOR))
    tests = str(Path(__file__).parents[2])
    paths = os.pathsep.join([tests, *(path for path in sys.path if path)])
    process = subprocess.Popen(
        [sys.executable, str(script), repr(order)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    return process, [int(process.stdout.readline()) for _ in range(2)]


def gone(pids, seconds=5.0):
    """Whether processes are gone (or dead and not yet waited for) within some time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) and alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("kind", ["sleep in C", "write"])
def test_workers_end_with_a_coordinator_that_is_killed(kind, tmp_path):
    written = tmp_path / "written"
    process, pids = coordinator((kind, 60 if kind == "sleep in C" else str(written)), tmp_path)
    process.kill()
    process.communicate(timeout=10)
    assert gone(pids, 1)
    if kind == "write":
        size = written.stat().st_size
        time.sleep(0.1)
        assert written.stat().st_size == size > 0


def test_interrupting_all_processes_is_the_coordinators_to_handle(tmp_path):
    process, pids = coordinator(("sleep in C", 60), tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert out == "closed\n"
    assert err.count("Traceback") == 1
    assert gone(pids, 1)


def test_a_plain_script_and_a_notebook_can_use_a_pool(tmp_path):
    """No guard around the main module: workers do not run it again."""
    program = """
        print("main runs")
        from batchloom.preparation.workers.process_pool import ProcessPool, PrestartedWorkers
        from preparation.workers.works import setup
        with ProcessPool(setup, 2) as pool:
            pool.submit(0, ("square", 12))
            while pool.unfinished:
                print(getattr(pool.next(20), "result", ""))
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for command in ([str(script)], ["-c", textwrap.dedent(program)], ["-"]):
        done = subprocess.run(
            [sys.executable, *command],
            input=script.read_text() if command == ["-"] else "",
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert (done.stdout, done.stderr) == ("main runs\n144\n", "")


def test_standard_streams_that_are_closed_do_not_become_pipes(tmp_path):
    program = """
        from batchloom.preparation.workers.process_pool import ProcessPool, PrestartedWorkers
        from preparation.workers.works import setup
        with ProcessPool(setup, 1) as pool:
            pool.submit(0, ("print", "said"))
            while pool.unfinished:
                event = pool.next(20)
            open("result", "w").write(str(event.result))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = f"exec {sys.executable} -c {shlex.quote(textwrap.dedent(program))} <&- >&- 2>&-"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=60, check=True)
    assert (tmp_path / "result").read_text() == "printed"
