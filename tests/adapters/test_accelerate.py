"""Accelerate keeps the loader's place, and steps where its steps end; the batches are shown in tests/comparison."""

import pytest

import batchloom
from adapters.small import small_store
from batchloom.adapters.deepspeed import batch_sizes
from batchloom.core.errors import PlanError, StateError, TrainError
from batchloom.examples.job import adamw, tiny_model
from batchloom.plan.edits import Edit

accelerate = pytest.importorskip("accelerate")

SIZES = {"seq_len": 64, "global_batch_size": 4, "steps": 6}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loader_that_steps_elsewhere_is_refused(store, accelerator):
    from batchloom.adapters.accelerate import attach

    whole = batchloom.Loader(store, **SIZES, rank=0, world_size=1)
    with pytest.raises(
        TrainError, match=r"1 passes of 4 .*gradient_accumulation_steps=2.*Give it 1"
    ):
        attach(accelerator, whole)
    other = batchloom.Loader(store, **SIZES, rank=1, world_size=2, micro_batch_size=1)
    with pytest.raises(TrainError, match="share of rank 1 of 2 and this is process 0 of 1"):
        attach(accelerator, other)


def test_edits_that_change_the_passes_of_a_step_are_refused_also_where_a_checkpoint_brings_them(
    store, accelerator, tmp_path
):
    from batchloom.adapters.accelerate import attach, load_newest, save

    plain, edited, once = (
        batchloom.Loader(store, **SIZES, rank=0, world_size=1, micro_batch_size=micro)
        for micro in (2, 2, None)
    )
    for loader in (edited, once):
        loader.edit(Edit(step=2, global_batch_size=2))
    said = "2 passes of 2 .* and by an edit 1 of 2 from step 2 on: .*Leave global_batch_size out"
    with pytest.raises(PlanError, match=said):
        attach(accelerator, edited)
    with pytest.raises(PlanError, match=said):
        batch_sizes(edited)
    assert batch_sizes(once)["gradient_accumulation_steps"] == 1
    attach(accelerator, plain)
    plain.edit(Edit(step=2, global_batch_size=2))
    save(accelerator, tmp_path, 0)
    accelerator._custom_objects.clear()
    attach(accelerator, batchloom.Loader(store, **SIZES, rank=0, world_size=1, micro_batch_size=2))
    with pytest.raises(PlanError, match=said):
        load_newest(accelerator, tmp_path)


def test_the_place_is_that_of_the_newest_whole_checkpoint(store, accelerator, tmp_path):
    from batchloom.adapters.accelerate import attach, load_newest, save

    loader = batchloom.Loader(store, **SIZES, rank=0, world_size=1, micro_batch_size=2)
    model = tiny_model(store)
    accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, loader)
    assert load_newest(accelerator, tmp_path) == 0
    batches = iter(loader)
    # One more than is trained, as what reads ahead does.
    for _ in range(4):
        next(batches)
    save(accelerator, tmp_path, 3)
    # What a kill leaves.
    (tmp_path / "checkpoint-5.partial").mkdir()
    batches.close()
    assert load_newest(accelerator, tmp_path) == loader.next_step == 3
    accelerator.save_state(str(tmp_path / "checkpoint-4"))
    with pytest.raises(StateError, match="checkpoint-4 holds the loader's place before step 3"):
        load_newest(accelerator, tmp_path)
    accelerator._custom_objects.clear()
    short = batchloom.Loader(
        store, **{**SIZES, "seq_len": 32}, rank=0, world_size=1, micro_batch_size=2
    )
    attach(accelerator, short)
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        load_newest(accelerator, tmp_path)
