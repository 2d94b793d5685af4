"""A store in a bucket where much goes wrong: no wrong, missing or repeated token, or an error that says what."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from batchloom import Loader, open_store
from batchloom.core import ranges, reach
from batchloom.core.errors import AccessError, DownloadError, StoreError
from batchloom.testing.stores import write_store
from prepare.s3_relay import Fault
from store.far import SECRET, behind_relay, documents, kept, same_batches, to_bucket
from store.far_rank import SETTINGS, digests

DOCUMENTS = documents(900)
ALONE = {**SETTINGS, "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    flags = [[n % 5 > 0 for n in range(len(ids))] for ids in DOCUMENTS]
    return write_store(
        tmp_path_factory.mktemp("near") / "store", DOCUMENTS, trained=flags, documents_per_shard=110
    )


@pytest.fixture
def relay(s3, near):
    to_bucket(s3, near.path)
    with behind_relay(s3) as found:
        yield found


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ranges, "patience", lambda tries: 0.01)
    monkeypatch.setattr(reach, "patience", lambda tries: 0.01)


URL = "s3://bucket/store"


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault("answer", "GET", ".bin", times=5), Fault("answer", "GET", "lengths", status=500)],
        [Fault("answer", "GET", "dataset_metadata", status=503, times=2)],
        [Fault("cut answer", "GET", ".bin", times=4), Fault("cut answer", "GET", ".mask", times=2)],
        [
            Fault("half answer", "GET", ".bin", times=4),
            Fault("half answer", "GET", ".sums", times=3),
        ],
        [
            Fault("flip answer", "GET", ".bin", times=2, spare=3),
            Fault("flip answer", "GET", ".mask"),
        ],
        [Fault("flip answer", "GET", ".sums", times=2), Fault("flip answer", "GET", "lengths.u32")],
        [Fault("answer", "GET", ".bin", times=3, spare=spare) for spare in (0, 5, 11)],
    ],
    ids=["none", "503", "first", "cut", "half", "flipped", "flipped sums", "again"],
)
def test_what_passes_is_asked_again(near, relay, tmp_path, impatient, faults):
    relay.faults, relay.delay = list(faults), 0.01
    store = open_store(URL, cache=tmp_path)
    assert same_batches(Loader(near, **ALONE), Loader(store, **ALONE))
    assert all(not fault.times for fault in relay.faults)


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "gone",
            "s3://bucket/store/train/shard_00004.bin is gone: the manifest of its store names it",
        ),
        (
            "changed",
            "s3://bucket/store/train/shard_00004.bin holds other bytes from .* was changed or damaged",
        ),
        (
            "short",
            "s3://bucket/store/train/shard_00004.bin is not what the manifest .* was cut short or written",
        ),
    ],
)
def test_a_shard_that_is_lost_in_the_middle_of_a_run(
    s3, near, relay, tmp_path, impatient, prefetch, what, words
):
    """Every batch up to the error is right, and the error names the shard."""
    key = "store/train/shard_00004.bin"
    data = (near.path / "train/shard_00004.bin").read_bytes()
    settings = {**ALONE, "shuffle": False, "packing": "wrap", "prefetch": prefetch}
    served = 0
    with contextlib.ExitStack() as stack:
        # What is not looked ahead yet is lost: a cache that holds little looks ahead little.
        store = open_store(URL, cache=tmp_path, cache_limit=30_000)
        steps = iter(Loader(store, **settings))
        right = iter(Loader(near, **settings))
        stack.callback(steps.close)
        assert (next(steps)["input_ids"] == next(right)["input_ids"]).all()
        if what == "gone":
            s3.delete_object(Bucket="bucket", Key=key)
        elif what == "changed":
            other = bytes(byte ^ 1 for byte in data)
            s3.put_object(Bucket="bucket", Key=key, Body=other)
        else:
            s3.put_object(Bucket="bucket", Key=key, Body=data[:100])
        with pytest.raises(StoreError, match=words):
            for batch in steps:
                assert (batch["input_ids"] == next(right)["input_ids"]).all()
                served += 1
    assert served


def test_who_may_not_read_is_told(relay, tmp_path, impatient):
    relay.faults = [Fault("answer", "GET", "", 99, status=403, code="AccessDenied")]
    with pytest.raises(
        AccessError, match=r"Access to s3://bucket/store/.* is denied: .*AccessDenied"
    ) as told:
        open_store(URL, cache=tmp_path)
    assert SECRET not in str(told.value)


def test_what_never_answers_is_told(near, relay, tmp_path, impatient):
    store = open_store(URL, cache=tmp_path)
    relay.faults = [Fault("answer", "GET", ".bin", 10_000)]
    with pytest.raises(
        DownloadError, match=r"Failed to download s3://bucket/store/train/shard_\d+.bin"
    ):
        list(Loader(store, **ALONE))


def ranks(relay, tmp_path, nodes, per_node, limit=()):
    """Every rank of every node as a process; what each said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    total, started = nodes * per_node, []
    for rank in range(total):
        words = [URL, str(tmp_path / f"node{rank // per_node}"), str(rank), str(total)]
        out = str(tmp_path / f"rank{rank}.json")
        command = [sys.executable, "-m", "store.far_rank", *words, out, *map(str, limit)]
        started.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    for one in started:
        _, error = one.communicate(timeout=150)
        assert one.returncode == 0, error
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(total)]


def in_one(told):
    """The rows of each step over all ranks, in the order of the step."""
    return [
        [row for rows in step for row in rows]
        for step in zip(*(one["steps"] for one in told), strict=True)
    ]


def test_two_nodes_of_two_ranks_while_much_goes_wrong(near, relay, tmp_path):
    relay.delay = 0.01
    relay.faults = [
        Fault("answer", "GET", "lengths", times=2),
        Fault("cut answer", "GET", ".bin", times=4, spare=2),
        Fault("half answer", "GET", ".bin", times=4, spare=8),
        Fault("flip answer", "GET", ".bin", times=4, spare=14),
        Fault("flip answer", "GET", ".sums", times=1, spare=2),
        Fault("answer", "GET", ".bin", times=6, spare=20),
    ]
    told = ranks(relay, tmp_path, nodes=2, per_node=2)
    assert in_one(told) == digests(Loader(near, **ALONE))


def test_four_ranks_of_a_node_fetch_everything_once(near, relay, tmp_path):
    relay.delay = 0.02
    told = ranks(relay, tmp_path, nodes=1, per_node=4)
    assert in_one(told) == digests(Loader(near, **ALONE))
    size = sum(path.stat().st_size for path in near.path.glob("train/*") if path.suffix != ".docs")
    manifests = 4 * (near.path / "dataset_metadata.json").stat().st_size
    assert sum(one["bytes"] for one in told) <= size + manifests


def test_ranks_whose_cache_holds_less_than_they_look_ahead(near, relay, tmp_path):
    """Each deletes what the others read."""
    told = ranks(relay, tmp_path, nodes=1, per_node=2, limit=[300_000])
    assert in_one(told) == digests(Loader(near, **ALONE))
    assert sum(path.stat().st_size for path in kept(tmp_path / "node0")) <= 300_000


@pytest.mark.parametrize("seconds", [0.6, 1.0, 1.5])
def test_a_process_that_is_killed_half_way_leaves_what_others_can_use(
    near, relay, tmp_path, seconds
):
    relay.delay = 0.05
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    cache = tmp_path / "cache"
    words = [URL, str(cache), "0", "1", str(tmp_path / "out.json")]
    one = subprocess.Popen([sys.executable, "-m", "store.far_rank", *words], env=environment)
    time.sleep(seconds)
    one.send_signal(signal.SIGKILL)
    one.wait()
    relay.delay = 0.0
    for path in kept(cache)[:1]:
        # As a power cut may leave it.
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (cache / "half").mkdir(parents=True, exist_ok=True)
    (cache / "half" / "left.partial").write_bytes(b"half")
    store = open_store(URL, cache=cache)
    began = time.monotonic()
    assert same_batches(Loader(near, **ALONE), Loader(store, **ALONE))
    assert time.monotonic() - began < 60
    # What nobody writes any longer goes when room is made.
    open_store(URL, cache=cache, cache_limit=100_000)[0]
    small = open_store(URL, cache=cache, cache_limit=1)
    assert small[3].ids.tolist() == DOCUMENTS[3]
    if small.fetched_bytes:
        assert not (cache / "half" / "left.partial").exists()
