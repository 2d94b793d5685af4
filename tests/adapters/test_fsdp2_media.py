"""FSDP2 over stores with images: ranks without images in a pass."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import batchloom
from adapters.fsdp2_media_worker import train_model
from batchloom import InputError
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.adapters.fsdp2.fsdp2_trainer import concat_rows
from batchloom.batches import Batch
from batchloom.batches.assembly import BatchLayout, MediaOffsets
from media.models import make_model
from processes import run_two_ranks
from train.families import Families

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SETTINGS = {
    "max_length": 320,
    "packing": False,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
}
# Models with four position axes, with features per row, and with their own masks.
NAMES = ("qwen2_vl", "idefics3", "gemma3")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_images_train_as_one(families):
    folders = [families[name].folder.parent for name in NAMES]
    run_two_ranks(Path(__file__).with_name("fsdp2_media_worker.py"), json.dumps(SETTINGS), *folders)
    for folder in folders:
        has_images = [json.loads((folder / f"has_images_{rank}.json").read_text()) for rank in (0, 1)]
        passes = [
            {first, second} for step in zip(*has_images, strict=True) for first, second in zip(*step, strict=True)
        ]
        assert {True, False} in passes
        assert {False} in passes
        alone = train_model(
            folder / "store",
            folder / "model",
            folder / "one",
            {**SETTINGS, "gradient_accumulation_steps": 4},
        )
        expected_losses = [entry["loss"] for entry in alone.log_history]
        lines = (folder / "two" / "log.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses == pytest.approx(expected_losses, abs=1e-4)
        assert losses[-1] < losses[0]
        weights = load_file(folder / "two" / "model" / "model.safetensors")
        for name, weight in alone.model.state_dict().items():
            if name in weights:
                assert torch.allclose(weight, weights[name], atol=1e-3), name


def make_rows(ids, **media):
    """Return rows of one token each, with features of the given names."""
    rows = torch.tensor(ids)[:, None]
    arrays = {"input_ids": rows, "labels": rows, "position_ids": torch.zeros_like(rows)}
    empty = np.zeros(2, np.int64)
    axes = {name: MediaOffsets(0, empty, empty) for name in media}
    layout = BatchLayout(empty, empty[:1], empty[:1], 1, "aligned", sliced=False, media=axes)
    return Batch({**arrays, **media}, layout=layout)


def test_a_pass_that_lacks_sounds_keeps_its_images():
    """Some processors have two kinds of media; no family of these tests does."""
    images, sounds = torch.ones(2, 3, 4), torch.ones(1, 5)
    part = make_rows([1, 2], pixel_values=images)
    added = make_rows([3], pixel_values=2 * torch.ones(1, 6, 2), input_features=sounds)
    joined = concat_rows(part, added)
    assert joined["input_ids"].tolist() == [[1], [2], [3]]
    assert torch.equal(joined["input_features"], sounds)
    assert joined["pixel_values"].shape == (3, 6, 4)
    assert torch.equal(joined["pixel_values"][:2, :3], images)
    assert joined["pixel_values"].sum() == images.sum() + 2 * 6 * 2


def test_models_and_collators_that_do_not_go_with_media_are_refused(families, tmp_path):
    family, other_family = families["qwen2_vl"], families["gemma3"]
    args = FSDP2Arguments(output_dir=str(tmp_path), max_length=320, use_cpu=True)
    store = batchloom.open_store(family.store.path)
    model = make_model("qwen2_vl", family.made)
    with pytest.raises(InputError, match="data_collator takes single sequences, and the data holds"):
        FSDP2SFTTrainer(model=model, args=args, train_dataset=store, data_collator=list)
    with pytest.raises(InputError, match="Linear is not a transformers model"):
        FSDP2SFTTrainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=store)
    with pytest.raises(InputError, match="which does not take image_grid_thw, the features of each"):
        FSDP2SFTTrainer(model=make_model("gemma3", other_family.made), args=args, train_dataset=store)
