"""Batches on a GPU, each compared with what numpy gets. Skipped where there is none."""

import gc
import os
import threading
import time

import numpy as np
import pytest
import torch

import batchloom
from batchloom import InputError
from batchloom.testing import write_store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

# Clock cycles: some milliseconds, longer than several batches take to be made and copied.
LONG = 20_000_000
STEPS = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 900)).tolist(), 256] for _ in range(2000)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


def make(store, **options):
    sizes = {"seq_len": 512, "global_batch_size": 32, "steps": STEPS, "rank": 0, "world_size": 1}
    return batchloom.Loader(store, **{**sizes, "device": "cuda", **options})


@pytest.fixture(scope="module")
def expected(store):
    return {form: list(make(store, form=form, device=None, output="numpy")) for form in FORMS}


FORMS = ("rows", "varlen")


def on_host(batch):
    return {name: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def same(given, arrays):
    given = on_host(given)
    return list(given) == list(arrays) and all(np.array_equal(given[name], value) for name, value in arrays.items())


def all_same(given, arrays):
    return all(same(one, other) for one, other in zip(given, arrays, strict=True))


def cloned(batch):
    """What the current stream sees of a batch when it comes to it, however late."""
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_kept_batches_are_those_numpy_gets(store, expected, form, prefetch):
    loader = make(store, form=form, prefetch=prefetch)
    got = list(loader)
    assert all(v.device.type == "cuda" for b in got for v in b.values() if isinstance(v, torch.Tensor))
    assert all_same(got, expected[form])
    assert same(loader[7], expected[form][7])
    assert [part["input_ids"].device.type for part in loader[7].split(8)] == ["cuda"] * 4


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slow", [1, 5, STEPS + 1])
def test_memory_is_not_given_away_while_a_stream_has_yet_to_read_it(store, expected, form, prefetch, slow):
    """The host lets go of every batch long before the GPU comes to read it."""
    streams, seen = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for number, batch in enumerate(_in(streams, make(store, form=form, prefetch=prefetch))):
        if number % slow == 0:
            torch.cuda._sleep(LONG)
        seen.append(cloned(batch))
        del batch
    torch.cuda.synchronize()
    assert all_same(seen, expected[form])


def _in(streams, loader):
    """The batches of a loader, each taken and used on one of the streams in turn."""
    batches = iter(loader)
    for number in range(STEPS):
        with torch.cuda.stream(streams[number % len(streams)]):
            yield next(batches)
    assert next(batches, None) is None


def test_two_loaders_at_once_do_not_mix(store, expected):
    pairs = zip(make(store), make(store, form="varlen", prefetch=1), strict=True)
    seen = [(cloned(one), cloned(other)) for one, other in pairs]
    assert all_same([one for one, _ in seen], expected["rows"])
    assert all_same([other for _, other in seen], expected["varlen"])


def test_two_iterations_and_single_steps_share_a_loader(store, expected):
    loader, seen = make(store), []
    for step, (one, other) in enumerate(zip(loader, loader, strict=True)):
        seen += [cloned(one), cloned(other), cloned(loader[STEPS - 1 - step])]
    assert all_same(seen[0::3], expected["rows"])
    assert all_same(seen[1::3], expected["rows"])
    assert all_same(seen[2::3], expected["rows"][::-1])


def test_a_loader_that_is_left_early_leaves_nothing_behind(store, expected):
    before, kept = torch.cuda.memory_allocated(), []
    for _ in range(20):
        iterator = iter(make(store))
        torch.cuda._sleep(LONG)
        kept.append(cloned(next(iterator)))
        iterator.close()
        # What was on its way is given back here, and this is likely to get its memory.
        torch.full((1 << 20,), 77, device="cuda")
    assert all_same(kept, [expected["rows"][0]] * 20)
    del iterator
    deadline = time.monotonic() + 120
    while [t for t in threading.enumerate() if t.name == "batchloom-producer"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.clear()
    gc.collect()
    torch.cuda.synchronize()
    # torch looks at what streams have ended with when it is asked for memory, or to give some back.
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before


def test_the_state_is_that_of_what_was_given(store, expected):
    loader = make(store)
    iterator = iter(loader)
    for step in range(5):
        rest = make(store)
        rest.load_state_dict(loader.state_dict())
        assert same(next(iter(rest)), expected["rows"][step])
        assert same(next(iterator), expected["rows"][step])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_nothing_waits_for_the_gpu_when_a_batch_is_taken_or_split(store, expected, form):
    loader = make(store, form=form, prefetch=0)
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = next(batches)
        parts = [cloned(part) for part in batch.split(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = make(store, form=form, device=None, output="numpy")[1].split(8)
    assert all_same(parts, plain)


@pytest.mark.parametrize("form", FORMS)
def test_no_memory_is_pinned_by_the_step(store, form):
    batches = iter(make(store, form=form, prefetch=0))
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
    assert make(store, device="cuda:0")[0]["labels"].device == torch.device("cuda", 0)
    if count > 1:
        last = torch.device("cuda", count - 1)
        assert torch.cuda.current_device() == 0
        assert all_same(make(store, device=last), expected["rows"])
        assert torch.cuda.current_device() == 0
    with pytest.raises(InputError, match=f"GPU {count} was requested, but torch .* sees {count}. Give"):
        make(store, device=f"cuda:{count}")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process_is_told(store):
    loader = make(store)
    loader[0]
    child = os.fork()
    if not child:
        told = 1
        try:
            loader[1]
        except InputError as error:
            told = 0 if "was forked from the one that made the loader" in str(error) else 2
        finally:
            os._exit(told)
    assert os.waitpid(child, 0)[1] == 0
