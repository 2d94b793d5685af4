"""Batches on a GPU, each compared with numpy's. Skipped without a GPU."""

import gc
import os
import threading

import numpy as np
import pytest
import torch

import batchloom
from batchloom import InputError
from batchloom.testing import write_store
from waiting import wait_until

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

# Clock cycles: some milliseconds, longer than building and copying several batches takes.
LONG = 20_000_000
STEPS = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 900)).tolist(), 256] for _ in range(2000)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


def make_loader(store, **options):
    sizes = {"seq_len": 512, "global_batch_size": 32, "steps": STEPS, "rank": 0, "world_size": 1}
    return batchloom.Loader(store, **{**sizes, "device": "cuda", **options})


@pytest.fixture(scope="module")
def expected(store):
    return {form: list(make_loader(store, form=form, device=None, output="numpy")) for form in FORMS}


FORMS = ("rows", "varlen")


def copy_to_host(batch):
    return {name: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def have_same_arrays(batch, arrays):
    batch = copy_to_host(batch)
    return list(batch) == list(arrays) and all(np.array_equal(batch[name], value) for name, value in arrays.items())


def have_all_same_arrays(batches, expected_batches):
    return all(have_same_arrays(batch, expected) for batch, expected in zip(batches, expected_batches, strict=True))


def clone_batch(batch):
    """Return a copy of a batch, made when the current stream reaches it."""
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_kept_batches_are_those_numpy_gets(store, expected, form, prefetch):
    loader = make_loader(store, form=form, prefetch=prefetch)
    batches = list(loader)
    assert all(v.device.type == "cuda" for b in batches for v in b.values() if isinstance(v, torch.Tensor))
    assert have_all_same_arrays(batches, expected[form])
    assert have_same_arrays(loader[7], expected[form][7])
    assert [part["input_ids"].device.type for part in loader[7].split(8)] == ["cuda"] * 4


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slow", [1, 5, STEPS + 1])
def test_memory_is_not_given_away_while_a_stream_has_yet_to_read_it(store, expected, form, prefetch, slow):
    """The host frees each batch long before the GPU reads it."""
    streams, clones = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for number, batch in enumerate(_iter_on_streams(streams, make_loader(store, form=form, prefetch=prefetch))):
        if number % slow == 0:
            torch.cuda._sleep(LONG)
        clones.append(clone_batch(batch))
        del batch
    torch.cuda.synchronize()
    assert have_all_same_arrays(clones, expected[form])


def _iter_on_streams(streams, loader):
    """Iterate over a loader, taking each batch on the next of the streams."""
    batches = iter(loader)
    for number in range(STEPS):
        with torch.cuda.stream(streams[number % len(streams)]):
            yield next(batches)
    assert next(batches, None) is None


def test_two_loaders_at_once_do_not_mix(store, expected):
    pairs = zip(make_loader(store), make_loader(store, form="varlen", prefetch=1), strict=True)
    clones = [(clone_batch(rows), clone_batch(varlen)) for rows, varlen in pairs]
    assert have_all_same_arrays([rows for rows, _ in clones], expected["rows"])
    assert have_all_same_arrays([varlen for _, varlen in clones], expected["varlen"])


def test_two_iterations_and_single_steps_share_a_loader(store, expected):
    loader, clones = make_loader(store), []
    for step, (first, second) in enumerate(zip(loader, loader, strict=True)):
        clones += [clone_batch(first), clone_batch(second), clone_batch(loader[STEPS - 1 - step])]
    assert have_all_same_arrays(clones[0::3], expected["rows"])
    assert have_all_same_arrays(clones[1::3], expected["rows"])
    assert have_all_same_arrays(clones[2::3], expected["rows"][::-1])


def test_a_loader_that_is_left_early_leaves_nothing_behind(store, expected):
    before, clones = torch.cuda.memory_allocated(), []
    for _ in range(20):
        iterator = iter(make_loader(store))
        torch.cuda._sleep(LONG)
        clones.append(clone_batch(next(iterator)))
        iterator.close()
        # Memory of batches in flight is freed here, and this tensor is likely to reuse it.
        torch.full((1 << 20,), 77, device="cuda")
    assert have_all_same_arrays(clones, [expected["rows"][0]] * 20)
    del iterator
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "batchloom-producer"], "producer threads end")
    clones.clear()
    gc.collect()
    torch.cuda.synchronize()
    # torch checks finished streams only when it allocates memory or empties its cache.
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before


def test_the_state_is_that_of_what_was_given(store, expected):
    loader = make_loader(store)
    iterator = iter(loader)
    for step in range(5):
        resumed = make_loader(store)
        resumed.load_state_dict(loader.state_dict())
        assert have_same_arrays(next(iter(resumed)), expected["rows"][step])
        assert have_same_arrays(next(iterator), expected["rows"][step])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_nothing_waits_for_the_gpu_when_a_batch_is_taken_or_split(store, expected, form):
    loader = make_loader(store, form=form, prefetch=0)
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = next(batches)
        parts = [clone_batch(part) for part in batch.split(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = make_loader(store, form=form, device=None, output="numpy")[1].split(8)
    assert have_all_same_arrays(parts, plain)


@pytest.mark.parametrize("form", FORMS)
def test_no_memory_is_pinned_by_the_step(store, form):
    batches = iter(make_loader(store, form=form, prefetch=0))
    for _ in range(10):
        next(batches)
    before = torch.cuda.host_memory_stats()
    for _ in range(20):
        next(batches)
    after = torch.cuda.host_memory_stats()
    for name in ("num_host_alloc", "active_requests.allocated"):
        if name in before:
            assert after[name] == before[name], name


def test_a_gpu_by_its_number_and_one_that_is_not_there(store, expected):
    count = torch.cuda.device_count()
    assert make_loader(store, device="cuda:0")[0]["labels"].device == torch.device("cuda", 0)
    if count > 1:
        last = torch.device("cuda", count - 1)
        assert torch.cuda.current_device() == 0
        assert have_all_same_arrays(make_loader(store, device=last), expected["rows"])
        assert torch.cuda.current_device() == 0
    with pytest.raises(InputError, match=f"GPU {count} was requested, but torch .* sees {count}. Give"):
        make_loader(store, device=f"cuda:{count}")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process_gets_an_error(store):
    loader = make_loader(store)
    loader[0]
    child = os.fork()
    if not child:
        exit_code = 1
        try:
            loader[1]
        except InputError as error:
            exit_code = 0 if "was forked from the one that made the loader" in str(error) else 2
        finally:
            os._exit(exit_code)
    assert os.waitpid(child, 0)[1] == 0
