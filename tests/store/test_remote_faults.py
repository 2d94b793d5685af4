"""A store in a bucket where much goes wrong: no wrong, missing or repeated token, or an error that says what."""

import contextlib
import json
import signal
import time

import pytest

from batchloom import Loader, StoreError, open_store
from batchloom.core.errors import AccessError, DownloadError
from batchloom.testing import write_store
from preparation.s3_relay import Fault
from processes import run_ranks, start_processes
from store.remote_stores import SECRET, behind_relay, documents, kept, retry_at_once, same_batches, to_bucket
from store.remote_rank import SETTINGS, digests

DOCUMENTS = documents(450)
SLOW = pytest.mark.slow
ALONE = {**SETTINGS, "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    flags = [[n % 5 > 0 for n in range(len(ids))] for ids in DOCUMENTS]
    return write_store(tmp_path_factory.mktemp("near") / "store", DOCUMENTS, trained=flags, documents_per_shard=55)


@pytest.fixture
def relay(s3, near):
    to_bucket(s3, near.path)
    with behind_relay(s3) as found:
        yield found


@pytest.fixture
def impatient(monkeypatch):
    retry_at_once(monkeypatch)


URL = "s3://bucket/store"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([], marks=SLOW),
        [Fault("answer", "GET", ".bin", times=5), Fault("answer", "GET", "lengths", status=500)],
        pytest.param([Fault("answer", "GET", "dataset_metadata", status=503, times=2)], marks=SLOW),
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
        pytest.param(
            [Fault("answer", "GET", ".bin", times=3, spare=spare) for spare in (0, 5, 11)],
            marks=SLOW,
        ),
    ],
    ids=["none", "503", "first", "cut", "half", "flipped", "flipped sums", "again"],
)
def test_what_passes_is_asked_again(near, relay, tmp_path, impatient, faults):
    relay.faults, relay.delay = list(faults), 0.01
    store = open_store(URL, cache=tmp_path)
    assert same_batches(Loader(near, **ALONE), Loader(store, **ALONE))
    assert all(not fault.times for fault in relay.faults)


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=SLOW), 4])
@pytest.mark.parametrize(
    ("what", "words"),
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
def test_a_shard_that_is_lost_in_the_middle_of_a_run(s3, near, relay, tmp_path, impatient, prefetch, what, words):
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
    with pytest.raises(AccessError, match=r"Access to s3://bucket/store/.* is denied: .*AccessDenied") as told:
        open_store(URL, cache=tmp_path)
    assert SECRET not in str(told.value)


def test_what_never_answers_is_told(near, relay, tmp_path, impatient):
    store = open_store(URL, cache=tmp_path)
    relay.faults = [Fault("answer", "GET", ".bin", 10_000)]
    with pytest.raises(DownloadError, match=r"Failed to download s3://bucket/store/train/shard_\d+.bin"):
        list(Loader(store, **ALONE))


def ranks(tmp_path, nodes, per_node, url=URL, limit=()):
    """Run every rank of every node as a process; return what each wrote."""
    total = nodes * per_node
    done = run_ranks("-m", "store.remote_rank", url, tmp_path, per_node, *limit, ranks=total)
    assert [one.returncode for one in done] == [0] * total, [one.stderr for one in done]
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(total)]


def in_one(told):
    """The rows of each step over all ranks, in the order of the step."""
    return [[row for rows in step for row in rows] for step in zip(*(one["steps"] for one in told), strict=True)]


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
    told = ranks(tmp_path, nodes=2, per_node=2)
    assert in_one(told) == digests(Loader(near, **ALONE))


def test_four_ranks_of_a_node_fetch_everything_once(near, relay, tmp_path):
    relay.delay = 0.02
    told = ranks(tmp_path, nodes=1, per_node=4)
    assert in_one(told) == digests(Loader(near, **ALONE))
    size = sum(path.stat().st_size for path in near.path.glob("train/*") if path.suffix != ".docs")
    manifests = 4 * (near.path / "dataset_metadata.json").stat().st_size
    assert sum(one["bytes"] for one in told) <= size + manifests


@pytest.mark.slow
def test_ranks_whose_cache_holds_less_than_they_look_ahead(s3, relay, tmp_path):
    """Each deletes what the others read."""
    small = write_store(tmp_path / "small", DOCUMENTS[:80], documents_per_shard=20)
    url = to_bucket(s3, small.path, "small")
    told = ranks(tmp_path, nodes=1, per_node=2, url=url, limit=[30_000])
    assert in_one(told) == digests(Loader(small, **ALONE))
    # Blocks were deleted and fetched again.
    assert sum(one["bytes"] for one in told) > 2 * sum(path.stat().st_size for path in small.path.glob("train/*.bin"))
    # A rank deletes nothing while another one does: the next reader keeps to the limit.
    store = open_store(url, cache=tmp_path / "node0", cache_limit=30_000)
    assert [document.ids.tolist() for document in store] == DOCUMENTS[:80]
    assert sum(path.stat().st_size for path in kept(tmp_path / "node0")) <= 30_000


@pytest.mark.parametrize("seconds", [0.6, pytest.param(1.0, marks=SLOW), pytest.param(1.5, marks=SLOW)])
def test_a_process_that_is_killed_half_way_leaves_what_others_can_use(near, relay, tmp_path, seconds):
    relay.delay = 0.05
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    with start_processes("-m", "store.remote_rank", URL, tmp_path, 1, environments=[alone]) as (one,):
        while not relay.asked:
            time.sleep(0.01)
        time.sleep(seconds)
        one.send_signal(signal.SIGKILL)
        one.wait()
    cache = tmp_path / "node0"
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
    if small.reader.fetched_bytes:
        assert not (cache / "half" / "left.partial").exists()
