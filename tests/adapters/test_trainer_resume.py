"""Resume after any step in each trainer, with and without prefetching."""

import importlib.util
import re
import shutil
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from adapters.small_stores import make_small_store
from analysis.compare.warm_examples import run_warm
from batchloom import SettingsError, StateError
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.adapters.accelerate import attach, load_newest_checkpoint, save_checkpoint
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.analysis.compare import FRAMEWORKS, BatchWitness, iter_expected_entries
from batchloom.examples.job import adamw, tiny_model

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    from batchloom.adapters.lightning import LoaderDataModule

from batchloom.adapters.hugging_face import make_trainer_parts

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch warns of few cores, Lightning of few workers, and both of the missing GPU.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STEPS = 7
SIZES = {"seq_len": 64, "global_batch_size": 4, "steps": STEPS}
NUMBER = re.compile(r"(?:step[_=]|checkpoint-)(\d+)(?:\.ckpt|\.pt)?$")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture(scope="module")
def planned_hashes(store):
    """Expected hash of each step, see ``batchloom.analysis.compare``."""
    return [entry["hash"] for entry in iter_expected_entries(make_loader(store), STEPS)]


def make_loader(store, **options):
    return batchloom.Loader(store, **SIZES, micro_batch_size=2, rank=0, world_size=1, **options)


def copy_until_step(folder, target, step):
    """Copy a run's folder without the checkpoints of steps after ``step``."""
    shutil.copytree(folder, target)
    for path in sorted(target.iterdir()):
        if (match := NUMBER.search(path.name)) and int(match[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return target


def train_hugging_face(store, folder, resume, workers, kind=transformers.TrainingArguments):
    fetching = {
        "dataloader_num_workers": workers,
        "dataloader_prefetch_factor": 3 if workers else None,
        "dataloader_persistent_workers": bool(workers),
    }
    sft_options = {}
    if kind is trl.SFTConfig:
        sft_options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
    args = kind(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        save_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        **fetching,
        **sft_options,
    )
    parts, model = make_trainer_parts(make_loader(store), args), tiny_model(store)
    trainer_options = {
        "train_dataset": parts.dataset,
        "data_collator": parts.collator,
        "callbacks": [parts.callback],
        "optimizers": (adamw(model.parameters(), 1e-3), None),
    }
    if kind is trl.SFTConfig:
        trainer = trl.SFTTrainer(model, args, processing_class=make_tokenizer(), **trainer_options)
    else:
        trainer = transformers.Trainer(model, args, compute_loss_func=parts.loss, **trainer_options)
    witness = BatchWitness(model)
    trainer.train(resume_from_checkpoint=resume)
    return witness.end()


def make_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<end>": 0})))


def train_sft(store, folder, resume, workers):
    return train_hugging_face(store, folder, resume, workers, trl.SFTConfig)


def train_fsdp2(store, folder, resume, _workers):
    args = FSDP2Arguments(
        output_dir=str(folder),
        max_length=64,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=1,
        seed=0,
        use_cpu=True,
    )
    model = tiny_model(store)
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=store)
    witness = BatchWitness(model)
    trainer.train(resume_from_checkpoint=resume)
    return witness.end()


class Learner(lightning.LightningModule):
    def __init__(self, store):
        super().__init__()
        self.model = tiny_model(store)

    def training_step(self, batch, _number):
        count = self.trainer.datamodule.loss_divisor
        return self.model(**batch, use_cache=False, num_items_in_batch=count).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def make_lightning(folder, **settings):
    """A Trainer that saves a checkpoint after every step."""
    saving = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=STEPS,
        callbacks=saving,
        **settings,
    )


def train_lightning(store, folder, resume, prefetch):
    learner = Learner(store)
    data = LoaderDataModule(train=lambda: make_loader(store, prefetch=prefetch))
    witness = BatchWitness(learner.model)
    trainer = make_lightning(folder, accumulate_grad_batches=2)
    trainer.fit(learner, data, ckpt_path=find_newest_checkpoint(folder) if resume else None, weights_only=True)
    return witness.end()


def find_newest_checkpoint(folder):
    return max(folder.glob("*.ckpt"), key=lambda path: int(NUMBER.search(path.name)[1]))


def train_accelerate(store, folder, resume, workers):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, model = make_loader(store), tiny_model(store)
    learner, optimizer = accelerator.prepare(model, adamw(model.parameters(), 1e-3))
    attach(accelerator, loader)
    if resume:
        load_newest_checkpoint(accelerator, folder)
    # Created after the state is loaded. With workers=None the data is the loader itself.
    data = loader
    if workers is not None:
        data = DataLoader(
            LoaderIterable(loader),
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=3 if workers else None,
        )
    witness = BatchWitness(model)
    for batch in data:
        for part in batch.split(2):
            with accelerator.accumulate(learner):
                accelerator.backward(learner(**part, use_cache=False).loss)
                optimizer.step()
                optimizer.zero_grad()
        save_checkpoint(accelerator, folder, batch.step + 1)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return witness.end()


# Each with its modes of fetching: workers of a DataLoader (None: the loader itself), for Lightning the
# prefetched steps of the loader. The first mode is in the fast tier,
# after one of the steps.
TRAINERS = {
    "hf-trainer": (train_hugging_face, (2, 0)),
    "trl-sft": (train_sft, (2, 0)),
    "fsdp2-trainer": (train_fsdp2, (0,)),
    "lightning": (train_lightning, (4, 0)),
    "accelerate": (train_accelerate, (2, 0, None)),
}


FAST_STEPS = (4,)


@pytest.mark.parametrize(
    ("train", "fetching", "steps"),
    [
        *(
            pytest.param(train, modes[0], FAST_STEPS, id=f"{name}-{modes[0]}")
            for name, (train, modes) in TRAINERS.items()
            if name != "trl-sft"
        ),
        *(
            pytest.param(train, fetching, range(1, STEPS), id=f"{name}-{fetching}-all", marks=pytest.mark.slow)
            for name, (train, modes) in TRAINERS.items()
            for fetching in modes
        ),
    ],
)
def test_a_trainer_goes_on_after_any_step(store, planned_hashes, tmp_path, train, fetching, steps):
    entries = train(store, tmp_path / "run", None, fetching)
    assert [entry["hash"] for entry in entries] == planned_hashes
    for step in steps:
        folder = copy_until_step(tmp_path / "run", tmp_path / f"after-{step}", step)
        entries = train(store, folder, True, fetching)
        assert [entry["hash"] for entry in entries] == planned_hashes[step:], step


EXAMPLES = [framework for framework in FRAMEWORKS if framework.name in ("pytorch", "megatron", "fsdp2", "deepspeed")]


@pytest.mark.slow
@pytest.mark.parametrize("framework", EXAMPLES, ids=lambda example: example.name)
def test_an_example_goes_on_after_any_step(store, planned_hashes, tmp_path, framework):
    job = {"data": str(store.path), **SIZES, "save_every": 1}
    run = tmp_path / "run"
    record = run_warm(framework.name, {**job, "out": str(run)}, tmp_path / "record")
    assert [entry["hash"] for entry in record.ranks[0]] == planned_hashes
    for step in range(1, STEPS):
        out = copy_until_step(run, tmp_path / f"after-{step}", step)
        if framework.name == "deepspeed":
            (out / "latest").write_text(f"checkpoint-{step}")
        resumed = {**job, "out": str(out), "resume": True}
        record = run_warm(framework.name, resumed, tmp_path / f"record-{step}")
        assert record.first == step
        assert [entry["hash"] for entry in record.ranks[0]] == planned_hashes[step:]


def check_received(loader, batch, store, step, *, known):
    """Check the state after a received batch: correct, or refused with its remedy."""
    assert batch.step == step
    expected = make_loader(store).state_at(step + 1)
    if known:
        assert loader.state_dict() == expected
    else:
        with pytest.raises(StateError, match=r"Take loader.state_at\(batch.step \+ 1\)"):
            loader.state_dict()
    assert loader.state_at(step + 1) == expected


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_accelerate_fetches_ahead_hides_the_state(store, accelerator, dataset_class, workers):
    """Its prepared DataLoader reads one batch before it returns the previous one."""
    loader = make_loader(store)
    data = DataLoader(dataset_class(loader), batch_size=None, num_workers=workers)
    prepared = accelerate.data_loader.prepare_data_loader(data, dispatch_batches=False)
    for step, batch in enumerate(prepared):
        check_received(loader, batch.to("cpu"), store, step, known=False)
    assert step == STEPS - 1
    # Without prepare it reads no batch ahead.
    loader = make_loader(store)
    for step, batch in enumerate(DataLoader(dataset_class(loader), batch_size=None)):
        check_received(loader, batch, store, step, known=dataset_class is LoaderIterable)


def test_the_step_of_a_batch_that_accelerate_rebuilds_is_no_step(store, accelerator):
    """Its dispatcher rebuilds batches of an iterable dataset from their arrays."""
    loader = make_loader(store)
    for batch in accelerator.prepare(DataLoader(LoaderIterable(loader), batch_size=None)):
        with pytest.raises(StateError, match="does not know which of them the training loop"):
            loader.state_dict()
        with pytest.raises(SettingsError, match="does not know its step: count the trained steps"):
            loader.state_at(batch.step + 1)


class CheckingModule(lightning.LightningModule):
    def __init__(self, loader, store, known):
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(1, 1), []
        self.loader, self.store, self.known = loader, store, known

    def training_step(self, batch, _number):
        check_received(self.loader, batch, self.store, self.trainer.global_step, known=self.known)
        self.steps.append(batch.step)
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("name", "known"), [("loader", True), ("iterable", False), ("workers", False)])
def test_what_lightning_fetches_ahead_hides_the_state(store, tmp_path, name, known):
    """For data without a length it reads one batch ahead to find the last one."""
    loader = make_loader(store)
    data = loader
    if name != "loader":
        workers = 1 if name == "workers" else 0
        data = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=workers)
    learner = CheckingModule(loader, store, known)
    make_lightning(tmp_path).fit(learner, data)
    assert learner.steps == list(range(STEPS))


def test_the_modules_that_fetch_ahead_exist():
    """A version that moves them would give a state one batch too late."""
    from batchloom.adapters.pytorch import _PREFETCHING_MODULES

    for name in _PREFETCHING_MODULES - {"pytorch_lightning.loops.fetchers"}:
        assert importlib.util.find_spec(name) is not None
