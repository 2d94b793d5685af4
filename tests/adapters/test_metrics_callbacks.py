"""Metrics callbacks of trainers: each step of all ranks is counted once."""

import warnings

import numpy as np
import pytest
import torch

import batchloom
from batchloom.adapters.logging import send_to_tensorboard
from batchloom.batches import Meter, transformer_cost
from batchloom.core.errors import TrainError
from batchloom.examples.job import tiny_model
from batchloom.testing import write_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    transformers = pytest.importorskip("transformers")
    from batchloom.adapters import MetricsCallback
    from batchloom.adapters.hugging_face import make_trainer_parts
    from batchloom.adapters.lightning import (
        LightningMetricsCallback,
        LoaderDataModule,
    )

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6
COMPARED_METRICS = ("perf/steps", "perf/tokens", "perf/packing_efficiency", "data/step", "data/data/epoch")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(6)
    documents = [rng.integers(0, 256, rng.integers(2, 40)).tolist() for _ in range(150)]
    held_out = [rng.integers(0, 256, 9).tolist() for _ in range(8)]
    return write_store(tmp_path_factory.mktemp("figures") / "store", {"train": documents, "val": held_out})


def make_loader(store, **settings):
    sizes = {
        "seq_len": 32,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "steps": STEPS,
    }
    return batchloom.Loader(store, **{**sizes, **settings}, rank=0, world_size=1)


def compute_expected_metrics(store, interval):
    """Return the metrics that a plain loop sends, by step."""
    loader, sent = make_loader(store), {}
    meter = Meter(loader)
    for step in range(STEPS):
        meter.step(step)
        if (step + 1) % interval == 0:
            sent[step + 1] = meter.metrics()
    return sent


def select_compared(sent):
    return {step: {name: metrics[name] for name in COMPARED_METRICS} for step, metrics in sent.items()}


def train_hugging_face(store, folder, send, resume=None, **settings):
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": STEPS, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1} | settings,
    )
    loader = make_loader(store)
    parts = make_trainer_parts(loader, args, evaluation=make_loader(store.subset("val"), steps=None))
    trainer = transformers.Trainer(
        tiny_model(store),
        args,
        train_dataset=parts.dataset,
        eval_dataset=parts.eval_dataset,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        callbacks=[parts.callback, MetricsCallback(Meter(loader), send)],
    )
    trainer.train(resume_from_checkpoint=resume)


def test_a_hugging_face_trainer_sends_metrics_when_it_logs_and_after_a_resume(store, tmp_path):
    sent = {}
    train_hugging_face(store, tmp_path, lambda metrics, step: sent.update({step: metrics}))
    assert select_compared(sent) == select_compared(compute_expected_metrics(store, interval=2))
    resumed = {}
    train_hugging_face(
        store,
        tmp_path,
        lambda metrics, step: resumed.update({step: metrics}),
        resume=str(tmp_path / "checkpoint-2"),
    )
    assert select_compared(resumed) == {step: values for step, values in select_compared(sent).items() if step > 2}


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(300, 1)

    def training_step(self, batch, number):
        return self.layer(batch["input_ids"]).sum() / 1000

    def validation_step(self, batch, number):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data, callback, folder, **settings):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        check_val_every_n_epoch=None,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callback,
        default_root_dir=folder,
        **{"val_check_interval": 2, "log_every_n_steps": 3, "logger": False} | settings,
    )
    trainer.fit(Learner(), data)


def test_lightning_sends_metrics_every_n_steps(store, tmp_path):
    sent = {}
    data = LoaderDataModule(
        train=lambda: make_loader(store),
        val=lambda: make_loader(store.subset("val"), steps=None),
    )
    cost = transformer_cost(parameters=1000, layers=1, width=8)
    callback = LightningMetricsCallback(
        lambda loader: Meter(loader, cost=cost, peak_flops=1e9),
        lambda metrics, step: sent.update({step: metrics}),
    )
    fit(data, callback, tmp_path)
    assert select_compared(sent) == select_compared(compute_expected_metrics(store, interval=3))
    assert all(values["perf/mfu"] > 0 for values in sent.values())


def test_lightning_has_loggers_of_its_own(store, tmp_path):
    loggers = [lightning.loggers.CSVLogger(tmp_path), lightning.loggers.TensorBoardLogger(tmp_path)]
    data = LoaderDataModule(train=lambda: make_loader(store))
    fit(data, LightningMetricsCallback(), tmp_path, logger=loggers)
    table = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "perf/global_seq_len_max" in table.splitlines()[0]
    assert len(table.splitlines()) == 3
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_other_data_modules_are_refused(store, tmp_path):
    rows = torch.utils.data.DataLoader(make_loader(store)[0]["input_ids"], batch_size=4)
    plain = lightning.LightningDataModule.from_datasets(rows.dataset)
    with pytest.raises(TrainError, match="datamodule is a LightningDataModule"):
        fit(plain, LightningMetricsCallback(), tmp_path, val_check_interval=None)


def test_tensorboard_receives_metrics_by_name(store, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train_hugging_face(store, tmp_path / "out", send_to_tensorboard(writer), max_steps=2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("perf/tokens")
    assert (event.step, event.value) == (2, compute_expected_metrics(store, interval=2)[2]["perf/tokens"])
