"""The executor of a Ray cluster on this machine, and tests that kill its nodes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batchloom import InputError, OutputError
from batchloom.core.errors import WorkerError
from batchloom.preparation.workers.protocols import TaskLoss, TaskResult
from batchloom.preparation.workers.ray_cluster import RayExecutor, _describe_connection_error, count_worker_slots
from preparation.jobs import make_job, run_job
from preparation.stores import hash_store_files, write_jsonl
from preparation.workers.executor_contract import check_contract, next_event, wait_for
from preparation.workers.worker_tasks import setup
from processes import run_python

# Importing Ray to check for it would take a second.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="ray is not installed: pip install 'batchloom[ray]'"
)
# Processes for each job that starts would take a second each.
FEW_PROCESSES = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}


def test_a_local_ray_and_wrong_addresses(tmp_path):
    """The only fast test that loads and starts Ray, which takes as long as a hundred others.

    It runs in a process of its own, because Ray leaves threads, sockets and variables behind.
    """
    # Ray reads whether to listen on this machine alone when it is loaded, so the local Ray comes first.
    code = (
        f"import sys; from {__name__} import *; check_local_ray(sys.argv[1]); check_wrong_addresses(); print('right')"
    )
    # Ray writes a token of its own into the home folder.
    variables = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", **FEW_PROCESSES}
    completed = run_python(code, tmp_path, env=variables)
    assert (completed.returncode, completed.stdout.splitlines()[-1:]) == (0, ["right"]), completed.stderr


def check_local_ray(folder):
    """Check the contract and a job; a local Ray listens on this machine alone and ends."""
    shared = Path(folder, "shared")
    shared.mkdir()
    rows = [{"text": f"document number {n} " + "x" * (n % 50)} for n in range(300)]
    path = write_jsonl(shared / "in.jsonl", rows)
    with RayExecutor(setup, workers=1, shared=shared) as executor:
        [token] = shared.glob(".reach-*")
        check_contract(executor)
        assert executor.workers == 1
        executor.submit(0, ("exit", 3))
        executor.submit(1, ("square", 5))
        losses = [next_event(executor) for _ in range(2)]
        assert losses == [TaskLoss(0, "died on a node of the Ray cluster (out of memory?)"), TaskResult(1, 25)]
        token.unlink()
        executor.submit(2, ("square", 1))
        with pytest.raises(OutputError, match=r"Node .* cannot see .* on every node"):
            wait_for(executor, TaskResult)
        # This executor takes the Ray that runs.
        assert "error" not in run_job(make_job([path], shared / "ray", execution={"workers": 1, "engine": "ray"}))
        children = psutil.Process().children(recursive=True)
        addresses = set().union(*map(list_listening_addresses, children))
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, alive
    assert "error" not in run_job(make_job([path], shared / "one"))
    assert hash_store_files(shared / "ray") == hash_store_files(shared / "one")


def list_listening_addresses(process):
    try:
        connections = process.net_connections(kind="inet")
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def check_wrong_addresses():
    """Check that wrong addresses and another Python are reported at once."""
    import ray
    from ray._private.utils import check_version_info

    for address, kind, message in [
        ("127.0.0.1:1", WorkerError, r"There is no Ray cluster at '127.0.0.1:1' \(.*refused\); give"),
        ("nonsense", WorkerError, "There is no Ray cluster at 'nonsense'"),
        ("ray://127.0.0.1:10001", InputError, "is an address of the Ray client"),
    ]:
        # Ray itself would retry for minutes, until the process is ended.
        with pytest.raises(kind, match=message), RayExecutor(setup, address):
            pass
    other_versions = {"ray_version": ray.__version__, "python_version": "3.8.1"}
    with pytest.raises(RuntimeError) as caught:
        check_version_info(other_versions, "node 127.0.0.1")
    message = _describe_connection_error("127.0.0.1:1", caught.value)
    assert message.startswith("The Ray cluster at '127.0.0.1:1' runs another version of Python or Ray")
    assert "3.8.1" in message
    assert "\n" not in message


def test_without_ray_the_remedy_is_reported():
    code = """
from batchloom.preparation.workers.ray_cluster import RayExecutor
from preparation.workers.worker_tasks import setup
with RayExecutor(setup):
    pass
"""
    completed = run_python(code, missing=["ray"])
    assert "MissingDependencyError: --engine ray needs ray: pip install 'batchloom[ray]'" in completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared_cluster_checks.py", "dying_node_checks.py"])
def test_a_cluster(name):
    """Run the tests of a file in a process of its own, because Ray leaves threads, sockets and variables behind."""
    path = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:leaks", "-p", "no:cacheprovider", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


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
