"""Distributed checkpoints: complete or absent, for any number of ranks."""

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import batchloom
from adapters.small_stores import make_small_store
from analysis.compare.warm_examples import run_warm
from batchloom import StateError
from batchloom.adapters.checkpoints import find_newest_checkpoint
from batchloom.adapters.fsdp2 import begin_async_save, load_fsdp2, load_newest_fsdp2, save_fsdp2
from batchloom.analysis.compare import iter_expected_entries
from batchloom.examples.job import adamw, tiny_model

SIZES = {"seq_len": 64, "global_batch_size": 4}


class Run:
    """A model, its optimizer and a loader, with a plain training loop."""

    def __init__(self, store, **options):
        self.model = tiny_model(store)
        self.optimizer = adamw(self.model.parameters(), 3e-3)
        options = {**SIZES, "steps": 12, "rank": 0, "world_size": 1, **options}
        self.loader = batchloom.Loader(store, **options)
        self.parts = (self.model, self.optimizer, self.loader)

    def train(self, first, stop):
        for step in range(first, stop):
            batch = self.loader[step]
            self.model(**batch, use_cache=False).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [weight.detach().clone() for weight in self.model.parameters()]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("data") / "store", count=400)


def are_equal(tensors, others):
    return all(torch.equal(first, second) for first, second in zip(tensors, others, strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_asynchronous_checkpoint_holds_the_state_at_its_start(store, tmp_path):
    run = Run(store)
    run.train(0, 2)
    save_fsdp2(tmp_path, 2, *run.parts)
    saved = run.train(2, 4)
    finish = begin_async_save(tmp_path, 4, *run.parts)
    run.train(4, 6)
    # After a kill, too, an incomplete folder is no checkpoint.
    assert find_newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert finish() == find_newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    resumed = Run(store)
    assert load_newest_fsdp2(tmp_path, *resumed.parts) == resumed.loader.next_step == 4
    assert are_equal(resumed.model.parameters(), saved)
    assert are_equal(resumed.train(4, 6), run.model.parameters())


def test_a_checkpoint_of_something_else_is_refused(store, tmp_path):
    run = Run(store)
    run.train(0, 1)
    save_fsdp2(tmp_path, 1, *run.parts)
    assert load_newest_fsdp2(tmp_path / "nowhere", *run.parts) == 0
    other_run = Run(store, seq_len=32)
    before = other_run.train(0, 1)
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        load_newest_fsdp2(tmp_path, *other_run.parts)
    assert are_equal(other_run.model.parameters(), before)
    wide = torch.nn.Linear(3, 3)
    with pytest.raises(StateError, match="checkpoint-1 cannot be loaded.*another model"):
        load_fsdp2(tmp_path / "checkpoint-1", wide, adamw(wide.parameters(), 1.0), run.loader)
    with pytest.raises(StateError, match="folder named checkpoint-N"):
        load_fsdp2(tmp_path, *run.parts)
    (tmp_path / "checkpoint-1" / ".metadata").unlink()
    with pytest.raises(StateError, match="cannot be loaded"):
        load_newest_fsdp2(tmp_path, *run.parts)


def test_a_step_other_than_that_of_the_folder_name_is_refused(store, tmp_path):
    run = Run(store)
    run.train(0, 1)
    save_fsdp2(tmp_path, 4, *run.parts).rename(tmp_path / "checkpoint-9")
    with pytest.raises(StateError, match="checkpoint-9 holds the loader state before step 4"):
        load_newest_fsdp2(tmp_path, *run.parts)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("state", ["abc", 5])
def test_a_loader_state_that_is_not_json_is_refused(store, tmp_path, state):
    state_dict_saver.save({"loader": state}, checkpoint_id=tmp_path / "checkpoint-8", no_dist=True)
    with pytest.raises(StateError, match="checkpoint-8 cannot be loaded: .*Error: .*damaged"):
        load_newest_fsdp2(tmp_path, *Run(store).parts)


def test_a_longer_run_fills_up_the_step_that_the_last_one_ended_in(store, tmp_path):
    run = Run(store, steps=None, epochs=1)
    run.train(0, 1)
    last = len(run.loader)
    assert run.loader.plan.positions < last * SIZES["global_batch_size"]
    save_fsdp2(tmp_path, last, *run.parts)
    longer = Run(store, steps=None, epochs=2)
    assert load_newest_fsdp2(tmp_path, *longer.parts) == longer.loader.next_step == last - 1


@pytest.mark.parametrize(
    "stops", [((2, 2), (4, 1)), pytest.param(((4, 2), (8, 1), (12, 2)), marks=pytest.mark.slow)], ids=["", "back"]
)
def test_a_run_goes_on_with_another_number_of_processes(store, tmp_path, stops):
    job = {"data": str(store.path), **SIZES, "batch_size": 1, "save_every": 2}
    plain = {**job, "out": str(tmp_path / "plain"), "steps": stops[-1][0]}
    expected_losses = run_warm("pytorch", plain, tmp_path / "p").losses
    losses, first_step = [], 0
    for stop, processes in stops:
        run = run_warm(
            "fsdp2",
            {**job, "out": str(tmp_path / "out"), "steps": stop, "resume": bool(first_step)},
            tmp_path / f"record{stop}",
            processes=processes,
        )
        assert run.first == first_step
        for rank, entries in enumerate(run.ranks):
            loader = batchloom.Loader(store, **SIZES, rank=rank, world_size=processes, steps=stop)
            hashes = [entry["hash"] for entry in iter_expected_entries(loader, stop)]
            assert [entry["hash"] for entry in entries] == hashes[first_step:]
        losses, first_step = losses + run.losses, stop
    assert losses == pytest.approx(expected_losses, rel=1e-4)
