"""A crew on a Ray cluster on this machine, started once; nodes that are killed belong to a test of their own."""

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
from batchloom.preparation.workers import (
    RayClusterSettings,
    RayExecutor,
    TaskLoss,
    TaskMessage,
    TaskResult,
    iter_task_events,
)
from batchloom.preparation.workers.ray_cluster import _describe_connection_error, count_worker_slots
from preparation.jobs import job, run_job
from preparation.stores import jsonl, tree
from preparation.workers.contract import check_contract, results, until
from preparation.workers.nodes import add_node, kill_node, ray_cluster
from preparation.workers.works import setup

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'batchloom[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def cluster():
    """A head with two processors: nobody takes it away."""
    with ray_cluster(nodes=0, head=2) as made:
        yield made


@pytest.fixture
def nodes():
    """A head without processors and three nodes, which are one test's to kill."""
    with ray_cluster() as made:
        yield made


def test_the_contract_of_a_crew(cluster, tmp_path):
    with RayExecutor(setup, RayClusterSettings(cluster.address, shared=tmp_path)) as crew:
        check_contract(crew)
        assert crew.workers == 2
        assert len(set(results(crew, [("pid", None)] * 20).values())) <= 2
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []


def test_a_dead_worker_takes_its_own_order_with_it(cluster):
    limit = 400 << 20
    died = "died on a node of the Ray cluster (out of memory?)"
    orders = [
        (("tell then die", signal.SIGKILL), 3, died),
        (("exit", 3), 0, died),
        (("no memory", None), 0, "ran out of memory"),
        (("hold", 600 << 20), 1, " MiB of memory, more than the 400 MiB that a worker may use"),
    ]
    with RayExecutor(setup, RayClusterSettings(cluster.address, workers=2, memory=limit)) as crew:
        for number, (order, _, _) in enumerate(orders):
            crew.submit(number, order)
        crew.submit(9, ("square", 5))
        assert crew.workers <= 2
        events = []
        while crew.unfinished:
            events.append(crew.next(30))
        for number, (_, tells, reason) in enumerate(orders):
            mine = [one for one in events if one.number == number]
            # Whoever takes its memory may be found out before it tells of it.
            assert len(mine) - 1 == tells or order[0] == "hold"
            assert [type(one) for one in mine] == [TaskMessage] * (len(mine) - 1) + [TaskLoss]
            assert mine[-1].reason.endswith(reason)
        assert TaskResult(9, 25) in events


def test_a_node_that_does_not_see_the_folder_is_named(cluster, tmp_path):
    with RayExecutor(setup, RayClusterSettings(cluster.address, shared=tmp_path)) as crew:
        for token in tmp_path.iterdir():
            token.unlink()
        crew.submit(0, ("square", 1))
        with pytest.raises(OutputError, match=r"Node .* cannot see .* on every node"):
            until(crew, TaskResult)


def test_workers_end_with_a_coordinator_that_is_killed(cluster, tmp_path):
    written = tmp_path / "written"
    code = f"""
        from batchloom.preparation.workers.ray_cluster import RayClusterSettings, RayExecutor
        from preparation.workers.works import setup
        with RayExecutor(setup, RayClusterSettings({cluster.address!r})) as crew:
            crew.submit(0, ("write", {str(written)!r}))
            while True:
                if (event := crew.next(1)) is not None:
                    print(event.message, flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    psutil.wait_procs([worker], timeout=20)
    size = written.stat().st_size
    time.sleep(0.2)
    assert written.stat().st_size == size > 0


@pytest.mark.slow
def test_results_come_once_whatever_workers_and_nodes_are_killed(nodes):
    drawn, found, reasons = random.Random(5), {}, []

    def lost(number, order, reason):
        reasons.append(reason)
        return order

    with RayExecutor(setup, RayClusterSettings(nodes.address)) as crew:
        for event in iter_task_events(crew, [(n, ("flaky", n)) for n in range(200)], lost):
            if isinstance(event, TaskResult):
                assert event.number not in found
                found[event.number] = event.result
                if len(found) == 100:
                    kill_node(nodes)
                elif len(found) % 25 == 0:
                    victims = [p for p in psutil.process_iter() if name(p) == "ray::do_order"]
                    if victims:
                        drawn.choice(victims).kill()
    assert found == {number: number * 3 for number in range(200)}
    assert reasons


def name(process):
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.slow
def test_an_order_on_a_node_that_dies_is_lost(cluster):
    """A third node works for a while, and all processors are busy when it goes."""
    cluster.living.append(add_node(cluster))
    with RayExecutor(setup, RayClusterSettings(cluster.address)) as crew:
        for number in range(3):
            crew.submit(number, ("sleep", 2))
        for _ in range(3):
            until(crew, TaskMessage)
        cluster.worker_nodes.discard(kill_node(cluster))
        events = [crew.next(30) for _ in range(3)]
        assert sorted(type(one).__name__ for one in events) == [
            "TaskResult",
            "TaskResult",
            "TaskLoss",
        ]
        [lost] = [one for one in events if isinstance(one, TaskLoss)]
        assert lost.reason in (
            "was on a node of the Ray cluster that died",
            "died on a node of the Ray cluster (out of memory?)",
        )
    cluster.wait_for_nodes()


@pytest.mark.slow
def test_a_cluster_that_shrinks_to_nothing_ends_the_job_and_one_that_grows_goes_on(nodes):
    with RayExecutor(setup, RayClusterSettings(nodes.address)) as crew:
        for number in range(3):
            crew.submit(number, ("sleep", 100))
        for _ in range(3):
            until(crew, TaskMessage)
        for _ in range(3):
            kill_node(nodes)
        assert {until(crew, TaskLoss).number for _ in range(3)} == {0, 1, 2}
    with RayExecutor(setup, RayClusterSettings(nodes.address, patience=1.5)) as crew:
        crew.submit(0, ("square", 7))
        with pytest.raises(WorkerError, match=r"No node .* a processor for 1.5 seconds; what is"):
            until(crew, TaskResult)
    with RayExecutor(setup, RayClusterSettings(nodes.address, patience=30)) as crew:
        crew.submit(0, ("square", 7))
        assert crew.next(0.1) is None
        nodes.living.append(add_node(nodes))
        assert until(crew, TaskResult) == TaskResult(0, 49)


@pytest.mark.slow
def test_a_node_without_batchloom_is_told_in_one_sentence(tmp_path):
    (tmp_path / "batchloom").mkdir()
    (tmp_path / "batchloom" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'batchloom'\", name='batchloom')"
    )
    with ray_cluster(nodes=0) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path))
            add_node(cluster)
        with RayExecutor(setup, RayClusterSettings(cluster.address)) as crew:
            crew.submit(0, ("square", 7))
            with pytest.raises(WorkerError, match="cannot load batchloom .* install the same"):
                until(crew, TaskResult)


def test_a_store_prepared_on_a_cluster_is_that_of_one_process(cluster, tmp_path):
    rows = [{"text": f"document number {n} " + "x" * (n % 50)} for n in range(300)]
    path = jsonl(tmp_path / "in.jsonl", rows)
    execution = {"workers": 2, "engine": "ray", "address": cluster.address}
    assert "error" not in run_job(job([path], tmp_path / "one"))
    assert "error" not in run_job(job([path], tmp_path / "ray", execution=execution))
    assert tree(tmp_path / "ray") == tree(tmp_path / "one")


@pytest.mark.parametrize(
    ("address", "kind", "words"),
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
def test_a_wrong_address_is_told_at_once(address, kind, words):
    began = time.monotonic()
    with pytest.raises(kind, match=words), RayExecutor(setup, RayClusterSettings(address)):
        pass
    assert time.monotonic() - began < 5


def test_another_python_is_told_in_one_sentence():
    from ray._private.utils import check_version_info

    other = {"ray_version": ray.__version__, "python_version": "3.8.1"}
    with pytest.raises(RuntimeError) as caught:
        check_version_info(other, "node 127.0.0.1")
    said = _describe_connection_error("127.0.0.1:1", caught.value)
    assert said.startswith("The Ray cluster at '127.0.0.1:1' runs another version of Python or Ray")
    assert "3.8.1" in said
    assert "\n" not in said


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


def run(code, extra=(), **more):
    paths = [*extra, *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **more},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_ray_of_its_own_is_of_this_machine_alone_and_ends(tmp_path):
    # Ray lays a token of its own into the home folder.
    done = run(
        """
        import psutil
        from batchloom.preparation.workers.ray_cluster import RayClusterSettings, RayExecutor
        from preparation.workers.contract import results
        from preparation.workers.works import setup

        with RayExecutor(setup, RayClusterSettings(workers=2)) as crew:
            assert results(crew, [("square", n) for n in range(9)]) == {n: n * n for n in range(9)}
            assert crew.workers == 2
            family = psutil.Process().children(recursive=True)
            listening = [
                place.laddr.ip
                for one in family
                for place in one.net_connections(kind="inet")
                if place.status == psutil.CONN_LISTEN
            ]
        assert listening and all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ip in listening), listening
        gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, alive
        print("right")
        """,
        HOME=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_without_ray_the_remedy_is_told(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    done = run(
        """
        from batchloom.preparation.workers.ray_cluster import RayClusterSettings, RayExecutor
        from preparation.workers.works import setup
        with RayExecutor(setup, RayClusterSettings()):
            pass
        """,
        extra=[tmp_path],
    )
    assert "MissingDependencyError: --engine ray needs ray: pip install 'batchloom[ray]'" in (done.stderr)
