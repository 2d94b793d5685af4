"""The executor of a Ray cluster on this machine, and tests that kill its nodes."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from batchloom import InputError, OutputError
from batchloom.core.errors import WorkerError
from batchloom.preparation.workers.protocols import TaskLoss, TaskMessage, TaskResult, iter_task_events
from batchloom.preparation.workers.ray_cluster import RayExecutor, _describe_connection_error, count_worker_slots
from preparation.jobs import make_job, run_job
from preparation.stores import hash_store_files, write_jsonl
from preparation.workers.executor_contract import check_contract, run_tasks, wait_for
from preparation.workers.ray_nodes import add_node, kill_node, ray_cluster
from preparation.workers.worker_tasks import setup

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'batchloom[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def cluster():
    """Start a head with two processors, shared by tests that do not kill it."""
    with ray_cluster(nodes=0, head=2) as cluster:
        yield cluster


@pytest.fixture
def nodes():
    """Start a head without processors and three nodes, which a test may kill."""
    with ray_cluster() as cluster:
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
            events.append(executor.next(30))
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
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    psutil.wait_procs([worker], timeout=20)
    size = written_file.stat().st_size
    time.sleep(0.2)
    assert written_file.stat().st_size == size > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_task_on_a_dead_node_is_lost(cluster):
    """Add a third node, and kill it while all processors are busy."""
    cluster.living.append(add_node(cluster))
    with RayExecutor(setup, cluster.address) as executor:
        for number in range(3):
            executor.submit(number, ("sleep", 2))
        for _ in range(3):
            wait_for(executor, TaskMessage)
        cluster.worker_nodes.discard(kill_node(cluster))
        events = [executor.next(30) for _ in range(3)]
        assert sorted(type(event).__name__ for event in events) == [
            "TaskLoss",
            "TaskResult",
            "TaskResult",
        ]
        [loss] = [event for event in events if isinstance(event, TaskLoss)]
        assert loss.reason in (
            "was on a node of the Ray cluster that died",
            "died on a node of the Ray cluster (out of memory?)",
        )
    cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_cluster_that_shrinks_to_nothing_ends_the_job_and_one_that_grows_goes_on(nodes):
    with RayExecutor(setup, nodes.address) as executor:
        for number in range(3):
            executor.submit(number, ("sleep", 100))
        for _ in range(3):
            wait_for(executor, TaskMessage)
        for _ in range(3):
            kill_node(nodes)
        assert {wait_for(executor, TaskLoss).number for _ in range(3)} == {0, 1, 2}
    with RayExecutor(setup, nodes.address, patience=1.5) as executor:
        executor.submit(0, ("square", 7))
        with pytest.raises(WorkerError, match=r"No node .* a processor for 1.5 seconds; finished work is kept"):
            wait_for(executor, TaskResult)
    with RayExecutor(setup, nodes.address, patience=30) as executor:
        executor.submit(0, ("square", 7))
        assert executor.next(0.1) is None
        nodes.living.append(add_node(nodes))
        assert wait_for(executor, TaskResult) == TaskResult(0, 49)


@pytest.mark.slow
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


def test_a_store_prepared_on_a_cluster_is_that_of_one_process(cluster, tmp_path):
    rows = [{"text": f"document number {n} " + "x" * (n % 50)} for n in range(300)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    execution = {"workers": 2, "engine": "ray", "address": cluster.address}
    assert "error" not in run_job(make_job([path], tmp_path / "one"))
    assert "error" not in run_job(make_job([path], tmp_path / "ray", execution=execution))
    assert hash_store_files(tmp_path / "ray") == hash_store_files(tmp_path / "one")


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        (
            "127.0.0.1:1",
            WorkerError,
            r"There is no Ray cluster at '127.0.0.1:1' \(.*refused\); give",
        ),
        ("nonsense", WorkerError, "There is no Ray cluster at 'nonsense'"),
        ("ray://127.0.0.1:10001", InputError, "is an address of the Ray client"),
    ],
)
def test_a_wrong_address_is_reported_at_once(address, kind, message):
    start = time.monotonic()
    with pytest.raises(kind, match=message), RayExecutor(setup, address):
        pass
    assert time.monotonic() - start < 5


def test_another_python_is_reported_in_one_sentence():
    from ray._private.utils import check_version_info

    other_versions = {"ray_version": ray.__version__, "python_version": "3.8.1"}
    with pytest.raises(RuntimeError) as caught:
        check_version_info(other_versions, "node 127.0.0.1")
    message = _describe_connection_error("127.0.0.1:1", caught.value)
    assert message.startswith("The Ray cluster at '127.0.0.1:1' runs another version of Python or Ray")
    assert "3.8.1" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("nodes", "memory", "workers"),
    [
        ([], None, 0),
        ([{"CPU": 4.0}, {}, {"CPU": 0.0}, {"CPU": 2.5}], None, 6),
        ([{"CPU": 4.0, "memory": 10.0}, {"CPU": 1.0, "memory": 100.0}], 5, 3),
        ([{"CPU": 4.0, "memory": 4.0}], 5, 0),
    ],
)
def test_workers_fit_into_processors_and_memory(nodes, memory, workers):
    assert count_worker_slots(nodes, memory) == workers


def run_script(code, search_path=(), **variables):
    paths = [*search_path, *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_local_ray_listens_on_this_machine_alone_and_ends(tmp_path):
    # Ray writes a token of its own into the home folder.
    process = run_script(
        """
        import psutil
        from batchloom.preparation.workers.ray_cluster import RayExecutor
        from preparation.workers.executor_contract import run_tasks
        from preparation.workers.worker_tasks import setup

        with RayExecutor(setup, workers=2) as executor:
            assert run_tasks(executor, [("square", n) for n in range(9)]) == {n: n * n for n in range(9)}
            assert executor.workers == 2
            children = psutil.Process().children(recursive=True)
            addresses = [
                connection.laddr.ip
                for process in children
                for connection in process.net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN
            ]
        assert addresses and all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ip in addresses), addresses
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, alive
        print("right")
        """,
        HOME=str(tmp_path),
    )
    assert (process.returncode, process.stdout) == (0, "right\n"), process.stderr


def test_without_ray_the_remedy_is_reported(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    process = run_script(
        """
        from batchloom.preparation.workers.ray_cluster import RayExecutor
        from preparation.workers.worker_tasks import setup
        with RayExecutor(setup):
            pass
        """,
        search_path=[tmp_path],
    )
    assert "MissingDependencyError: --engine ray needs ray: pip install 'batchloom[ray]'" in (process.stderr)
