import gc
import itertools
import logging
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from adapters.small_stores import start_fork_server
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.adapters.worker_memory import SharedDict
from batchloom.batches import Batch
from batchloom.testing import write_store
from processes import start_processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other systems send batches through the queue"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 257, rng.integers(1, 60)).tolist() for _ in range(300)]
    return write_store(tmp_path_factory.mktemp("store"), documents, documents_per_shard=100)


def build_loader(store, steps):
    return batchloom.Loader(store, seq_len=32, global_batch_size=8, steps=steps, rank=0, world_size=1, prefetch=0)


def count_segments():
    """Return the number of segments that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:batchloom-batch")


def assert_same_batch(batch, expected):
    assert list(batch) == list(expected)
    for name in expected:
        assert batch[name].dtype == expected[name].dtype
        assert torch.equal(batch[name], expected[name])


@pytest.mark.parametrize(
    ("dataset_class", "workers", "context"),
    [
        (LoaderIterable, 2, "fork"),
        (LoaderDataset, 1, "forkserver"),
        pytest.param(LoaderIterable, 1, "spawn", marks=pytest.mark.slow),
    ],
)
def test_batches_reuse_a_few_segments(store, dataset_class, workers, context):
    start_fork_server()
    loader = build_loader(store, 40)
    data = DataLoader(dataset_class(loader), batch_size=None, num_workers=workers, multiprocessing_context=context)
    for step, batch in enumerate(data):
        assert_same_batch(batch, loader[step])
        assert type(batch) is Batch
        assert batch.step == step
        # Each worker has made two ahead, and the loop holds one or two.
        assert 0 < count_segments() <= 8
    del batch
    assert count_segments() == 0


def test_kept_batches_are_never_overwritten(store):
    loader = build_loader(store, 300)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2)
    kept_parts = [(batch["input_ids"][2:4], batch["labels"].view(-1).numpy()[::3]) for batch in data]
    assert len(kept_parts) == 300
    assert 0 < count_segments() <= 32
    for step, (ids, labels) in enumerate(kept_parts):
        expected = loader[step]
        assert torch.equal(ids, expected["input_ids"][2:4])
        assert np.array_equal(labels, expected["labels"].view(-1).numpy()[::3])
        ids.zero_()
    kept_parts.clear()
    del ids, labels
    assert count_segments() == 0


def test_iterators_run_at_the_same_time(store):
    loader = build_loader(store, 40)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=1)
    kept_batches = list(zip(data, data, strict=True))
    for step, batches in enumerate(kept_batches):
        for batch in batches:
            assert_same_batch(batch, loader[step])
            batch["input_ids"].zero_()


def test_persistent_workers_keep_their_segments(store):
    loader = build_loader(store, 20)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2, persistent_workers=True)
    for taken in (20, 3, 20, 3, 20):  # shorter passes are abandoned
        for step, batch in enumerate(itertools.islice(data, taken)):
            assert_same_batch(batch, loader[step])
    assert 0 < count_segments() <= 10
    del data, batch
    assert count_segments() == 0


def test_a_forked_process_frees_nothing(store):
    loader = build_loader(store, 50)
    batches = iter(DataLoader(LoaderIterable(loader), batch_size=None, num_workers=1))
    batch = next(batches)
    child = os.fork()
    if not child:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(40):
        next(batches)
    assert_same_batch(batch, loader[0])


def test_batches_of_a_killed_worker_stay_valid(store):
    loader = build_loader(store, 10_000)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2)
    batches = iter(data)
    # Each worker has all its segments: a new one could not be fetched from a dead worker.
    kept_batches = [next(batches) for _ in range(40)]
    del kept_batches[8:]
    (worker, _) = multiprocessing.active_children()
    # torch raises at once, from its handler of SIGCHLD.
    with pytest.raises(RuntimeError, match="DataLoader worker .* (killed by signal|exited unexpectedly)"):
        os.kill(worker.pid, signal.SIGKILL)
        for _ in batches:
            pass
    for step, batch in enumerate(kept_batches):
        assert_same_batch(batch, loader[step])
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    del batches, batch, kept_batches, worker, _
    gc.collect()
    assert count_segments() == 0


def limit_file_size(_worker):
    # A memfd counts as a file. Log to stderr, as without pytest.
    logging.basicConfig(force=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_without_memory_batches_go_through_the_queue(store, capfd):
    loader = build_loader(store, 30)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=1, worker_init_fn=limit_file_size)
    for step, batch in enumerate(data):
        assert_same_batch(batch, loader[step])
        batch["input_ids"].zero_()
    assert step == 29
    assert count_segments() == 0
    message = "A DataLoader worker could not reserve 6.2 kB of shared memory for a batch (file too large)."
    assert capfd.readouterr().err.count(message) == 1


WITH_SMALL_SHM = """
import ctypes, faulthandler, os, sys
from pathlib import Path
NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
# Only a process without other threads may enter a namespace.
faulthandler.cancel_dump_traceback_later()
libc = ctypes.CDLL(None, use_errno=True)
user, group = os.getuid(), os.getgid()
if libc.unshare(NEW_USER | NEW_MOUNTS):
    sys.exit(77)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1M"):
    sys.exit(77)
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
import tempfile
from torch.utils.data import DataLoader
import batchloom
from batchloom.adapters.pytorch import LoaderIterable
from batchloom.testing import write_store
with tempfile.TemporaryDirectory(dir="/tmp") as folder:
    store = write_store(folder + "/store", [[1, 2, 3]] * 9)
    loader = batchloom.Loader(store, seq_len=4096, global_batch_size=32, steps=6, rank=0, world_size=1)
    data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=2, multiprocessing_context="fork")
    print(sum(batch["input_ids"].nbytes for batch in data))
"""


def test_a_small_dev_shm_is_enough(tmp_path):
    script = tmp_path / "small_shm.py"
    script.write_text(WITH_SMALL_SHM)
    with start_processes(script) as (process,):
        done = process.wait()
    if done.returncode == 77:
        pytest.skip("this user cannot mount a smaller /dev/shm")
    assert done.stdout == f"{6 * 32 * 4096 * 8}\n", done.stderr
    assert done.stderr == ""


def make_item(number):
    rng = np.random.default_rng(number)
    pixels = torch.from_numpy(rng.random((number * 300 + 1, 7), np.float32))
    return {
        "pixel_values": pixels,
        "half": pixels.bfloat16(),
        "slice": pixels[:, 1:3],
        "same": pixels,
        "empty": torch.empty(0, 5, dtype=torch.int32),
        "trained": pixels > 0.5,
        "grid": np.asfortranarray(rng.random((3, 4))),
        "scalar": torch.tensor(number),
        "max_length_q": number,
        "masks": {"full_attention": torch.ones(2, 2)},
    }


SIZES = [1, 2, 9, 40, 3, 80, 1, 200, 7, 5, 400, 2, 2, 90]


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return make_item(SIZES[index])


def assert_same_value(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            assert_same_value(actual[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("keep", [False, True])
def test_items_of_any_size_and_kind(keep):
    kept_items = []
    data = DataLoader(Items(), batch_size=None, collate_fn=SharedDict, num_workers=1)
    for size, item in zip(SIZES, data, strict=True):
        assert_same_value(item, make_item(size))
        assert item["same"] is item["pixel_values"]
        if keep:
            kept_items.append(item)
        else:
            # A larger segment replaces a smaller one.
            assert 0 < count_segments() <= 5
    for size, item in zip(SIZES, kept_items, strict=keep):
        assert_same_value(item, make_item(size))
