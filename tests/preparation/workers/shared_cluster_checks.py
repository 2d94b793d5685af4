"""Tests of the executor on a Ray cluster that they share; test_ray_cluster.py runs them in a process of their own."""

import signal
import subprocess
import sys
import textwrap

import pytest

from batchloom import OutputError
from batchloom.preparation.workers.protocols import TaskLoss, TaskMessage, TaskResult
from batchloom.preparation.workers.ray_cluster import RayExecutor
from preparation.jobs import make_job, run_job
from preparation.stores import hash_store_files, write_jsonl
from preparation.workers.executor_contract import check_contract, next_event, run_tasks, wait_for
from preparation.workers.ray_nodes import add_node, kill_node, ray_cluster
from preparation.workers.worker_tasks import setup
from processes import have_ended
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def cluster():
    """Start a head with two processors, shared by tests that do not kill it."""
    with ray_cluster(nodes=0, head=2) as cluster:
        yield cluster


def test_the_contract_of_an_executor(cluster, tmp_path):
    with RayExecutor(setup, cluster.address, shared=tmp_path) as executor:
        check_contract(executor)
        assert executor.workers == 2
        assert len(set(run_tasks(executor, [("pid", None)] * 20).values())) <= 2
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []


def test_a_dead_worker_loses_only_its_own_task(cluster):
    limit = 400 << 20
    message = "died on a node of the Ray cluster (out of memory?)"
    tasks = [
        (("tell then die", signal.SIGKILL), 3, message),
        (("exit", 3), 0, message),
        (("no memory", None), 0, "ran out of memory"),
        (("hold", 600 << 20), 1, " MiB of memory, more than the 400 MiB that a worker may use"),
    ]
    with RayExecutor(setup, cluster.address, workers=2, memory=limit) as executor:
        for number, (task, _, _) in enumerate(tasks):
            executor.submit(number, task)
        executor.submit(9, ("square", 5))
        assert executor.workers <= 2
        events = []
        while executor.unfinished:
            events.append(next_event(executor))
        for number, (_, message_count, reason) in enumerate(tasks):
            task_events = [event for event in events if event.number == number]
            # The memory limit may end the worker before its message arrives.
            assert len(task_events) - 1 == message_count or task[0] == "hold"
            assert [type(event) for event in task_events] == [TaskMessage] * (len(task_events) - 1) + [TaskLoss]
            assert task_events[-1].reason.endswith(reason)
        assert TaskResult(9, 25) in events


def test_a_node_that_does_not_see_the_folder_is_named(cluster, tmp_path):
    with RayExecutor(setup, cluster.address, shared=tmp_path) as executor:
        for token in tmp_path.iterdir():
            token.unlink()
        executor.submit(0, ("square", 1))
        with pytest.raises(OutputError, match=r"Node .* cannot see .* on every node"):
            wait_for(executor, TaskResult)


def test_workers_end_with_a_coordinator_that_is_killed(cluster, tmp_path):
    written_file = tmp_path / "written"
    code = f"""
        from batchloom.preparation.workers.ray_cluster import RayExecutor
        from preparation.workers.worker_tasks import setup
        with RayExecutor(setup, {cluster.address!r}) as executor:
            executor.submit(0, ("write", {str(written_file)!r}))
            while True:
                if (event := executor.next(1)) is not None:
                    print(event.message, flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    process.kill()
    process.communicate()
    process.stdout.close()
    assert have_ended([worker], LIMIT_S)
    assert written_file.stat().st_size > 0


def test_a_task_on_a_dead_node_is_lost(cluster, tmp_path):
    """Add a third node, and kill it while all processors are busy."""
    cluster.living.append(add_node(cluster))
    with RayExecutor(setup, cluster.address) as executor:
        for number in range(3):
            executor.submit(number, ("wait", tmp_path / "go"))
        for _ in range(3):
            wait_for(executor, TaskMessage)
        cluster.worker_nodes.discard(kill_node(cluster))
        loss = wait_for(executor, TaskLoss)
        (tmp_path / "go").touch()
        assert [type(next_event(executor)) for _ in range(2)] == [TaskResult, TaskResult]
        assert loss.reason in (
            "was on a node of the Ray cluster that died",
            "died on a node of the Ray cluster (out of memory?)",
        )
    cluster.wait_for_nodes()


def test_a_store_prepared_on_a_cluster_is_that_of_one_process(cluster, tmp_path):
    rows = [{"text": f"document number {n} " + "x" * (n % 50)} for n in range(300)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    execution = {"workers": 2, "engine": "ray", "address": cluster.address}
    assert "error" not in run_job(make_job([path], tmp_path / "one"))
    assert "error" not in run_job(make_job([path], tmp_path / "ray", execution=execution))
    assert hash_store_files(tmp_path / "ray") == hash_store_files(tmp_path / "one")
