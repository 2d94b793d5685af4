"""Jobs whose processes are killed at random moments give the same store."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preparation.jobs import make_job, start_job, wait_for_job
from preparation.stores import hash_store_files, write_jsonl
from preparation.workers.ray_nodes import add_node, kill_node, ray_cluster
from processes import have_ended
from waiting import LIMIT_S

RUNS = int(os.environ.get("BATCHLOOM_TORTURE", "3"))
CLEAN_STEPS = ["control", "whitespace", "pii", {"length": {"least_words": 4}}]
# test_run_failures.py and test_crash_isolation.py kill a coordinator and workers once each, in the fast tier.
pytestmark = pytest.mark.slow
# Ends of a job of which children were killed: all workers before any was ready, or the process that opens tables.
KILL_ERRORS = re.compile(
    "worker processes ended one after the other before they could do any work|the process that opened it was killed"
)
JOBS = {
    "exact": {"tokenizer": "train:300", "val_fraction": 0.1},
    "near": {"dedup": "near", "clean": CLEAN_STEPS, "tokens_per_shard": 4000},
    "lines": {"dedup": "lines", "clean": CLEAN_STEPS, "val_fraction": 0.1, "test_fraction": 0.1},
    "chat": {"val_fraction": 0.1, "max_tokens": 500, "overlong": "split"},
}


def make_sentence(rng):
    words = [
        "one",
        "two",
        "three",
        "of",
        "the",
        "and",
        "is",
        "work",
        "night",
        "water",
        "stone",
        "river",
        "light",
        "under",
        "over",
    ]
    return " ".join(rng.choice(words) for _ in range(rng.randint(3, 30)))


def write_corpus(folder):
    """Write texts in several formats, with exact and near copies and broken records."""
    rng = random.Random(1)
    lines = [make_sentence(rng) for _ in range(40)]
    texts = []
    for number in range(900):
        text = "\n".join([make_sentence(rng), rng.choice(lines), f"mail{number}@example.org"])
        texts.append(text if number % 5 or not texts else rng.choice(texts))
        if number % 7 == 0:
            texts[-1] += " end"
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in texts[:500]])
    with (folder / "a.jsonl").open("a") as file:
        file.write('broken\n{"no": 1}\n')
    (folder / "b.txt").write_text("\n\n".join(texts[450:650]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[600:750])
    pq.write_table(pa.table({"text": texts[740:]}), folder / "d.parquet", row_group_size=30)
    for number in range(30):
        (folder / f"e{number:02d}.txt").write_text(texts[number * 20] + "\n")
    questions = [
        {
            "question": make_sentence(rng),
            "answer": " ".join(make_sentence(rng) for _ in range(n % 40 and n % 9 + 1)),
        }
        for n in range(700)
    ]
    write_jsonl(folder / "chat.jsonl", [*questions, *questions[:50], {"question": 3}])
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Return a function that prepares a job without kills, once, and measures it."""
    files_by_name, sizes = {}, {}

    def prepare_once(name, execution):
        if name not in files_by_name:
            files_by_name[name] = hash_store_files(prepare_alone(name, {})[0])
        if (key := (name, execution.get("engine"))) not in sizes:
            out, sizes[key] = prepare_alone(name, execution)
            assert hash_store_files(out) == files_by_name[name]
        return files_by_name[name], sizes[key]

    def prepare_alone(name, execution):
        out = tmp_path_factory.mktemp(name) / "out"
        job = make_job(select_inputs(inputs, name), out, execution=execution, max_bad=60, **JOBS[name])
        process, start_time, file_count = start_job(job), time.monotonic(), 0
        while process.poll() is None:
            file_count = max(file_count, count_files(out))
            time.sleep(0.005)
        assert "error" not in wait_for_job(process)
        return out, (time.monotonic() - start_time, file_count)

    return prepare_once


def select_inputs(inputs, name):
    return [path for path in inputs if (path.name == "chat.jsonl") == (name == "chat")]


def count_files(out):
    """Count the files and folders that a job has made so far."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(out / ".work"))


def hash_files(files):
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def kill_processes(rng, process, ray):
    """Kill the coordinator, some workers or all processes; return which, or "" if no worker runs."""
    victims = [("coordinator", 2), ("workers", 3), ("all", 1)]
    target = rng.choices([name for name, _ in victims], [weight for _, weight in victims])[0]
    if target == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif target == "coordinator":
        process.kill()
    else:
        workers = find_ray_workers() if ray else psutil.Process(process.pid).children()
        target = "workers" if workers else ""
        for worker in workers[: rng.randint(1, 3)]:
            try:
                worker.kill()
            except psutil.NoSuchProcess:
                continue
    return target


def find_ray_workers():
    """Find processes that run tasks; Ray names them after their function."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if command[0].startswith("ray::run_ray_task"):
            processes.append(process)
    return processes


def wait_for_random_moment(rng, process, out, run_size):
    """Wait for a random part of a job's time or files; return the seconds."""
    seconds, files = run_size
    deadline, target_count = time.monotonic() + seconds, count_files(out) + rng.uniform(0, files)
    if rng.random() < 0.5:
        deadline, target_count = time.monotonic() + rng.uniform(0, seconds), float("inf")
    start_time = time.monotonic()
    while time.monotonic() < deadline and process.poll() is None and count_files(out) < target_count:
        time.sleep(0.002)
    return round(time.monotonic() - start_time, 2)


def run_with_kills(rng, job, run_size, ray=False):
    """Kill a job several times, then finish it; return the kills and the last report."""
    out, kills = Path(job["out"]), []
    while not kills:
        shutil.rmtree(out, ignore_errors=True)
        kills_left = rng.randint(1, 3)
        for dry in (True, False) if rng.random() < 0.3 else (False,):
            report = None
            while report is None:
                process = start_job({**job, "run_settings": {"dry_run": dry}})
                new_kills, workers = disturb(rng, process, out, run_size, kills_left, ray)
                report, kills_left = wait_for_job(process), kills_left - len(new_kills)
                kills += new_kills
                assert ray or have_ended([worker.pid for worker in workers], LIMIT_S)
                if report is not None and "error" in report:
                    assert KILL_ERRORS.search(report["error"]), report
                    report = None
    return kills, report


def disturb(rng, process, out, run_size, max_kills, ray):
    """Kill a job or its workers while it runs; return the kills and its workers."""
    kills, workers = [], []
    while len(kills) < max_kills and process.poll() is None:
        waited = wait_for_random_moment(rng, process, out, run_size)
        if process.poll() is None:
            workers += psutil.Process(process.pid).children(recursive=True)
            target = kill_processes(rng, process, ray)
            kills += [(target, waited)] if target else []
            if target not in ("workers", ""):
                break
    return kills, workers


@pytest.mark.parametrize("run", range(RUNS))
def test_killed_in_a_pool_the_store_is_the_same(run, inputs, undisturbed, tmp_path):
    rng = random.Random(run)
    name = list(JOBS)[run % len(JOBS)]
    execution = {"workers": 3}
    expected, run_size = undisturbed(name, execution)
    job = make_job(select_inputs(inputs, name), tmp_path / "out", execution=execution, max_bad=60, **JOBS[name])
    kills, report = run_with_kills(rng, job, run_size)
    print(f"{run} {name}: {kills}, {report['resumed']} units found; {hash_files(hash_store_files(tmp_path / 'out'))}")
    assert hash_store_files(tmp_path / "out") == expected
    assert not (tmp_path / "out" / ".work").exists()


@pytest.fixture(scope="module")
def cluster():
    """Start a head without processors, and three nodes of one processor each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'batchloom[ray]'")
    with ray_cluster() as cluster:
        yield cluster


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(JOBS) if RUNS > 3 else ["near"])
def test_a_node_that_dies_in_the_middle_changes_nothing(name, cluster, inputs, undisturbed, tmp_path):
    execution = {"workers": 3, "engine": "ray", "address": cluster.address}
    expected, (_, files) = undisturbed(name, execution)
    out = tmp_path / "out"
    process = start_job(make_job(select_inputs(inputs, name), out, execution=execution, max_bad=60, **JOBS[name]))
    while process.poll() is None and count_files(out) < files / 3:
        time.sleep(0.002)
    was_running = process.poll() is None
    kill_node(cluster)
    report = wait_for_job(process)
    cluster.living.append(add_node(cluster))
    assert was_running
    assert report is not None
    assert "error" not in report, report
    assert hash_store_files(out) == expected


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("run", range(max(1, RUNS // 2)))
def test_killed_on_ray_the_store_is_the_same(run, cluster, inputs, undisturbed, tmp_path):
    rng = random.Random(1000 + run)
    name = list(JOBS)[run % len(JOBS)]
    execution = {"workers": 3, "engine": "ray", "address": cluster.address}
    expected, run_size = undisturbed(name, execution)
    job = make_job(select_inputs(inputs, name), tmp_path / "out", execution=execution, max_bad=60, **JOBS[name])
    kills, report = run_with_kills(rng, job, run_size, ray=True)
    print(f"{run} {name}: {kills}, {report['resumed']} units found; {hash_files(hash_store_files(tmp_path / 'out'))}")
    assert hash_store_files(tmp_path / "out") == expected
