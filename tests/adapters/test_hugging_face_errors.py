"""Hugging Face settings and models that would silently violate the plan."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from batchloom import Edit, SettingsError, StateError
from batchloom.batches import add_dense_mask
from batchloom.core.errors import MissingDependencyError, TrainError
from batchloom.examples.job import tiny_model
from batchloom.testing import write_store

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from transformers import TrainerCallback

from adapters.hf_runs import make_args
from adapters.test_hugging_face import make_loader, make_trainer
from batchloom.adapters import requirements
from batchloom.adapters.hugging_face import make_trainer_parts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(8)
    documents = [rng.integers(0, 250, rng.integers(2, 40)).tolist() for _ in range(150)]
    return write_store(tmp_path_factory.mktemp("hf") / "store", {"train": documents, "val": [[1, 2, 3]]})


class EditingCallback(TrainerCallback):
    def __init__(self, loader):
        self.loader = loader

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            self.loader.edit(Edit(step=3, seq_len=16))


def test_an_edit_during_training_is_refused_and_goes_on_from_a_checkpoint(store, tmp_path):
    loader = make_loader(store)
    trainer = make_trainer(store, tmp_path, loader=loader)
    trainer.add_callback(EditingCallback(loader))
    with pytest.raises(TrainError, match="has 1 edit and had 0 when training began"):
        trainer.train()
    resumed_loader = make_loader(store)
    resumed_loader.edit(Edit(step=3, seq_len=16))
    trainer = make_trainer(store, tmp_path, loader=resumed_loader)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lengths = [batch["input_ids"].shape[1] for batch in trainer.recorded]
    assert lengths == [32] * 4 + [16] * 12


def test_sizes_that_change_behind_the_parts_are_refused(store, tmp_path):
    trainer = make_trainer(store, tmp_path)
    trainer.args.per_device_train_batch_size = 4
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(TrainError, match="4 rows x gradient_accumulation_steps 2, and .* 2 x 4"):
        trainer.train()


def test_sets_that_make_no_step_are_refused(store, tmp_path):
    args = make_args(tmp_path, per_device_eval_batch_size=8, max_steps=-1, num_train_epochs=1)
    empty_loader = make_loader(store.subset("val"), steps=None, last="drop")
    for loaders in ({"loader": empty_loader}, {"loader": make_loader(store), "evaluation": empty_loader}):
        with pytest.raises(SettingsError, match="documents do not fill a step of 8 sequences.*'fill'"):
            make_trainer_parts(args=args, **loaders)


def test_a_trl_that_is_too_old_is_named(store, tmp_path, monkeypatch):
    args = make_args(tmp_path, kind=trl.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True})
    original_version = requirements.get_installed_version
    monkeypatch.setattr(
        requirements,
        "get_installed_version",
        lambda name: "0.9.0" if name == "trl" else original_version(name),
    )
    with pytest.raises(MissingDependencyError, match=r"trl 0\.9\.0 is installed and >=1\.0"):
        make_trainer_parts(make_loader(store), args)


class PlainOutputModel(torch.nn.Module):
    """Model that returns a dict or a tuple instead of an object with logits."""

    def __init__(self, model, kind):
        super().__init__()
        self.model, self.config, self.kind = model, model.config, kind

    def forward(self, input_ids, position_ids=None, labels=None):
        scores = self.model(input_ids, position_ids=position_ids, use_cache=False).logits
        return {"logits": scores} if self.kind is dict else (scores,)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_models_may_return_their_scores_in_a_dict_or_first(store, tmp_path, kind):
    make_trainer(store, tmp_path, model=PlainOutputModel(tiny_model(store), kind), max_steps=1).train()


def test_weights_that_are_not_finite_are_reported(store, tmp_path):
    model = tiny_model(store)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(TrainError, match="losses that are not finite before its first step"):
        make_trainer(store, tmp_path, model=model).train()


def test_a_state_that_holds_nothing_is_refused(store, tmp_path):
    make_trainer(store, tmp_path, max_steps=2).train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["PlanState"]["attributes"] = None
    path.write_text(json.dumps(state))
    with pytest.raises(StateError, match="holds no loader state"):
        make_trainer(store, tmp_path).train(resume_from_checkpoint=True)


def test_eager_attention_requires_an_additive_mask(store, tmp_path):
    model = tiny_model(store)
    model.set_attn_implementation("eager")
    args = make_args(tmp_path, max_steps=1)
    parts = make_trainer_parts(make_loader(store), args, form=add_dense_mask)
    with pytest.raises(TrainError, match=r"partial\(add_dense_mask, additive='float32'\)"):
        make_trainer(store, tmp_path, model=model, parts=parts).train()
    parts = make_trainer_parts(make_loader(store), args, form=partial(add_dense_mask, additive="float32"))
    make_trainer(store, tmp_path, model=model, parts=parts).train()
