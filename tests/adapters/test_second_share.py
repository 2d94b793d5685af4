"""Frameworks that would divide a loader's batches among processes a second time, and ``DataLoader(loader)``."""

import re
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import batchloom
from adapters.second_share_worker import FRAMEWORKS, STEPS
from adapters.small_stores import make_small_store
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.core.errors import TrainError
from processes import run_ranks

WORKER = Path(__file__).with_name("second_share_worker.py")
REMEDIES = {
    "accelerate": "do not give it to accelerator.prepare",
    "accelerate shards": "do not give it to accelerator.prepare",
    "trainer": "give Trainer the parts of batchloom.adapters.hugging_face",
    "lightning": "give Trainer a batchloom.adapters.lightning.LoaderDataModule",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("store"))


def make_loader(store):
    return batchloom.Loader(store, seq_len=64, global_batch_size=2, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", ["iterable", "map", "loader"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_rank_gets_its_share_or_an_error_that_names_the_call(store, framework, dataset, workers):
    for result in run_ranks(WORKER, store.path, framework, dataset, workers):
        assert result.returncode == 0, result.stderr[-4000:]
        [line] = re.findall(r"^(?:served|refused).*", result.stdout, re.MULTILINE)
        # Lightning leaves iterable data sets as they are.
        is_right = framework == "lightning" and dataset == "iterable"
        assert line == f"served {STEPS}" if is_right else REMEDIES[framework] in line


def test_a_distributed_sampler_is_refused(store):
    for dataset in (LoaderDataset(make_loader(store)), make_loader(store)):
        with pytest.raises(TrainError, match=r"DistributedSampler gives each of 2 .* Instead, leave the sampler out\."):
            DistributedSampler(dataset, num_replicas=2, rank=0)
    assert len(DistributedSampler(LoaderDataset(make_loader(store)), num_replicas=1, rank=0)) == STEPS


@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {"batch_size": 8}, {"shuffle": True}, {"sampler": range(3), "batch_size": None}]
)
def test_a_loader_in_a_data_loader_is_refused(store, options):
    loader = make_loader(store)
    with pytest.raises(TrainError, match=r"Instead, DataLoader\(LoaderIterable\(loader\), batch_size=None\)"):
        next(iter(DataLoader(loader, **options)))
    iterator = iter(DataLoader(LoaderIterable(loader), batch_size=None))
    assert next(iterator).step == 0
    assert loader.state_dict()["position"] > 0
    assert loader[3].step == 3
    assert len(loader) == STEPS
