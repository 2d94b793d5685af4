"""Adapters of NeMo 2 and Megatron-Bridge, against copies of their classes.

Neither installs without CUDA. ``Sampler`` does as their ``MegatronPretrainingSampler``; the base of the data
module is Lightning's own class.
"""

import pickle
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from batchloom import InputError, StateError
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from oracles import import_megatron as theirs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import num_microbatches_calculator as calc, parallel_state

    from batchloom.adapters import nemo

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "attention_mask": False,
}


class Sampler:
    """Sampler that deals micro-batches of indices to ranks in order."""

    def __init__(self, total, consumed, micro, rank, world_size):
        self.total, self.consumed, self.micro = total, consumed, micro
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        stride = self.micro * self.world_size
        for first in range(self.consumed, self.total - stride + 1, stride):
            own = first + self.rank * self.micro
            yield list(range(own, own + self.micro))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(6)
    rows = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(150)]
    path = tmp_path_factory.mktemp("store") / "s"
    write_store(path, {"train": rows, "val": rows[:9]}, documents_per_shard=60)
    return str(path)


@pytest.fixture
def set_rank(monkeypatch):
    def patch(rank, size):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: size)

    patch(0, 1)
    return patch


def read_micro_batches(samples, consumed=0, rank=0, size=1, micro=2, workers=0):
    """Return the micro-batches that a framework reads from a dataset."""
    sampler = Sampler(len(samples), consumed, micro, rank, size)
    return list(DataLoader(samples, batch_sampler=sampler, num_workers=workers))


def assert_same(micro_batches, folder, first=0, rank=0, size=1, steps=5):
    loader = batchloom.Loader(
        batchloom.open_store(folder),
        seq_len=32,
        global_batch_size=8,
        steps=steps,
        labels="shifted",
        rank=rank,
        world_size=size,
    )
    expected = [part for step in range(first, steps) for part in loader[step].split(2)]
    assert len(micro_batches) == len(expected)
    for micro, part in zip(micro_batches, expected, strict=True):
        trained = part["labels"] != -100
        assert torch.equal(micro["tokens"], part["input_ids"])
        assert torch.equal(micro["position_ids"], part["position_ids"])
        assert torch.equal(micro["loss_mask"], trained.float())
        assert torch.equal(micro["labels"], part["labels"] * trained)


@dataclass(kw_only=True)
class DataloaderConfig:
    """Base of Megatron-Bridge's providers, copied from its source."""

    dataloader_type: str | None = None
    num_workers: int = 2


@dataclass
class DatasetProvider(DataloaderConfig, ABC):
    @abstractmethod
    def build_datasets(self, context): ...


@dataclass(kw_only=True)
class StoreProvider(nemo.StoreDatasets, DatasetProvider):
    pass


def make_context(train=40, valid=16, test=0):
    return SimpleNamespace(train_samples=train, valid_samples=valid, test_samples=test)


@pytest.mark.parametrize(("size", "consumed"), [(1, 0), (2, 0), (2, 24)])
def test_a_bridge_provider_gives_each_rank_what_the_plain_loader_does(folder, set_rank, size, consumed):
    provider = StoreProvider(store=folder, **SIZES, dataloader_type="single")
    for rank in range(size):
        set_rank(rank, size)
        train, valid, test = provider.build_datasets(make_context())
        assert len(train) == 40
        assert_same(read_micro_batches(train, consumed, rank, size), folder, consumed // 8, rank, size)
        assert len(valid) == 16
        assert test is None


def test_worker_processes_give_the_same(folder, set_rank):
    train, _, _ = StoreProvider(store=folder, **SIZES).build_datasets(make_context())
    assert_same(read_micro_batches(train, workers=2), folder)
    assert_same(read_micro_batches(pickle.loads(pickle.dumps(train))), folder)


def test_a_shuffling_sampler_or_one_of_other_sizes_is_found_out(folder, set_rank):
    set_rank(0, 2)
    train, _, _ = StoreProvider(store=folder, **SIZES).build_datasets(make_context())
    with pytest.raises(InputError, match="Sample 2 belongs to data-parallel rank 1 and was requested"):
        read_micro_batches(train, micro=4, size=2)
    loader = train.loader
    bare = batchloom.Loader(loader.store, seq_len=32, global_batch_size=8)
    with pytest.raises(InputError, match="require labels='shifted'"):
        nemo.PlanSamples(bare)


def test_packed_samples_without_a_mask_are_refused(folder, set_rank):
    sizes = {**SIZES, "attention_mask": None}
    with pytest.raises(InputError, match=r"Rows are packed \('best_fit'\).*attention_mask=True"):
        StoreProvider(store=folder, **sizes).build_datasets(make_context())
    alone, _, _ = StoreProvider(store=folder, **sizes, packing="none").build_datasets(make_context())
    assert "attention_mask" not in alone[0]
    masked, _, _ = StoreProvider(store=folder, **{**SIZES, "attention_mask": True}).build_datasets(make_context())
    assert masked[0]["attention_mask"].shape == (1, 32, 32)


def test_samples_of_another_number_of_ranks_are_refused(folder, set_rank):
    train, _, _ = StoreProvider(store=folder, **SIZES).build_datasets(make_context())
    set_rank(0, 2)
    with pytest.raises(TrainError, match="the share of rank 0 of 1, and world_size is 2"):
        nemo.PlanSamples(train.loader, attention_mask=False)


class DataSampler:
    """Used part of NeMo's ``MegatronDataSampler``, copied from its source."""

    def __init__(self, seq_len, micro_batch_size, global_batch_size, dataloader_type="single"):
        self.seq_len, self.micro_batch_size = seq_len, micro_batch_size
        self.global_batch_size, self.dataloader_type = global_batch_size, dataloader_type
        self.rampup_batch_size, self.init_consumed_samples = None, 0
        self.prev_consumed_samples = self.init_global_step = self.if_first_step = 0

    def compute_consumed_samples(self, steps_since_resume):
        return self.init_consumed_samples + steps_since_resume * self.global_batch_size


def make_nemo_module(folder, step=0, limit=2, **options):
    sizes = {**SIZES, **options}
    module = nemo.StoreDataModule(nemo.StoreDatasets(store=folder, **sizes), data_sampler=DataSampler(32, 2, 8))
    module.trainer = SimpleNamespace(
        max_steps=5,
        global_step=step,
        val_check_interval=5,
        limit_val_batches=limit,
        limit_test_batches=0,
    )
    module.setup()
    return module


def test_a_nemo_data_module_goes_on_by_consumed_samples(folder, set_rank):
    module = make_nemo_module(folder)
    assert isinstance(module, lightning.LightningDataModule)
    loader = module.train_dataloader()
    assert loader.mode == "train"
    assert len(module.val_dataloader().dataset) == 4 * 8
    assert_same(read_micro_batches(loader.dataset), folder)
    module.trainer.global_step = 3
    state = module.state_dict()
    assert state["consumed_samples"] == 24
    resumed = make_nemo_module(folder, step=3)
    resumed.load_state_dict(state)
    resumed.train_dataloader()
    consumed = resumed.data_sampler.init_consumed_samples
    assert_same(read_micro_batches(resumed.train_dataloader().dataset, consumed), folder, first=3)
    assert resumed.state_dict()["consumed_samples"] == 24
    with pytest.raises(StateError, match="seed"):
        make_nemo_module(folder, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match="consumed_samples 25 is inside step 3"):
        resumed.load_state_dict({**state, "consumed_samples": 25})
    with pytest.raises(StateError, match="of consumed_samples 16 holds the loader state before"):
        resumed.load_state_dict({**state, "consumed_samples": 16})
    for partial_state, content in (({"consumed_samples": 24}, "consumed_samples"), ({}, "nothing")):
        with pytest.raises(StateError, match=f"data module has {content}, and no loader state"):
            resumed.load_state_dict(partial_state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_any_step_goes_on_with_the_next(folder, set_rank, workers):
    module = make_nemo_module(folder)
    module.train_dataloader()
    for step in range(1, 5):
        module.trainer.global_step = step
        resumed = make_nemo_module(folder, step=step)
        resumed.load_state_dict(module.state_dict())
        data = resumed.train_dataloader().dataset
        consumed = resumed.data_sampler.init_consumed_samples
        assert_same(read_micro_batches(data, consumed, workers=workers), folder, first=step)


def test_an_evaluation_during_training_keeps_the_position(folder, set_rank):
    module = make_nemo_module(folder)
    module.train_dataloader()
    module.trainer.global_step = 3
    before = module.state_dict()
    module.val_dataloader()
    assert module.state_dict() == before
    assert before["consumed_samples"] == 24


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 2), (0.5, 1), (0.0, None), (1, 2), (2, 4)])
def test_a_share_of_the_validation_is_of_the_subset_once(folder, set_rank, limit, steps):
    module = make_nemo_module(folder, limit=limit)
    loader = batchloom.Loader(batchloom.open_store(folder, "val"), seq_len=32, global_batch_size=8)
    assert len(loader) == 2
    dataloader = module.val_dataloader()
    rows = len(loader) * 8 if isinstance(limit, float) and limit else (steps or 0) * 8
    assert (len(dataloader.dataset) if dataloader else 0) == rows
    module.trainer.limit_train_batches, module.trainer.num_sanity_val_steps = 1.0, 0
    calc.init_num_microbatches_calculator(0, None, 8, 2, 1)
    try:
        module.reconfigure_limit_batches()
    finally:
        calc.destroy_num_microbatches_calculator()
    expected = steps * 4 if isinstance(limit, float) and limit else limit * 4
    assert module.trainer.limit_val_batches == expected


def test_an_evaluation_that_cannot_be_is_refused(folder, set_rank):
    with pytest.raises(TrainError, match=r"limit_val_batches 0.25 of 2 steps .* at least 0.5"):
        make_nemo_module(folder, limit=0.25)
    with pytest.raises(InputError, match=r"no subset 'test' .it has train, val.: give test= an existing one"):
        StoreProvider(store=folder, **SIZES).build_datasets(make_context(test=8))
    datasets = StoreProvider(store=folder, **SIZES, test=None).build_datasets(make_context(test=8))
    assert datasets[2] is None


def test_limits_of_evaluation_count_micro_batches(folder, set_rank):
    module = make_nemo_module(folder)
    module.trainer.limit_train_batches, module.trainer.num_sanity_val_steps = 1.0, 2
    calc.init_num_microbatches_calculator(0, None, 8, 2, 1)
    try:
        module.reconfigure_limit_batches()
    finally:
        calc.destroy_num_microbatches_calculator()
    limits = ("limit_train_batches", "limit_val_batches", "num_sanity_val_steps")
    assert [getattr(module.trainer, name) for name in limits] == [1.0, 8, 8]


def test_a_data_sampler_that_deals_otherwise_is_refused(folder):
    sizes = nemo.StoreDatasets(store=folder, **SIZES)
    with pytest.raises(InputError, match="micro_batch_size is 4 and must be 2; .*_type is 'cyclic'"):
        nemo.StoreDataModule(sizes, data_sampler=DataSampler(32, 4, 8, "cyclic"))


def test_recipes_find_a_stores_shards_under_their_names_without_a_copy(folder, tmp_path):
    store = batchloom.open_store(folder)
    paths = nemo.link_text_documents(store, tmp_path / "links", "corpus")
    assert nemo.link_text_documents(store, tmp_path / "links", "corpus") == paths
    prefixes = [tmp_path / "links" / f"corpus_{n:05d}_text_document" for n in range(3)]
    assert paths[1::2] == [str(prefix) for prefix in prefixes]
    assert sum(map(int, paths[::2])) == store.tokens
    for prefix, stem in zip(prefixes, store.shards.stems, strict=True):
        assert prefix.with_name(prefix.name + ".bin").samefile(stem.with_name(stem.name + ".bin"))
    indexed = theirs("indexed_dataset").IndexedDataset
    documents = [doc.tolist() for prefix in prefixes for doc in indexed(str(prefix))]
    assert documents == [document.ids.tolist() for document in store]
    alone = nemo.link_text_documents(batchloom.open_store(folder, "val"), tmp_path / "one", "corpus")
    assert alone[1] == str(tmp_path / "one" / "corpus_text_document")
    with pytest.raises(InputError, match="exists and is another file"):
        nemo.link_text_documents(_write_other_store(tmp_path), tmp_path / "one", "corpus")


def _write_other_store(path):
    return write_store(path / "other", [[1, 2, 3]])
