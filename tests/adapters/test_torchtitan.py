"""torchtitan's data loader interface and configuration over a store.

Its trainer needs a GPU and is not run.
"""

import json
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import batchloom
from batchloom import PlanError, StateError
from batchloom.testing import write_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "torchtitan.components.dataloader",
        reason="torchtitan is not installed: pip install --no-deps torchtitan==0.3.0, and tyro",
    )
    from torchtitan.components.dataloader import BaseDataLoader

    from batchloom.adapters.torchtitan import StoreDataLoader


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(200)]
    return write_store(tmp_path_factory.mktemp("store") / "s", documents)


def build(store, rank=0, ranks=1, local=2, **settings):
    """Build the loader as torchtitan's Trainer does."""
    settings = {"global_batch_size": 8, **settings}
    config = StoreDataLoader.Config(dataset_path=str(store.path), **settings)
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=32,
        local_batch_size=local,
        snapshot_every_n_steps=5,
    )


def list_expected(store, first=0, rank=0, ranks=1):
    loader = batchloom.Loader(store, seq_len=32, global_batch_size=8, labels="shifted", rank=rank, world_size=ranks)
    return [part for s in range(first, len(loader)) for part in loader[s].split(2)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for (inputs, labels), part in zip(actual, expected, strict=True):
        assert torch.equal(inputs["input"], part["input_ids"])
        assert torch.equal(inputs["positions"], part["position_ids"])
        assert torch.equal(labels, part["labels"])


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_it_is_a_torchtitan_loader_of_the_plans_batches(store, rank, ranks):
    loader = build(store, rank, ranks)
    assert isinstance(loader, BaseDataLoader)
    assert_same(list(loader), list_expected(store, rank=rank, ranks=ranks))


def test_a_state_after_any_step_goes_on_with_the_next(store):
    loader = build(store)
    for number, _ in zip(range(1, 18), loader, strict=False):
        step = number // 4
        resumed = build(store)
        resumed.load_state_dict(loader.state_dict())
        # Within a step the state is the one before the step.
        assert_same([item for item, _ in zip(resumed, range(4), strict=False)], list_expected(store, step)[:4])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_by_torch_goes_on_after_the_steps_trained_on_another_number_of_ranks(store, tmp_path):
    loader, received = build(store), []
    for item in loader:
        received.append(item)
        if len(received) == 12:  # three steps of four micro-batches
            break
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "kept", no_dist=True)
    for rank in (0, 1):
        resumed = build(store, rank, 2)
        dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "kept", no_dist=True)
        assert_same(list(resumed), list_expected(store, first=3, rank=rank, ranks=2))


def test_a_step_that_was_begun_is_given_again(store):
    loader = build(store)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    resumed = build(store)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert_same(list(resumed), list_expected(store, first=1))


def test_what_does_not_fit_is_refused(store):
    with pytest.raises(PlanError, match="cannot be cut into micro-batches of 3"):
        build(store, local=3)
    with pytest.raises(StateError, match="has dp_rank_0, world_size, no batchloom"):
        build(store).load_state_dict({"dp_rank_0": b"", "world_size": 1})
    for damaged in ("abc", b"\xff", None):
        with pytest.raises(StateError, match="as batchloom, which is not JSON.*another checkpoint"):
            build(store).load_state_dict({"batchloom": damaged})
    with pytest.raises(StateError, match="not a loader's state"):
        build(store).load_state_dict({"batchloom": "3"})
    with pytest.raises(StateError, match="seed"):
        build(store, seed=1).load_state_dict(build(store).state_dict())


def test_a_validators_loader_begins_anew(store):
    loader = build(store, infinite=True)
    once = len(list_expected(store))
    items = [item for item, _ in zip(loader, range(once + 1), strict=False)]
    assert_same(items[-1:], list_expected(store)[:1])
