"""Faults of a bucket: batches stay exact, or an error names the fault."""

import contextlib
import json
import signal
import urllib.request

import pytest

from batchloom import Loader, StoreError, open_store
from batchloom.core.errors import AccessError, DownloadError
from batchloom.testing import write_store
from preparation.s3_relay import Fault
from processes import run_ranks, start_processes
from store.remote_rank import SETTINGS, compute_digests
from store.remote_stores import (
    SECRET,
    assert_same_batches,
    copy_to_bucket,
    list_block_files,
    make_documents,
    relay_bucket,
    shorten_retry_delays,
)
from waiting import wait_until

DOCUMENTS = make_documents(100)
SLOW = pytest.mark.slow
SINGLE_RANK = {**SETTINGS, "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    flags = [[n % 5 > 0 for n in range(len(ids))] for ids in DOCUMENTS]
    return write_store(tmp_path_factory.mktemp("near") / "store", DOCUMENTS, trained=flags, documents_per_shard=17)


@pytest.fixture(scope="module")
def bucket(s3_server, s3_client, local):
    """A client of an S3 server, whose bucket holds the store."""
    urllib.request.urlopen(f"{s3_server}/moto-api/reset", data=b"").close()
    s3_client.create_bucket(Bucket="bucket")
    copy_to_bucket(s3_client, local.path)
    return s3_client


@pytest.fixture
def relay(bucket, s3_environment):
    with relay_bucket(bucket) as server:
        yield server


@pytest.fixture
def no_retry_delay(monkeypatch):
    shorten_retry_delays(monkeypatch)


URL = "s3://bucket/store"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([], marks=SLOW),
        pytest.param(
            [Fault("answer", "GET", ".bin", times=5), Fault("answer", "GET", "lengths", status=500)], marks=SLOW
        ),
        pytest.param([Fault("answer", "GET", "dataset_metadata", status=503, times=2)], marks=SLOW),
        [
            Fault("cut answer", "GET", ".bin", times=4),
            Fault("half answer", "GET", ".bin", times=4, spare=1),
            Fault("cut answer", "GET", ".mask", times=2),
            Fault("half answer", "GET", ".sums", times=3),
        ],
        [
            Fault("flip answer", "GET", ".bin", times=2, spare=3),
            Fault("flip answer", "GET", ".mask"),
            Fault("flip answer", "GET", ".sums", times=2),
            Fault("flip answer", "GET", "lengths.u32"),
        ],
        pytest.param(
            [Fault("answer", "GET", ".bin", times=3, spare=spare) for spare in (0, 2, 5)],
            marks=SLOW,
        ),
    ],
    ids=["none", "503", "first", "cut", "flipped", "again"],
)
def test_temporary_faults_are_retried(local, relay, tmp_path, no_retry_delay, faults):
    relay.faults = list(faults)
    store = open_store(URL, cache=tmp_path)
    assert assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    assert all(not fault.times for fault in relay.faults)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=SLOW), 4])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "gone",
            "s3://bucket/store/train/shard_00004.bin is missing: the manifest of its store names it",
        ),
        pytest.param(
            "changed",
            "s3://bucket/store/train/shard_00004.bin: bytes .* do not match .* was changed or damaged",
            marks=SLOW,
        ),
        pytest.param(
            "short",
            "s3://bucket/store/train/shard_00004.bin does not match the manifest .* was truncated or rewritten",
            marks=SLOW,
        ),
    ],
)
def test_a_shard_damaged_in_the_middle_of_a_run(
    bucket, local, relay, tmp_path, no_retry_delay, prefetch, damage, message
):
    """Every batch before the error is correct, and the error names the shard."""
    key = "store/train/shard_00004.bin"
    data = (local.path / "train/shard_00004.bin").read_bytes()
    settings = {**SINGLE_RANK, "shuffle": False, "packing": "wrap", "prefetch": prefetch}
    served = 0
    with contextlib.ExitStack() as stack:
        # The damage must reach blocks that are not prefetched yet, so the cache is small.
        store = open_store(URL, cache=tmp_path, cache_limit=10_000)
        steps = iter(Loader(store, **settings))
        expected = iter(Loader(local, **settings))
        stack.callback(steps.close)
        stack.callback(bucket.put_object, Bucket="bucket", Key=key, Body=data)
        assert (next(steps)["input_ids"] == next(expected)["input_ids"]).all()
        if damage == "gone":
            bucket.delete_object(Bucket="bucket", Key=key)
        elif damage == "changed":
            changed = bytes(byte ^ 1 for byte in data)
            bucket.put_object(Bucket="bucket", Key=key, Body=changed)
        else:
            bucket.put_object(Bucket="bucket", Key=key, Body=data[:100])
        with pytest.raises(StoreError, match=message):
            for batch in steps:
                assert (batch["input_ids"] == next(expected)["input_ids"]).all()
                served += 1
    assert served


def test_denied_access_is_reported(relay, tmp_path, no_retry_delay):
    relay.faults = [Fault("answer", "GET", "", 99, status=403, code="AccessDenied")]
    with pytest.raises(AccessError, match=r"Access to s3://bucket/store/.* is denied: .*AccessDenied") as caught:
        open_store(URL, cache=tmp_path)
    assert SECRET not in str(caught.value)


def test_a_server_that_never_answers_is_reported(relay, tmp_path, no_retry_delay):
    store = open_store(URL, cache=tmp_path)
    relay.faults = [Fault("answer", "GET", ".bin", 10_000)]
    with pytest.raises(DownloadError, match=r"Failed to download s3://bucket/store/train/shard_\d+.bin"):
        next(iter(Loader(store, **SINGLE_RANK, prefetch=0)))


def run_all_ranks(tmp_path, nodes, per_node, url=URL, limit=()):
    """Run every rank of every node as a process; return their reports."""
    total = nodes * per_node
    processes = run_ranks("-m", "store.remote_rank", url, tmp_path, per_node, *limit, ranks=total)
    assert [process.returncode for process in processes] == [0] * total, [process.stderr for process in processes]
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(total)]


def merge_ranks(reports):
    """Merge the rows of each step over all ranks, in the order of the step."""
    return [
        [row for rows in step for row in rows] for step in zip(*(report["steps"] for report in reports), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_of_two_ranks_with_faults(local, relay, tmp_path, nodes):
    relay.delay = 0.01
    # A read fails after six attempts, or after three that give wrong bytes. All faults of a kind may meet one read.
    relay.faults = [
        Fault("answer", "GET", "lengths", times=2),
        Fault("cut answer", "GET", ".bin", times=2, spare=1),
        Fault("half answer", "GET", ".bin", times=2, spare=2),
        Fault("flip answer", "GET", ".bin", times=2, spare=3),
        Fault("flip answer", "GET", ".sums", times=1, spare=2),
    ]
    reports = run_all_ranks(tmp_path, nodes=nodes, per_node=2)
    assert merge_ranks(reports) == compute_digests(Loader(local, **SINGLE_RANK))
    assert not any(fault.times for fault in relay.faults)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
def test_the_ranks_of_a_node_fetch_everything_once(local, relay, tmp_path, ranks):
    relay.delay = 0.02
    reports = run_all_ranks(tmp_path, nodes=1, per_node=ranks)
    assert merge_ranks(reports) == compute_digests(Loader(local, **SINGLE_RANK))
    size = sum(path.stat().st_size for path in local.path.glob("train/*") if path.suffix != ".docs")
    manifests = ranks * (local.path / "dataset_metadata.json").stat().st_size
    assert sum(report["bytes"] for report in reports) <= size + manifests


@pytest.mark.slow
def test_ranks_whose_cache_is_smaller_than_their_prefetch(bucket, relay, tmp_path):
    """Each rank evicts blocks that the other one reads."""
    local = write_store(tmp_path / "small", DOCUMENTS[:80], documents_per_shard=20)
    url = copy_to_bucket(bucket, local.path, "small")
    reports = run_all_ranks(tmp_path, nodes=1, per_node=2, url=url, limit=[30_000])
    assert merge_ranks(reports) == compute_digests(Loader(local, **SINGLE_RANK))
    # Blocks were deleted and fetched again.
    assert sum(report["bytes"] for report in reports) > 2 * sum(
        path.stat().st_size for path in local.path.glob("train/*.bin")
    )
    # A rank skips eviction while another one evicts. The next reader enforces the limit.
    store = open_store(url, cache=tmp_path / "node0", cache_limit=30_000)
    assert [document.ids.tolist() for document in store] == DOCUMENTS[:80]
    assert sum(path.stat().st_size for path in list_block_files(tmp_path / "node0")) <= 30_000


@pytest.mark.slow
@pytest.mark.parametrize("requests", [12, pytest.param(4, marks=SLOW), pytest.param(20, marks=SLOW)])
def test_the_cache_of_a_killed_process_is_usable(local, relay, tmp_path, requests):
    relay.delay = 0.05
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    with start_processes("-m", "store.remote_rank", URL, tmp_path, 1, environments=[environment]) as (process,):
        wait_until(lambda: len(relay.requests) >= requests, f"{requests} requests of the process")
        process.send_signal(signal.SIGKILL)
        process.wait()
    cache = tmp_path / "node0"
    relay.delay = 0.0
    for path in list_block_files(cache)[:1]:
        # A power cut may leave a truncated file.
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (cache / "half").mkdir(parents=True, exist_ok=True)
    (cache / "half" / "left.partial").write_bytes(b"half")
    store = open_store(URL, cache=cache)
    assert assert_same_batches(Loader(local, **SINGLE_RANK), Loader(store, **SINGLE_RANK))
    # Eviction deletes partial files that no process writes.
    open_store(URL, cache=cache, cache_limit=100_000)[0]
    small = open_store(URL, cache=cache, cache_limit=1)
    assert small[3].ids.tolist() == DOCUMENTS[3]
    if small.reader.fetched_bytes:
        assert not (cache / "half" / "left.partial").exists()
