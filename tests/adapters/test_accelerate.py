"""Accelerate keeps the loader's place, and steps where its steps end; the batches are shown in tests/analysis/compare."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import batchloom
from adapters.small import small_store
from batchloom import Edit, PlanError, StateError
from batchloom.adapters.deepspeed import make_batch_size_config
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.batches import BatchOptions
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw, tiny_model
from processes import run_two_ranks
from raw_streams.streams import small_stream, write_texts

accelerate = pytest.importorskip("accelerate")

SIZES = {"seq_len": 64, "global_batch_size": 4, "steps": 6}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture
def accelerators():
    """Makes them; each is what a process that is started anew has."""
    yield lambda: accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def accelerator(accelerators):
    return accelerators()


def loader_of(store, **sizes):
    sizes = {"batch": BatchOptions(micro_batch_size=2), **SIZES, **sizes}
    return batchloom.Loader(store, **sizes, rank=0, world_size=1)


def test_a_loader_that_steps_elsewhere_is_refused(store, accelerator):
    from batchloom.adapters.accelerate import attach

    whole = batchloom.Loader(store, **SIZES, rank=0, world_size=1)
    with pytest.raises(TrainError, match=r"1 passes of 4 .*gradient_accumulation_steps=2.*Give it 1"):
        attach(accelerator, whole)
    other = batchloom.Loader(store, **SIZES, rank=1, world_size=2, batch=BatchOptions(micro_batch_size=1))
    with pytest.raises(TrainError, match="share of rank 1 of 2 and this is process 0 of 1"):
        attach(accelerator, other)


def test_edits_that_change_the_passes_of_a_step_are_refused_also_where_a_checkpoint_brings_them(
    store, accelerator, accelerators, tmp_path
):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    plain, edited, once = (
        batchloom.Loader(store, **SIZES, rank=0, world_size=1, batch=BatchOptions(micro_batch_size=micro))
        for micro in (2, 2, None)
    )
    for loader in (edited, once):
        loader.edit(Edit(step=2, global_batch_size=2))
    said = "2 passes of 2 .* but after an edit 1 of 2 from step 2 on, .*Leave global_batch_size out"
    with pytest.raises(PlanError, match=said):
        attach(accelerator, edited)
    with pytest.raises(PlanError, match=said):
        make_batch_size_config(edited)
    assert make_batch_size_config(once)["gradient_accumulation_steps"] == 1
    attach(accelerator, plain)
    plain.edit(Edit(step=2, global_batch_size=2))
    save_checkpoint(accelerator, tmp_path, 0)
    again = accelerators()
    attach(again, loader_of(store))
    with pytest.raises(PlanError, match=said):
        load_newest_checkpoint(again, tmp_path)


def test_the_place_is_that_of_the_newest_whole_checkpoint(store, accelerator, accelerators, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    loader = batchloom.Loader(store, **SIZES, rank=0, world_size=1, batch=BatchOptions(micro_batch_size=2))
    model = tiny_model(store)
    accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, loader)
    assert load_newest_checkpoint(accelerator, tmp_path) == 0
    batches = iter(loader)
    # One more than is trained, as what reads ahead does.
    for _ in range(4):
        next(batches)
    save_checkpoint(accelerator, tmp_path, 3)
    # What a kill leaves.
    (tmp_path / "checkpoint-5.partial").mkdir()
    batches.close()
    assert load_newest_checkpoint(accelerator, tmp_path) == loader.next_step == 3
    accelerator.save_state(str(tmp_path / "checkpoint-4"))
    with pytest.raises(StateError, match="checkpoint-4 holds the loader state before step 3"):
        load_newest_checkpoint(accelerator, tmp_path)
    again = accelerators()
    again.prepare(model)
    attach(again, loader_of(store, seq_len=32))
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        load_newest_checkpoint(again, tmp_path)


def test_a_longer_run_fills_up_the_step_that_the_last_one_ended_in(store, accelerators, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    once, twice = (loader_of(store, steps=None, epochs=epochs) for epochs in (1, 2))
    first, again = accelerators(), accelerators()
    attach(first, once)
    save_checkpoint(first, tmp_path, len(once))
    attach(again, twice)
    assert load_newest_checkpoint(again, tmp_path) == twice.next_step == len(once) - 1


def test_a_loader_is_attached_once_before_anything_is_kept(store, accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    with pytest.raises(TrainError, match="no loader, .*call .*attach.accelerator, loader. first"):
        save_checkpoint(accelerator, tmp_path / "out", 2)
    with pytest.raises(TrainError, match="no loader, .*call .*attach.accelerator, loader. first"):
        load_newest_checkpoint(accelerator, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    loader = loader_of(store)
    attach(accelerator, loader)
    for other in (loader, loader_of(store)):
        with pytest.raises(TrainError, match="already has a loader attached: attach only"):
            attach(accelerator, other)


@pytest.mark.parametrize("face", [LoaderDataset, LoaderIterable])
def test_batches_that_went_through_prepare_are_refused(store, accelerators, tmp_path, face):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    before, behind = accelerators(), accelerators()
    loader = loader_of(store)
    before.prepare(DataLoader(face(loader), batch_size=None))
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        attach(before, loader)
    behind.prepare(DataLoader([1, 2, 3]))
    attach(behind, loader)
    save_checkpoint(behind, tmp_path, 2)
    behind.prepare(DataLoader(face(loader), batch_size=None))
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        save_checkpoint(behind, tmp_path, 4)
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        load_newest_checkpoint(behind, tmp_path)


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin"])
def test_a_damaged_checkpoint_is_named(store, accelerator, tmp_path, name):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    model = tiny_model(store)
    accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, loader_of(store))
    file = save_checkpoint(accelerator, tmp_path, 2) / name
    whole = file.read_bytes()
    cuts = [0, 1, 3, 16, *(int(len(whole) * share) for share in (0.01, 0.5, 0.99))]
    for damaged in [*(whole[:stop] for stop in cuts), bytes(len(whole)), None]:
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(StateError, match="checkpoint-2 cannot be loaded: .*delete the folder"):
            load_newest_checkpoint(accelerator, tmp_path)
        file.touch()
    file.write_bytes(whole)
    assert load_newest_checkpoint(accelerator, tmp_path) == 2


def test_a_stream_is_kept_where_it_stands_or_not_at_all(accelerators, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    lines = write_texts(tmp_path / "a.jsonl", 200)

    def streamed():
        return batchloom.Loader(small_stream(lines), batch=BatchOptions(micro_batch_size=4), rank=0, world_size=1)

    first, again = accelerators(), accelerators()
    loader, other = streamed(), streamed()
    attach(first, loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(TrainError, match="checkpoint-2 is to be saved, but the stream has returned 3 steps"):
        save_checkpoint(first, tmp_path / "out", 2)
    save_checkpoint(first, tmp_path / "out", 3)
    batches.close()
    attach(again, other)
    assert load_newest_checkpoint(again, tmp_path / "out") == other.next_step == 3


@pytest.mark.slow
def test_two_processes_are_not_given_what_one_of_them_would_keep_or_deal(store, tmp_path):
    run_two_ranks(Path(__file__).with_name("accelerate_worker.py"), store.path, tmp_path)
