"""Loader states in Accelerate checkpoints, and aligned optimizer steps.

tests/analysis/compare checks the batches.
"""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import batchloom
from adapters.small_stores import make_small_store
from batchloom import Edit, PlanError, StateError
from batchloom.adapters.deepspeed import make_batch_size_config
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw, tiny_model
from processes import run_two_ranks
from raw_streams.streams import make_small_stream, write_texts

accelerate = pytest.importorskip("accelerate")

SIZES = {"seq_len": 64, "global_batch_size": 4, "steps": 6}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture
def make_accelerator():
    """Factory of accelerators; each is that of a new process."""
    yield lambda: accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def accelerator(make_accelerator):
    return make_accelerator()


def make_loader(store, **sizes):
    sizes = {"micro_batch_size": 2, **SIZES, **sizes}
    return batchloom.Loader(store, **sizes, rank=0, world_size=1)


def test_a_loader_with_other_accumulation_or_ranks_is_refused(store, accelerator):
    from batchloom.adapters.accelerate import attach

    one_pass_loader = batchloom.Loader(store, **SIZES, rank=0, world_size=1)
    with pytest.raises(TrainError, match=r"1 passes of 4 .*gradient_accumulation_steps=2.*Give it 1"):
        attach(accelerator, one_pass_loader)
    rank_1_loader = batchloom.Loader(store, **SIZES, rank=1, world_size=2, micro_batch_size=1)
    with pytest.raises(TrainError, match="share of rank 1 of 2 and this is process 0 of 1"):
        attach(accelerator, rank_1_loader)


def test_edits_that_change_the_passes_of_a_step_are_refused_also_where_a_checkpoint_brings_them(
    store, accelerator, make_accelerator, tmp_path
):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    plain, edited, one_pass = (
        batchloom.Loader(store, **SIZES, rank=0, world_size=1, micro_batch_size=micro) for micro in (2, 2, None)
    )
    for loader in (edited, one_pass):
        loader.edit(Edit(step=2, global_batch_size=2))
    message = "2 passes of 2 .* but after an edit 1 of 2 from step 2 on, .*Leave global_batch_size out"
    with pytest.raises(PlanError, match=message):
        attach(accelerator, edited)
    with pytest.raises(PlanError, match=message):
        make_batch_size_config(edited)
    assert make_batch_size_config(one_pass)["gradient_accumulation_steps"] == 1
    attach(accelerator, plain)
    plain.edit(Edit(step=2, global_batch_size=2))
    save_checkpoint(accelerator, tmp_path, 0)
    resumed = make_accelerator()
    attach(resumed, make_loader(store))
    with pytest.raises(PlanError, match=message):
        load_newest_checkpoint(resumed, tmp_path)


def test_the_loader_state_is_that_of_the_newest_complete_checkpoint(store, accelerator, make_accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    loader = batchloom.Loader(store, **SIZES, rank=0, world_size=1, micro_batch_size=2)
    model = tiny_model(store)
    accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, loader)
    assert load_newest_checkpoint(accelerator, tmp_path) == 0
    batches = iter(loader)
    # One batch more than was trained, as a prefetching loop reads.
    for _ in range(4):
        next(batches)
    save_checkpoint(accelerator, tmp_path, 3)
    # A killed save leaves such a folder.
    (tmp_path / "checkpoint-5.partial").mkdir()
    batches.close()
    assert load_newest_checkpoint(accelerator, tmp_path) == loader.next_step == 3
    accelerator.save_state(str(tmp_path / "checkpoint-4"))
    with pytest.raises(StateError, match="checkpoint-4 holds the loader state before step 3"):
        load_newest_checkpoint(accelerator, tmp_path)
    resumed = make_accelerator()
    resumed.prepare(model)
    attach(resumed, make_loader(store, seq_len=32))
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        load_newest_checkpoint(resumed, tmp_path)


def test_a_longer_run_fills_up_the_step_that_the_last_one_ended_in(store, make_accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    one_epoch, two_epochs = (make_loader(store, steps=None, epochs=epochs) for epochs in (1, 2))
    first, resumed = make_accelerator(), make_accelerator()
    attach(first, one_epoch)
    save_checkpoint(first, tmp_path, len(one_epoch))
    attach(resumed, two_epochs)
    assert load_newest_checkpoint(resumed, tmp_path) == two_epochs.next_step == len(one_epoch) - 1


def test_a_loader_is_attached_once_before_anything_is_saved(store, accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    with pytest.raises(TrainError, match="no loader, .*call .*attach.accelerator, loader. first"):
        save_checkpoint(accelerator, tmp_path / "out", 2)
    with pytest.raises(TrainError, match="no loader, .*call .*attach.accelerator, loader. first"):
        load_newest_checkpoint(accelerator, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    loader = make_loader(store)
    attach(accelerator, loader)
    for second_loader in (loader, make_loader(store)):
        with pytest.raises(TrainError, match="already has a loader attached: attach only"):
            attach(accelerator, second_loader)


@pytest.mark.parametrize("dataset_class", [LoaderDataset, LoaderIterable])
def test_batches_that_went_through_prepare_are_refused(store, make_accelerator, tmp_path, dataset_class):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    prepared_before, prepared_after = make_accelerator(), make_accelerator()
    loader = make_loader(store)
    prepared_before.prepare(DataLoader(dataset_class(loader), batch_size=None))
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        attach(prepared_before, loader)
    prepared_after.prepare(DataLoader([1, 2, 3]))
    attach(prepared_after, loader)
    save_checkpoint(prepared_after, tmp_path, 2)
    prepared_after.prepare(DataLoader(dataset_class(loader), batch_size=None))
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        save_checkpoint(prepared_after, tmp_path, 4)
    with pytest.raises(TrainError, match="given a DataLoader .*Leave it out of prepare"):
        load_newest_checkpoint(prepared_after, tmp_path)


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin"])
def test_a_damaged_checkpoint_is_named(store, accelerator, tmp_path, name):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    model = tiny_model(store)
    accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, make_loader(store))
    file = save_checkpoint(accelerator, tmp_path, 2) / name
    content = file.read_bytes()
    cuts = [0, 1, 3, 16, *(int(len(content) * share) for share in (0.01, 0.5, 0.99))]
    for damaged in [*(content[:stop] for stop in cuts), bytes(len(content)), None]:
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(StateError, match="checkpoint-2 cannot be loaded: .*delete the folder"):
            load_newest_checkpoint(accelerator, tmp_path)
        file.touch()
    file.write_bytes(content)
    assert load_newest_checkpoint(accelerator, tmp_path) == 2


def test_a_stream_is_saved_at_its_current_step_only(make_accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint

    lines = write_texts(tmp_path / "a.jsonl", 200)

    def make_stream_loader():
        return batchloom.Loader(make_small_stream(lines), micro_batch_size=4, rank=0, world_size=1)

    first, resumed = make_accelerator(), make_accelerator()
    loader, resumed_loader = make_stream_loader(), make_stream_loader()
    attach(first, loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(TrainError, match="checkpoint-2 is to be saved, but the stream has returned 3 steps"):
        save_checkpoint(first, tmp_path / "out", 2)
    save_checkpoint(first, tmp_path / "out", 3)
    batches.close()
    attach(resumed, resumed_loader)
    assert load_newest_checkpoint(resumed, tmp_path / "out") == resumed_loader.next_step == 3


@pytest.mark.slow
def test_two_processes_refuse_streams_and_prepared_batches(store, tmp_path):
    run_two_ranks(Path(__file__).with_name("accelerate_worker.py"), store.path, tmp_path)
