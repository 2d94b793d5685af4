"""Hugging Face's Trainer on stores with images and audio."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import batchloom
from adapters.hf_runs import MEDIA_RANK_SIZES, MEDIA_STEPS as STEPS, InputRecordingTrainer, get_losses, make_args
from batchloom import SettingsError
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.adapters.hugging_face.trainer_objects import _find_media_problems
from batchloom.batches import add_image_masks
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw
from media.models import MODELS, TEXT_WINDOW, make_model, select_model_inputs
from processes import make_rank_environments, start_processes
from train.families import Families

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
SIZES = {"seq_len": 320, "global_batch_size": 2}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def make_trainer(family, name, folder, form=None, loader=None, model=None, **settings):
    loader = loader or batchloom.Loader(family.store, **SIZES, steps=STEPS, rank=0, world_size=1)
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = make_args(folder, **{**sizes, "max_steps": STEPS, **settings})
    parts = make_trainer_parts(loader, args, form=form)
    model = model or make_model(name, family.made)
    return InputRecordingTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), 0.01), None),
    )


def train_with_torch(family, name, form, steps):
    """Return the losses of a plain loop over the same batches."""
    model = make_model(name, family.made)
    optimizer = adamw(model.parameters(), 0.01)
    loader = batchloom.Loader(family.store, **SIZES, steps=steps, rank=0, world_size=1)
    losses = []
    for batch in loader:
        count = (batch["labels"][:, 1:] != -100).sum()
        total = 0.0
        for part in batch.split(1):
            inputs = dict(part if form is None else form(part))
            labels = inputs.pop("labels")
            scores = model(**inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                scores[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += loss.item() / count.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


FORMS = {"gemma3": partial(add_image_masks, sliding_window=TEXT_WINDOW)}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("llava", 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma3", 1), ("qwen2_vl", 1), ("qwen2_audio", 0))),
    ],
)
def test_a_trainer_trains_on_the_batches_with_their_media(families, tmp_path, name, workers):
    family, form = families[name], FORMS.get(name)
    trainer = make_trainer(family, name, tmp_path, form, dataloader_num_workers=workers)
    trainer.train()
    in_segments = "memfd:batchloom-batch" in Path("/proc/self/maps").read_text()
    assert in_segments == bool(workers)
    loader = batchloom.Loader(family.store, **SIZES, steps=STEPS, rank=0, world_size=1)
    micro_batches = [part for step in range(STEPS) for part in loader[step].split(1)]
    assert len(trainer.recorded) == len(micro_batches)
    features = set()
    for actual, part in zip(trainer.recorded, micro_batches, strict=True):
        expected = dict(part if form is None else form(part))
        assert actual.keys() >= expected.keys() - {"labels"}
        for key, value in expected.items():
            if key != "labels" and isinstance(value, torch.Tensor):
                assert torch.equal(actual[key], value), key
        features |= actual.keys() & {"pixel_values", "input_features"}
    assert features
    assert list(get_losses(trainer).values()) == pytest.approx(train_with_torch(family, name, form, STEPS), rel=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("llava", "gemma3") else pytest.mark.slow) for name in MODELS]
)
def test_the_cache_is_off_in_the_language_model_too(families, tmp_path, name):
    """Evaluation without training calls no callback before its first batch."""
    family, loader = (
        families[name],
        batchloom.Loader(families[name].store, **SIZES, rank=0, world_size=1),
    )
    assert make_model(name, family.made).config.get_text_config().use_cache
    trainer = make_trainer(family, name, tmp_path, FORMS.get(name))
    batch = select_model_inputs(name, loader[0])
    with torch.no_grad():
        actual = trainer.model(**batch)
        expected = trainer.model(**batch, use_cache=False)
    assert actual.past_key_values is None
    assert torch.equal(actual.logits, expected.logits)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_same_media(families, tmp_path):
    family = families["qwen2_vl"]
    full_run = make_trainer(family, "qwen2_vl", tmp_path / "whole", save_steps=2)
    full_run.train()
    checkpoint = str(tmp_path / "whole/checkpoint-2")
    resumed = make_trainer(family, "qwen2_vl", tmp_path / "later", save_steps=2)
    # transformers 5.23 does not load the weights that this model writes into its checkpoints.
    with pytest.raises(TrainError, match="does not have the weights of its checkpoint of step 2"):
        resumed.train(resume_from_checkpoint=checkpoint)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(checkpoint)
    resumed = make_trainer(family, "qwen2_vl", tmp_path / "again", model=model, save_steps=2)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert get_losses(resumed) == get_losses(full_run)
    assert len(resumed.recorded) == 2 * 2


def test_a_model_whose_documents_see_each_other_is_refused(families, tmp_path):
    with pytest.raises(TrainError, match="lets packed documents see each other"):
        make_trainer(families["gemma3"], "gemma3", tmp_path).train()


@pytest.mark.slow
def test_a_model_of_other_media_is_refused(families, tmp_path):
    family = families["qwen2_audio"]
    trainer = make_trainer(family, "qwen2_audio", tmp_path)
    trainer.model = make_model("llava", families["llava"].made)
    with pytest.raises(TrainError, match="does not take feature_attention_mask, input_features"):
        trainer.train()


def test_settings_that_do_not_go_with_media_are_reported_at_once(families, tmp_path):
    family = families["llava"]
    varlen = batchloom.Loader(family.store, **SIZES, steps=STEPS, form="varlen", rank=0, world_size=1)
    with pytest.raises(SettingsError, match="with images or audio give form='rows'"):
        make_trainer(family, "llava", tmp_path, loader=varlen)
    loader = batchloom.Loader(family.store, **SIZES, rank=0, world_size=1)
    args = {"world_size": 2, "deepspeed": None, "fsdp": [], "gradient_checkpointing": False}

    def find_problems(**settings):
        arguments = {**args, "ddp_find_unused_parameters": None, **settings}
        return _find_media_problems(SimpleNamespace(**arguments), loader, "loader")

    assert find_problems() == find_problems(ddp_find_unused_parameters=True) == []
    assert find_problems(world_size=1, fsdp=["full_shard"]) == []
    (fsdp_problem,) = find_problems(fsdp=["full_shard"])
    assert fsdp_problem.startswith("fsdp: sharded layers wait")
    (deepspeed_problem,) = find_problems(deepspeed={"zero": 3})
    assert deepspeed_problem.startswith("deepspeed: sharded layers")
    for settings in ({"ddp_find_unused_parameters": False}, {"gradient_checkpointing": True}):
        (ddp_problem,) = find_problems(**settings)
        assert ddp_problem.startswith("ddp_find_unused_parameters: ")


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_media_train_as_one(families, tmp_path):
    family = families["llava"]
    loaders = [batchloom.Loader(family.store, **MEDIA_RANK_SIZES, rank=rank, world_size=2) for rank in (0, 1)]
    has_media = [["pixel_values" in loader.batch(step) for loader in loaders] for step in range(STEPS)]
    assert {True, False} in map(set, has_media)
    worker = Path(__file__).with_name("hf_media_worker.py")
    args = [worker, family.store.path, family.folder, tmp_path / "two"]
    with start_processes(*args, environments=make_rank_environments()[:1]) as (process,):
        result = process.wait()
    assert result.returncode == 0, result.stderr
    two_rank_losses = json.loads((tmp_path / "two/losses.json").read_text())
    loader = batchloom.Loader(family.store, **MEDIA_RANK_SIZES, steps=STEPS, rank=0, world_size=1)
    one_rank_trainer = make_trainer(family, "llava", tmp_path / "one", loader=loader, gradient_accumulation_steps=4)
    one_rank_trainer.train()
    assert two_rank_losses == pytest.approx(list(get_losses(one_rank_trainer).values()), rel=1e-3)
