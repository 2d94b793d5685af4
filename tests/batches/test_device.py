"""Batches on a device; the CPU takes the same path as a GPU."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import batchloom
from batchloom import Edit, InputError, SettingsError
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.batches import Batch
from batchloom.batches.assembly.device import pack_arrays, plan_array_layout
from batchloom.plan import Mesh
from batchloom.testing import write_store

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="errors without a GPU")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 90)).tolist(), 256] for _ in range(300)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


def build_loader(store, **options):
    sizes = {"seq_len": 64, "global_batch_size": 12, "rank": 0, "world_size": 1}
    return batchloom.Loader(store, **{**sizes, **options})


def have_same_arrays(batch, arrays):
    return list(batch) == list(arrays) and all(np.array_equal(batch[name], value) for name, value in arrays.items())


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "varlen"},
        {"labels": "shifted", "augment": {"noise_prob": 0.2}},
        {"labels": "shifted", "mesh": Mesh(context=2), "world_size": 2},
        {"form": "varlen", "align": 8, "uneven": "pad", "world_size": 5},
    ],
)
def test_a_device_gets_the_batches_that_numpy_gets_in_one_block_of_memory(store, options, prefetch):
    loader = build_loader(store, device="cpu", prefetch=prefetch, **options)
    plain = list(build_loader(store, output="numpy", **options))
    batches = list(loader)
    assert len(batches) == len(plain)
    for actual, expected in zip([*batches, loader[2]], [*plain, plain[2]], strict=True):
        assert have_same_arrays(actual, expected)
        assert (actual.step, actual.origin) == (expected.step, expected.origin)
        tensors = [value for value in actual.values() if isinstance(value, torch.Tensor)]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.is_contiguous() and not tensor.data_ptr() % 64 for tensor in tensors)
        dtypes = {name: str(value.dtype) for name, value in expected.items() if hasattr(value, "dtype")}
        for name, value in actual.items():
            assert str(getattr(value, "dtype", int)).removeprefix("torch.") == dtypes.get(name, "<class 'int'>")


def test_batches_of_a_device_have_memory_of_their_own(store):
    loader = build_loader(store, device="cpu")
    batches = list(loader)
    assert all(
        have_same_arrays(actual, expected)
        for actual, expected in zip(batches, build_loader(store, output="numpy"), strict=True)
    )


def test_a_default_device_of_torch_changes_nothing(store):
    with torch.device("meta"):
        batch = build_loader(store, device="cpu", prefetch=0)[0]
    assert have_same_arrays(batch, build_loader(store, output="numpy")[0])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_is_copied_ahead_is_not_counted_as_given(store, prefetch, device):
    expected = list(build_loader(store, output="numpy"))
    loader = build_loader(store, device=device, prefetch=prefetch)
    iterator = iter(loader)
    for stop in range(len(expected)):
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["position"] == 12 * stop
        resumed = build_loader(store, device=device, prefetch=prefetch)
        resumed.load_state_dict(state)
        assert have_same_arrays(next(iter(resumed)), expected[stop])
        next(iterator)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_edit_changes_no_batch_that_may_be_on_its_way(store, prefetch):
    results = {}
    for device in (None, "cpu"):
        loader = build_loader(store, device=device, prefetch=prefetch, epochs=3)
        iterator = iter(loader)
        steps = [next(iterator) for _ in range(3)]
        first = loader.first_editable_step
        loader.edit(Edit(step=first, seq_len=32))
        results[device] = [first, *steps, *iterator]
    assert results[None][0] == results["cpu"][0] == 3 + prefetch + 1
    assert [b["input_ids"].shape[1] for b in results["cpu"][1:]][first - 1 : first + 1] == [64, 32]
    assert all(
        have_same_arrays(actual, expected)
        for actual, expected in zip(results["cpu"][1:], results[None][1:], strict=True)
    )


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_splitting_a_batch_reads_nothing_of_its_tensors(store, form):
    """Values of ``meta`` tensors cannot be read; reading GPU tensors would block."""
    loader, empty = build_loader(store, form=form), 0
    for step in (0, -1):
        batch = loader[step]
        shapes = [{k: getattr(v, "shape", v) for k, v in part.items()} for part in batch.split(1)]
        empty += sum(bool((part["labels"] == -100).all()) for part in batch.split(1))
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to("meta")
        parts = batch.split(1)
        assert [{k: getattr(v, "shape", v) for k, v in part.items()} for part in parts] == shapes
    assert empty


@given(
    st.lists(
        st.tuples(st.sampled_from(["int64", "int32", "bool"]), st.lists(st.integers(0, 40), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_packed_arrays_are_separate_and_complete(array_types):
    rng = np.random.default_rng(0)
    arrays = {str(n): rng.integers(0, 2, shape).astype(dtype) for n, (dtype, shape) in enumerate(array_types)}
    parts = plan_array_layout({**arrays, "max_length_q": 7})
    block = np.full(parts[-1].stop, 255, np.uint8)
    pack_arrays(arrays, parts, block)
    assert [part.name for part in parts] == list(arrays)
    assert all(part.begin % 512 == 0 for part in parts)
    assert all(first.stop <= second.begin for first, second in pairwise(parts))
    for part in parts:
        packed = block[part.begin : part.stop].view(part.dtype).reshape(part.shape)
        assert np.array_equal(packed, arrays[part.name])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device: 'gpu' is none of cpu, cuda, cuda:N"),
        ({"device": 0}, "device: '0' is none of cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device: 'cuda:x' is none of"),
        ({"device": "cuda:" + "9" * 5000}, "is none of cpu, cuda, cuda:N"),
        ({"device": torch.device("meta")}, "device: 'meta' is none of"),
        (
            {"device": "cuda", "output": "numpy"},
            "device: 'cuda' is for torch tensors, but output is 'numpy': leave device out, or give",
        ),
    ],
)
def test_devices_that_cannot_be(store, options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        build_loader(store, **options)


@without_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 3)])
def test_a_missing_gpu_is_reported_in_one_sentence(store, device):
    index = 3 if "3" in str(device) else 0
    with pytest.raises(
        InputError,
        match=f"device='{device}': GPU {index} was requested, but torch .* sees 0. Give device='cpu', start fewer",
    ):
        build_loader(store, device=device)


@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
def test_a_dataloader_takes_no_device(store, dataset_class):
    with pytest.raises(InputError, match="device='cpu' cannot be used with a DataLoader, .*: iterate the Loader"):
        dataset_class(build_loader(store, device="cpu"))


def test_a_moved_varlen_batch_is_split_by_its_layout(store):
    batch = build_loader(store, form="varlen")[1]
    parts = batch.split(4)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"].clone()
    assert all(have_same_arrays(actual, expected) for actual, expected in zip(batch.split(4), parts, strict=True))
    assert isinstance(parts[0], Batch)
