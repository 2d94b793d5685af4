"""Lightning's Trainer over the data module: batches, resume and refusals."""

import warnings

import numpy as np
import pytest
import torch

import batchloom
from batchloom import Edit, PlanError, StateError
from batchloom.core.errors import TrainError
from batchloom.testing import write_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from batchloom.adapters.lightning import LoaderDataModule

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("data")
    opened = {}
    for name, documents in (("train", 200), ("val", 3)):
        rows = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(documents)]
        opened[name] = write_store(folder / name, rows)
    return opened


def build_loader(store, micro=2, **options):
    sizes = {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": micro, "steps": STEPS}
    return batchloom.Loader(store, **{**sizes, **options})


class Learner(lightning.LightningModule):
    """Module that records its batches."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.layer = torch.nn.Embedding(300, 1)
        self.batches, self.validated, self.stop_at = [], [], stop_at

    def training_step(self, batch, number):
        self.batches.append((self.trainer.global_step, batch["input_ids"].clone()))
        if self.stop_at == number:
            self.trainer.save_checkpoint("inside.ckpt")
        return self.layer(batch["input_ids"]).sum() / self.trainer.datamodule.loss_divisor

    def validation_step(self, batch, number):
        self.validated.append(batch["labels"].clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data, resume=None, learner=None, accumulate=4, **options):
    settings = {
        "max_steps": STEPS,
        "num_sanity_val_steps": 2,
        "accumulate_grad_batches": accumulate,
    }
    learner = learner or Learner()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **settings, **options},
    )
    trainer.fit(learner, data, ckpt_path=resume, weights_only=True)
    return learner, trainer


def list_expected_batches(store, first=0, micro=2, stop=STEPS):
    loader = build_loader(store)
    return [(s, part["input_ids"]) for s in range(first, stop) for part in loader[s].split(micro)]


def assert_same_batches(actual, expected):
    assert [step for step, _ in actual] == [step for step, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(actual, expected, strict=True))


def make_checkpointing(folder):
    return lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)


@pytest.mark.parametrize(("before", "micro"), [(2, 2), (2, 8), (4, 1)])
def test_a_run_goes_on_with_the_step_after_the_last_trained_in_any_number_of_micro_batches(
    stores, tmp_path, before, micro
):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"], micro=before))
    settings = {"enable_checkpointing": True, "callbacks": make_checkpointing(tmp_path)}
    learner, _ = fit(data, max_steps=4, accumulate=8 // before, **settings)
    assert_same_batches(learner.batches, list_expected_batches(stores["train"], micro=before, stop=4))
    (checkpoint,) = tmp_path.glob("*step=2.ckpt")
    data = LoaderDataModule(train=lambda: build_loader(stores["train"], micro=micro))
    learner, trainer = fit(data, resume=checkpoint, accumulate=8 // micro)
    assert_same_batches(learner.batches, list_expected_batches(stores["train"], first=2, micro=micro))
    assert trainer.global_step == STEPS


def test_a_run_that_ended_goes_on_when_it_is_given_more_steps(stores, tmp_path):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"], steps=4))
    _, trainer = fit(data, max_steps=4)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    learner, _ = fit(data, resume=tmp_path / "end.ckpt")
    assert_same_batches(learner.batches, list_expected_batches(stores["train"], first=4))


def test_validation_smaller_than_a_step_moves_nothing(stores):
    small = {"steps": None, "global_batch_size": 64}
    data = LoaderDataModule(
        train=lambda: build_loader(stores["train"]), val=lambda: build_loader(stores["val"], **small)
    )
    learner, _ = fit(data, val_check_interval=8, limit_val_batches=40)
    assert_same_batches(learner.batches, list_expected_batches(stores["train"]))
    # A shortened sanity check and three validations, each from the first row.
    assert len(learner.validated) == 2 + 3 * 32
    assert torch.equal(learner.validated[0], learner.validated[2])
    assert all((labels == -100).all() for labels in learner.validated[2 + 16 : 2 + 32])


def test_the_mean_of_lightnings_losses_is_that_of_the_trained_tokens(stores):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    divisors = []

    class DivisorLearner(Learner):
        def training_step(self, batch, number):
            divisors.append(self.trainer.datamodule.loss_divisor)
            return super().training_step(batch, number)

    fit(data, learner=DivisorLearner(), max_steps=2)
    loader = build_loader(stores["train"])
    assert divisors == [loader.trained_tokens(step) / 4 for step in (0, 1) for _ in range(4)]


def test_epochs_and_steps_that_the_plan_does_not_have_are_refused(stores):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    with pytest.raises(TrainError, match=r"max_epochs=3\) asks for epochs, which the plan already defines"):
        fit(data, max_steps=-1, max_epochs=3)
    with pytest.raises(TrainError, match=r"The plan has 6 steps, and Trainer\(max_steps=7\)"):
        fit(data, max_steps=7)
    with pytest.raises(TrainError, match=r"4 micro-batches of 2 rows .* give Trainer\(accumulate_grad_batches=4"):
        fit(data, accumulate=2)
    endless = LoaderDataModule(train=lambda: build_loader(stores["train"], steps=None, epochs=1))
    steps = len(endless._make_train())
    with pytest.raises(TrainError, match=f"The plan ends after {steps} steps"):
        fit(endless, max_steps=steps + 1)
    learner, _ = fit(endless, max_steps=-1, max_epochs=1)
    assert learner.trainer.global_step == steps


def test_an_edit_that_changes_the_micro_batches_of_a_later_step_is_refused_at_the_start(stores):
    edited, learner = build_loader(stores["train"]), Learner()
    edited.edit(Edit(step=3, global_batch_size=4))
    with pytest.raises(PlanError, match="4 passes of 2 .* 2 of 2 from step 3 on"):
        fit(LoaderDataModule(train=lambda: edited), learner=learner)
    assert not learner.batches


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_loader_of_another_number_of_ranks_is_refused(stores, name):
    rank_loader = {name: lambda: build_loader(stores["train"], rank=0, world_size=2)}
    data = LoaderDataModule(**{"train": lambda: build_loader(stores["train"]), **rank_loader})
    with pytest.raises(TrainError, match="reads the share of rank 0 of 2, and world_size is 1"):
        fit(data)


def test_an_evaluation_set_that_makes_no_step_is_refused(stores):
    small = {"steps": None, "global_batch_size": 64, "last": "drop"}
    data = LoaderDataModule(
        train=lambda: build_loader(stores["train"]), val=lambda: build_loader(stores["val"], **small)
    )
    with pytest.raises(TrainError, match="does not fill a step of 64 sequences"):
        fit(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"limit_train_batches": 6},
            "limit_train_batches is 6 .*, but a step has 4 micro-batches.*Give 8",
        ),
        ({"fast_dev_run": True}, "is 1 .*, but a step has 4 micro-batches.*Give 4"),
        ({"overfit_batches": 4}, r"overfit_batches=4.* repeats the same batches"),
    ],
)
def test_what_would_train_parts_of_steps_is_refused(stores, options, message):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    with pytest.raises(TrainError, match=message):
        fit(data, **options)


def test_whole_steps_may_be_limited(stores):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    learner, _ = fit(data, limit_train_batches=8)
    assert_same_batches(learner.batches, list_expected_batches(stores["train"]))


def test_a_training_set_that_makes_no_step_is_refused(stores):
    options = {"steps": None, "global_batch_size": 512, "last": "drop"}
    data = LoaderDataModule(train=lambda: build_loader(stores["train"], **options))
    with pytest.raises(TrainError, match="training set does not fill a step of 512 sequences"):
        fit(data, max_steps=-1, max_epochs=1)


class ManualLearner(Learner):
    """Module that steps every second micro-batch."""

    automatic_optimization = False

    def training_step(self, batch, number):
        self.batches.append((self.trainer.global_step, batch["input_ids"].clone()))
        self.manual_backward(self.layer(batch["input_ids"]).sum())
        if number % 2:
            self.optimizers().step()


def test_steps_that_are_not_the_plans_end_the_run(stores):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"], micro=8))
    with pytest.raises(TrainError, match="of 2 steps were returned, and Lightning has done 0"):
        fit(data, accumulate=1, learner=ManualLearner())


class ValidatingLearner(Learner):
    """Module that logs the mean loss per trained token: 1 for odd tokens, else 0."""

    divides = False

    def validation_step(self, batch, number):
        if self.divides:
            return self.trainer.datamodule.loss_divisor
        targets = batch["labels"][:, 1:]
        trained = (targets != -100).sum()
        loss = ((targets != -100) & (targets % 2 == 1)).sum() / trained.clamp(min=1)
        self.log("val_loss", loss.float(), batch_size=int(trained), sync_dist=True)
        return loss


def test_the_loss_of_a_validation_is_that_of_its_tokens_and_not_divided_by_a_training_steps(stores):
    loaders = {
        "train": lambda: build_loader(stores["train"]),
        "val": lambda: build_loader(stores["val"], steps=None, micro=4),
    }
    learner = ValidatingLearner()
    _, trainer = fit(LoaderDataModule(**loaders), learner=learner, val_check_interval=4)
    targets = torch.cat([row[:, 1:] for row in (build_loader(stores["val"], steps=None)[0]["labels"],)])
    trained_targets = targets[targets != -100]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float((trained_targets % 2).float().mean()))
    learner = ValidatingLearner()
    learner.divides = True
    for run in (lambda data: fit(data, learner=learner), lambda data: validate(data, learner)):
        with pytest.raises(TrainError, match="loss_divisor is defined only in a training step, and the Trainer is in"):
            run(LoaderDataModule(**loaders))


def validate(data, learner):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(learner, data, verbose=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda checkpoint: checkpoint.pop("LoaderDataModule"),
            "of step 2 and holds no LoaderDataModule state",
        ),
        (
            lambda checkpoint: checkpoint["LoaderDataModule"].update(loader=None),
            "step 0, and Lightning at step 2",
        ),
        (
            lambda checkpoint: checkpoint["LoaderDataModule"].update(passes="4"),
            "has '4' for the micro-batches of a step",
        ),
    ],
)
def test_a_checkpoint_that_does_not_say_what_it_was_trained_on_is_refused(stores, tmp_path, change, message):
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    fit(data, max_steps=2, enable_checkpointing=True, callbacks=make_checkpointing(tmp_path))
    (path,) = tmp_path.glob("*step=2.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    if checkpoint.get("LoaderDataModule", {"loader": 0})["loader"] is None:
        checkpoint["LoaderDataModule"]["loader"] = build_loader(stores["train"]).state_at(0)
    torch.save(checkpoint, path)
    with pytest.raises(StateError, match=message):
        fit(LoaderDataModule(train=lambda: build_loader(stores["train"])), resume=path)


def test_states_of_other_plans_or_inside_a_step_are_refused(stores, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = LoaderDataModule(train=lambda: build_loader(stores["train"]))
    fit(data, learner=Learner(stop_at=9), enable_checkpointing=True, callbacks=make_checkpointing(tmp_path))
    with pytest.raises(StateError, match="after 2 of 4 micro-batches of a step"):
        fit(data, resume=tmp_path / "inside.ckpt")
    other_seed = LoaderDataModule(train=lambda: build_loader(stores["train"], seed=1))
    (checkpoint,) = tmp_path.glob("*step=2.ckpt")
    with pytest.raises(StateError, match="seed"):
        fit(other_seed, resume=checkpoint)
