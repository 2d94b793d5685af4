"""Tests of the executor on Ray nodes that die; test_ray_cluster.py runs them in a process of their own."""

import random

import psutil
import pytest

from batchloom.core.errors import WorkerError
from batchloom.preparation.workers.protocols import TaskLoss, TaskMessage, TaskResult, iter_task_events
from batchloom.preparation.workers.ray_cluster import RayExecutor
from preparation.workers.executor_contract import wait_for
from preparation.workers.ray_nodes import add_node, kill_node, ray_cluster
from preparation.workers.worker_tasks import setup
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture
def nodes():
    """Start a head without processors and three nodes, which a test may kill."""
    with ray_cluster() as cluster:
        yield cluster


def test_results_come_once_whatever_workers_and_nodes_are_killed(nodes):
    rng, results_by_number, reasons = random.Random(5), {}, []

    def handle_crash(number, task, reason):
        reasons.append(reason)
        return task

    with RayExecutor(setup, nodes.address) as executor:
        for event in iter_task_events(executor, [(n, ("flaky", n)) for n in range(200)], handle_crash):
            if isinstance(event, TaskResult):
                assert event.number not in results_by_number
                results_by_number[event.number] = event.result
                if len(results_by_number) == 100:
                    kill_node(nodes)
                elif len(results_by_number) % 25 == 0:
                    victims = [
                        process for process in psutil.process_iter() if get_process_name(process) == "ray::run_ray_task"
                    ]
                    if victims:
                        rng.choice(victims).kill()
    assert results_by_number == {number: number * 3 for number in range(200)}
    assert reasons


def get_process_name(process):
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_a_cluster_that_shrinks_to_nothing_ends_the_job_and_one_that_grows_goes_on(nodes):
    with RayExecutor(setup, nodes.address) as executor:
        for number in range(3):
            executor.submit(number, ("sleep", 600))
        for _ in range(3):
            wait_for(executor, TaskMessage)
        for _ in range(3):
            kill_node(nodes)
        assert {wait_for(executor, TaskLoss).number for _ in range(3)} == {0, 1, 2}
    with RayExecutor(setup, nodes.address, patience=1.5) as executor:
        executor.submit(0, ("square", 7))
        with pytest.raises(WorkerError, match=r"No node .* a processor for 1.5 seconds; finished work is kept"):
            wait_for(executor, TaskResult)
    with RayExecutor(setup, nodes.address, patience=LIMIT_S) as executor:
        executor.submit(0, ("square", 7))
        assert executor.next(0.1) is None
        nodes.living.append(add_node(nodes))
        assert wait_for(executor, TaskResult) == TaskResult(0, 49)


def test_a_node_without_batchloom_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "batchloom").mkdir()
    (tmp_path / "batchloom" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'batchloom'\", name='batchloom')"
    )
    with ray_cluster(nodes=0) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path))
            add_node(cluster)
        with RayExecutor(setup, cluster.address) as executor:
            executor.submit(0, ("square", 7))
            with pytest.raises(WorkerError, match="cannot load batchloom .* install the same"):
                wait_for(executor, TaskResult)
