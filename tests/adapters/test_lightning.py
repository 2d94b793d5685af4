"""Lightning's Trainer over the data module: what comes before and after a checkpoint, and what is refused."""

import warnings

import numpy as np
import pytest
import torch

from batchloom import Edit, PlanError, StateError
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from single_settings import make_loader

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
    made = {}
    for name, documents in (("train", 200), ("val", 3)):
        rows = [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(documents)]
        made[name] = write_store(folder / name, rows)
    return made


def loader(store, micro=2, **options):
    sizes = {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": micro, "steps": STEPS}
    return make_loader(store, **{**sizes, **options})


class Learner(lightning.LightningModule):
    """Keeps what it was given."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.layer = torch.nn.Embedding(300, 1)
        self.given, self.validated, self.stop_at = [], [], stop_at

    def training_step(self, batch, number):
        self.given.append((self.trainer.global_step, batch["input_ids"].clone()))
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


def expected(store, first=0, micro=2, stop=STEPS):
    whole = loader(store)
    return [(s, part["input_ids"]) for s in range(first, stop) for part in whole[s].split(micro)]


def same(given, wanted):
    assert [step for step, _ in given] == [step for step, _ in wanted]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(given, wanted, strict=True))


def saving(folder):
    return lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)


@pytest.mark.parametrize(("before", "micro"), [(2, 2), (2, 8), (4, 1)])
def test_a_run_goes_on_with_the_step_after_the_last_trained_in_any_number_of_micro_batches(
    stores, tmp_path, before, micro
):
    data = LoaderDataModule(train=lambda: loader(stores["train"], micro=before))
    settings = {"enable_checkpointing": True, "callbacks": saving(tmp_path)}
    learner, _ = fit(data, max_steps=4, accumulate=8 // before, **settings)
    same(learner.given, expected(stores["train"], micro=before, stop=4))
    (kept,) = tmp_path.glob("*step=2.ckpt")
    data = LoaderDataModule(train=lambda: loader(stores["train"], micro=micro))
    learner, trainer = fit(data, resume=kept, accumulate=8 // micro)
    same(learner.given, expected(stores["train"], first=2, micro=micro))
    assert trainer.global_step == STEPS


def test_a_run_that_ended_goes_on_when_it_is_given_more_steps(stores, tmp_path):
    data = LoaderDataModule(train=lambda: loader(stores["train"], steps=4))
    _, trainer = fit(data, max_steps=4)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    learner, _ = fit(data, resume=tmp_path / "end.ckpt")
    same(learner.given, expected(stores["train"], first=4))


def test_validation_smaller_than_a_step_moves_nothing(stores):
    small = {"steps": None, "global_batch_size": 64}
    data = LoaderDataModule(train=lambda: loader(stores["train"]), val=lambda: loader(stores["val"], **small))
    learner, _ = fit(data, val_check_interval=8, limit_val_batches=40)
    same(learner.given, expected(stores["train"]))
    # One round of sanity, cut short, and three of validation: each from the first row on.
    assert len(learner.validated) == 2 + 3 * 32
    assert torch.equal(learner.validated[0], learner.validated[2])
    assert all((labels == -100).all() for labels in learner.validated[2 + 16 : 2 + 32])


def test_the_mean_of_lightnings_losses_is_that_of_the_trained_tokens(stores):
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    divisors = []

    class Asking(Learner):
        def training_step(self, batch, number):
            divisors.append(self.trainer.datamodule.loss_divisor)
            return super().training_step(batch, number)

    fit(data, learner=Asking(), max_steps=2)
    whole = loader(stores["train"])
    assert divisors == [whole.trained_tokens(step) / 4 for step in (0, 1) for _ in range(4)]


def test_epochs_and_steps_that_the_plan_does_not_have_are_refused(stores):
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    with pytest.raises(TrainError, match=r"max_epochs=3\) asks for epochs, which the plan already defines"):
        fit(data, max_steps=-1, max_epochs=3)
    with pytest.raises(TrainError, match=r"The plan has 6 steps, and Trainer\(max_steps=7\)"):
        fit(data, max_steps=7)
    with pytest.raises(TrainError, match=r"4 micro-batches of 2 rows .* give Trainer\(accumulate_grad_batches=4"):
        fit(data, accumulate=2)
    endless = LoaderDataModule(train=lambda: loader(stores["train"], steps=None, epochs=1))
    steps = len(endless._make_train())
    with pytest.raises(TrainError, match=f"The plan ends after {steps} steps"):
        fit(endless, max_steps=steps + 1)
    learner, _ = fit(endless, max_steps=-1, max_epochs=1)
    assert learner.trainer.global_step == steps


def test_an_edit_that_changes_the_micro_batches_of_a_later_step_is_refused_at_the_start(stores):
    edited, learner = loader(stores["train"]), Learner()
    edited.edit(Edit(step=3, global_batch_size=4))
    with pytest.raises(PlanError, match="4 passes of 2 .* 2 of 2 from step 3 on"):
        fit(LoaderDataModule(train=lambda: edited), learner=learner)
    assert not learner.given


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_loader_of_another_number_of_ranks_is_refused(stores, name):
    half = {name: lambda: loader(stores["train"], rank=0, world_size=2)}
    data = LoaderDataModule(**{"train": lambda: loader(stores["train"]), **half})
    with pytest.raises(TrainError, match="reads the share of rank 0 of 2, and world_size is 1"):
        fit(data)


def test_an_evaluation_set_that_makes_no_step_is_refused(stores):
    small = {"steps": None, "global_batch_size": 64, "last": "drop"}
    data = LoaderDataModule(train=lambda: loader(stores["train"]), val=lambda: loader(stores["val"], **small))
    with pytest.raises(TrainError, match="does not fill a step of 64 sequences"):
        fit(data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"limit_train_batches": 6},
            "limit_train_batches is 6 .*, but a step has 4 micro-batches.*Give 8",
        ),
        ({"fast_dev_run": True}, "is 1 .*, but a step has 4 micro-batches.*Give 4"),
        ({"overfit_batches": 4}, r"overfit_batches=4.* repeats the same batches"),
    ],
)
def test_what_would_train_parts_of_steps_is_refused(stores, options, said):
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    with pytest.raises(TrainError, match=said):
        fit(data, **options)


def test_whole_steps_may_be_limited(stores):
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    learner, _ = fit(data, limit_train_batches=8)
    same(learner.given, expected(stores["train"]))


def test_a_training_set_that_makes_no_step_is_refused(stores):
    few = {"steps": None, "global_batch_size": 512, "last": "drop"}
    data = LoaderDataModule(train=lambda: loader(stores["train"], **few))
    with pytest.raises(TrainError, match="training set does not fill a step of 512 sequences"):
        fit(data, max_steps=-1, max_epochs=1)


class ByHand(Learner):
    """Steps every second micro-batch."""

    automatic_optimization = False

    def training_step(self, batch, number):
        self.given.append((self.trainer.global_step, batch["input_ids"].clone()))
        self.manual_backward(self.layer(batch["input_ids"]).sum())
        if number % 2:
            self.optimizers().step()


def test_steps_that_are_not_the_plans_end_the_run(stores):
    data = LoaderDataModule(train=lambda: loader(stores["train"], micro=8))
    with pytest.raises(TrainError, match="of 2 steps were returned, and Lightning has done 0"):
        fit(data, accumulate=1, learner=ByHand())


class Validated(Learner):
    """Tells the mean loss over the trained tokens, a nat for each that is odd."""

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
    both = {
        "train": lambda: loader(stores["train"]),
        "val": lambda: loader(stores["val"], steps=None, micro=4),
    }
    learner = Validated()
    _, trainer = fit(LoaderDataModule(**both), learner=learner, val_check_interval=4)
    targets = torch.cat([row[:, 1:] for row in (loader(stores["val"], steps=None)[0]["labels"],)])
    kept = targets[targets != -100]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float((kept % 2).float().mean()))
    learner = Validated()
    learner.divides = True
    for run in (lambda data: fit(data, learner=learner), lambda data: alone(data, learner)):
        with pytest.raises(TrainError, match="loss_divisor is defined only in a training step, and the Trainer is in"):
            run(LoaderDataModule(**both))


def alone(data, learner):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(learner, data, verbose=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda kept: kept.pop("LoaderDataModule"),
            "of step 2 and holds no LoaderDataModule state",
        ),
        (
            lambda kept: kept["LoaderDataModule"].update(loader=None),
            "step 0, and Lightning at step 2",
        ),
        (
            lambda kept: kept["LoaderDataModule"].update(passes="4"),
            "has '4' for the micro-batches of a step",
        ),
    ],
)
def test_a_checkpoint_that_does_not_say_what_it_was_trained_on_is_refused(stores, tmp_path, change, said):
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    fit(data, max_steps=2, enable_checkpointing=True, callbacks=saving(tmp_path))
    (path,) = tmp_path.glob("*step=2.ckpt")
    kept = torch.load(path, weights_only=True)
    change(kept)
    if kept.get("LoaderDataModule", {"loader": 0})["loader"] is None:
        kept["LoaderDataModule"]["loader"] = loader(stores["train"]).state_at(0)
    torch.save(kept, path)
    with pytest.raises(StateError, match=said):
        fit(LoaderDataModule(train=lambda: loader(stores["train"])), resume=path)


def test_states_of_other_plans_or_inside_a_step_are_refused(stores, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = LoaderDataModule(train=lambda: loader(stores["train"]))
    fit(data, learner=Learner(stop_at=9), enable_checkpointing=True, callbacks=saving(tmp_path))
    with pytest.raises(StateError, match="after 2 of 4 micro-batches of a step"):
        fit(data, resume=tmp_path / "inside.ckpt")
    other = LoaderDataModule(train=lambda: loader(stores["train"], seed=1))
    (kept,) = tmp_path.glob("*step=2.ckpt")
    with pytest.raises(StateError, match="seed"):
        fit(other, resume=kept)
