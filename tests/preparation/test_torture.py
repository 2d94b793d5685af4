"""Killed at any moment, any of its processes, again and again: the store has one and the same hash."""

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preparation.jobs import end, job, start
from preparation.stores import jsonl, tree
from preparation.workers.nodes import add_node, kill_node, ray_cluster

RUNS = int(os.environ.get("BATCHLOOM_TORTURE", "3"))
STEPS = ["control", "whitespace", "pii", {"length": {"least_words": 4}}]
# test_disturbed.py and test_dying.py kill a coordinator and workers once each, in the fast tier.
pytestmark = pytest.mark.slow
ENDLESS = "worker processes ended one after the other before they could do any work"
JOBS = {
    "exact": {"tokenizer": "train:300", "val_fraction": 0.1},
    "near": {"dedup": "near", "clean": STEPS, "tokens_per_shard": 4000},
    "lines": {"dedup": "lines", "clean": STEPS, "val_fraction": 0.1, "test_fraction": 0.1},
    "chat": {"val_fraction": 0.1, "max_tokens": 500, "overlong": "split"},
}


def sentence(drawn):
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
    return " ".join(drawn.choice(words) for _ in range(drawn.randint(3, 30)))


def corpus(folder):
    """Texts in several forms, some of them twice or nearly, some of their lines often, some broken."""
    drawn = random.Random(1)
    lines = [sentence(drawn) for _ in range(40)]
    texts = []
    for number in range(900):
        text = "\n".join([sentence(drawn), drawn.choice(lines), f"mail{number}@example.org"])
        texts.append(text if number % 5 or not texts else drawn.choice(texts))
        if number % 7 == 0:
            texts[-1] += " end"
    jsonl(folder / "a.jsonl", [{"text": text} for text in texts[:500]])
    with (folder / "a.jsonl").open("a") as file:
        file.write('broken\n{"no": 1}\n')
    (folder / "b.txt").write_text("\n\n".join(texts[450:650]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[600:750])
    pq.write_table(pa.table({"text": texts[740:]}), folder / "d.parquet", row_group_size=30)
    for number in range(30):
        (folder / f"e{number:02d}.txt").write_text(texts[number * 20] + "\n")
    asked = [
        {
            "question": sentence(drawn),
            "answer": " ".join(sentence(drawn) for _ in range(n % 40 and n % 9 + 1)),
        }
        for n in range(700)
    ]
    jsonl(folder / "chat.jsonl", [*asked, *asked[:50], {"question": 3}])
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """What a job makes when nobody disturbs it, in one process, and how long others take; made once for each."""
    made, lengths = {}, {}

    def of(name, execution):
        if name not in made:
            made[name] = tree(whole(name, {})[0])
        if (key := (name, execution.get("engine"))) not in lengths:
            out, lengths[key] = whole(name, execution)
            assert tree(out) == made[name]
        return made[name], lengths[key]

    def whole(name, execution):
        out = tmp_path_factory.mktemp(name) / "out"
        told = job(chosen(inputs, name), out, execution=execution, max_bad=60, **JOBS[name])
        process, began, most = start(told), time.monotonic(), 0
        while process.poll() is None:
            most = max(most, there(out))
            time.sleep(0.005)
        assert "error" not in end(process)
        return out, (time.monotonic() - began, most)

    return of


def chosen(inputs, name):
    return [path for path in inputs if (path.name == "chat.jsonl") == (name == "chat")]


def there(out):
    """How many files and folders a job has made so far."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(out / ".work"))


def hash_of(files):
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def kill(drawn, process, ray):
    """Kill the coordinator, some of its workers, or all; whether the job can go on by itself."""
    victims = [("coordinator", 2), ("workers", 3), ("all", 1)]
    who = drawn.choices([name for name, _ in victims], [weight for _, weight in victims])[0]
    if who == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif who == "coordinator":
        process.kill()
    else:
        workers = ray_workers() if ray else psutil.Process(process.pid).children()
        for one in workers[: drawn.randint(1, 3)]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    return who


def ray_workers():
    """Processes that do orders; those of Ray are named after what they do."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or [""]
        if words[0].startswith("ray::do_order"):
            found.append(one)
    return found


def moment(drawn, process, out, length):
    """Wait for a random moment of a job: so much of its time, or of what it makes, has passed."""
    seconds, files = length
    until, wanted = time.monotonic() + seconds, there(out) + drawn.uniform(0, files)
    if drawn.random() < 0.5:
        until, wanted = time.monotonic() + drawn.uniform(0, seconds), float("inf")
    began = time.monotonic()
    while time.monotonic() < until and process.poll() is None and there(out) < wanted:
        time.sleep(0.002)
    return round(time.monotonic() - began, 2)


def tortured(drawn, told, length, ray=False):
    """Run a job, kill it some times, run it until it is done; what was killed, and what the last one said."""
    out, killed = Path(told["out"]), []
    while not killed:
        shutil.rmtree(out, ignore_errors=True)
        left = drawn.randint(1, 3)
        for dry in (True, False) if drawn.random() < 0.3 else (False,):
            said = None
            while said is None:
                process = start({**told, "how": {"dry_run": dry}})
                mine, workers = disturb(drawn, process, out, length, left, ray)
                said, left = end(process), left - len(mine)
                killed += mine
                assert ray or gone(workers)
                if said is not None and "error" in said:
                    # Whole crews were killed before any worker was ready.
                    assert ENDLESS in said["error"], said
                    said = None
    return killed, said


def disturb(drawn, process, out, length, most, ray):
    """Kill a job or its workers while it runs; what was killed, and its workers at that time."""
    killed, workers = [], []
    while len(killed) < most and process.poll() is None:
        waited = moment(drawn, process, out, length)
        if process.poll() is None:
            workers += psutil.Process(process.pid).children(recursive=True)
            killed.append((kill(drawn, process, ray), waited))
            if killed[-1][0] != "workers":
                break
    return killed, workers


def gone(processes, seconds=2.0):
    """Whether none of these processes lives after so long."""
    _, alive = psutil.wait_procs(processes, seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("run", range(RUNS))
def test_killed_in_a_pool_the_store_is_the_same(run, inputs, undisturbed, tmp_path):
    drawn = random.Random(run)
    name = list(JOBS)[run % len(JOBS)]
    execution = {"workers": 3}
    wanted, length = undisturbed(name, execution)
    told = job(chosen(inputs, name), tmp_path / "out", execution=execution, max_bad=60, **JOBS[name])
    killed, said = tortured(drawn, told, length)
    print(f"{run} {name}: {killed}, {said['resumed']} units found; {hash_of(tree(tmp_path / 'out'))}")
    assert tree(tmp_path / "out") == wanted
    assert not (tmp_path / "out" / ".work").exists()


@pytest.fixture(scope="module")
def cluster():
    """A head without processors, and three nodes of one processor each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'batchloom[ray]'")
    with ray_cluster() as made:
        yield made


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(JOBS) if RUNS > 3 else ["near"])
def test_a_node_that_dies_in_the_middle_changes_nothing(name, cluster, inputs, undisturbed, tmp_path):
    execution = {"workers": 3, "engine": "ray", "address": cluster.address}
    wanted, (_, files) = undisturbed(name, execution)
    out = tmp_path / "out"
    process = start(job(chosen(inputs, name), out, execution=execution, max_bad=60, **JOBS[name]))
    while process.poll() is None and there(out) < files / 3:
        time.sleep(0.002)
    alive = process.poll() is None
    kill_node(cluster)
    said = end(process)
    cluster.living.append(add_node(cluster))
    assert alive
    assert said is not None
    assert "error" not in said, said
    assert tree(out) == wanted


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("run", range(max(1, RUNS // 2)))
def test_killed_on_ray_the_store_is_the_same(run, cluster, inputs, undisturbed, tmp_path):
    drawn = random.Random(1000 + run)
    name = list(JOBS)[run % len(JOBS)]
    execution = {"workers": 3, "engine": "ray", "address": cluster.address}
    wanted, length = undisturbed(name, execution)
    told = job(chosen(inputs, name), tmp_path / "out", execution=execution, max_bad=60, **JOBS[name])
    killed, said = tortured(drawn, told, length, ray=True)
    print(f"{run} {name}: {killed}, {said['resumed']} units found; {hash_of(tree(tmp_path / 'out'))}")
    assert tree(tmp_path / "out") == wanted
