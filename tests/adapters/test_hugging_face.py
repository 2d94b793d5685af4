"""Hugging Face's Trainer and SFTTrainer: refusals, resume, evaluation and loss."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import batchloom
from batchloom import InputError, SettingsError, StateError
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.batches import add_dense_mask, to_padded, to_varlen
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw, tiny_model
from batchloom.testing import write_store
from processes import run_two_ranks

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from transformers import PreTrainedTokenizerFast, Trainer

from adapters.hf_runs import STEPS, get_losses, make_args
from batchloom.adapters import TokenLoss, compute_row_losses, compute_token_loss
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.adapters.hugging_face.trainer_objects import TrainerBatching
from batchloom.adapters.isolation_check import check_no_leak

pytestmark = [
    # transformers and trl use names that they deprecate; torch warns of few cores.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
SIZES = {"seq_len": 32, "global_batch_size": 8}
NAMES = ("input_ids", "labels", "position_ids")
HELD_OUT = {"seq_len": 32, "global_batch_size": 4, "packing": "none"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 250, rng.integers(2, 40)).tolist() for _ in range(150)]
    held_out = [rng.integers(0, 250, 9).tolist() for _ in range(11)]
    parts = {"train": documents, "val": held_out}
    return write_store(tmp_path_factory.mktemp("hf") / "store", parts)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Conversations with a trained second half; some have no trained token."""
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 250, rng.integers(4, 30)).tolist() for _ in range(64)]
    trained = [
        [int(n % 4 > 0 and 2 * position >= len(ids)) for position in range(len(ids))] for n, ids in enumerate(documents)
    ]
    return write_store(tmp_path_factory.mktemp("hf") / "masked", {"train": documents}, trained={"train": trained})


def make_loader(store, **settings):
    return batchloom.Loader(store, **{**SIZES, "steps": STEPS, **settings}, rank=0, world_size=1)


class RecordingTrainer(Trainer):
    """Trainer that records the inputs of its loss."""

    def compute_loss(self, model, inputs, **settings):
        if model.training:
            self.__dict__.setdefault("recorded", []).append(
                {name: value for name, value in inputs.items() if name in NAMES}
            )
        return super().compute_loss(model, inputs, **settings)


def make_trainer(store, folder, *, loader=None, model=None, parts=None, args=None, **settings):
    args = args or make_args(folder, **settings)
    parts = parts or make_trainer_parts(loader or make_loader(store), args)
    model = model or tiny_model(store)
    return RecordingTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), 1e-3), None),
    )


def micro_batches(loader, first=0):
    return [part for step in range(first, STEPS) for part in loader[step].split(2)]


@pytest.fixture(scope="module")
def uninterrupted(store, tmp_path_factory):
    trainer = make_trainer(store, tmp_path_factory.mktemp("hf") / "run")
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("workers", "skip"),
    [
        pytest.param(0, True, id="0-ignore_data_skip"),
        pytest.param(1, False, id="1-skipping"),
        pytest.param(0, False, id="0-skipping", marks=pytest.mark.slow),
        pytest.param(2, True, id="2-ignore_data_skip", marks=pytest.mark.slow),
    ],
)
def test_a_resume_goes_on_exactly_and_reads_nothing_again(store, uninterrupted, tmp_path, skip, workers, monkeypatch):
    settings = {"ignore_data_skip": skip, "dataloader_num_workers": workers}
    trainer = make_trainer(store, tmp_path, **settings)
    read_steps, original_getitem = [], LoaderDataset.__getitem__

    def record_read(dataset, step):
        read_steps.append(step)
        return original_getitem(dataset, step)

    monkeypatch.setattr(LoaderDataset, "__getitem__", record_read)
    trainer.train(resume_from_checkpoint=f"{uninterrupted.args.output_dir}/checkpoint-4")
    expected_batches = micro_batches(make_loader(store), 4)
    assert len(trainer.recorded) == len(expected_batches)
    for actual, expected in zip(trainer.recorded, expected_batches, strict=True):
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert get_losses(trainer) == pytest.approx(get_losses(uninterrupted), rel=1e-6)
    # Workers read in their own processes.
    assert read_steps == ([] if workers else [4, 5])


def test_what_reaches_the_model_is_the_loaders(store, uninterrupted):
    for actual, expected in zip(uninterrupted.recorded, micro_batches(make_loader(store)), strict=True):
        assert set(actual) == set(NAMES)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert uninterrupted.model.config.use_cache is False


@pytest.mark.parametrize(
    ("settings", "form"), [({"form": "varlen"}, None), pytest.param({}, to_varlen, marks=pytest.mark.slow)]
)
def test_documents_back_to_back_learn_the_same(store, uninterrupted, tmp_path, settings, form):
    parts = make_trainer_parts(make_loader(store, **settings), make_args(tmp_path, max_steps=2), form=form)
    trainer = make_trainer(store, tmp_path, parts=parts, max_steps=2)
    trainer.train()
    assert {batch["input_ids"].shape[0] for batch in trainer.recorded} == {1}
    expected = {step: loss for step, loss in get_losses(uninterrupted).items() if step <= 2}
    assert get_losses(trainer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_of_padded_rows_goes_on_exactly(store, tmp_path):
    loader = make_loader(store, packing="none", group_by_length=True)
    expected_batches = [to_padded(part) for part in micro_batches(loader)]

    def make_padded_trainer(folder):
        loader = make_loader(store, packing="none", group_by_length=True)
        parts = make_trainer_parts(loader, make_args(folder), form=to_padded)
        return make_trainer(store, folder, parts=parts)

    full_run, resumed = make_padded_trainer(tmp_path / "whole"), make_padded_trainer(tmp_path / "resumed")
    full_run.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for run, batches in ((full_run, expected_batches), (resumed, expected_batches[16:])):
        assert len(run.recorded) == len(batches)
        for actual, expected in zip(run.recorded, batches, strict=True):
            assert all(torch.equal(actual[name], expected[name]) for name in NAMES)
    assert len({batch["input_ids"].shape[1] for batch in full_run.recorded}) > 1
    assert get_losses(resumed) == pytest.approx(get_losses(full_run), rel=1e-6)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_micro_batches(store, uninterrupted, tmp_path):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(store, tmp_path, **settings)
    trainer.train(resume_from_checkpoint=f"{uninterrupted.args.output_dir}/checkpoint-2")
    ids = torch.cat([batch["input_ids"] for batch in trainer.recorded])
    expected = [make_loader(store)[step]["input_ids"] for step in range(2, STEPS)]
    assert torch.equal(ids, torch.cat(expected))
    assert get_losses(trainer) == pytest.approx(get_losses(uninterrupted), rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_goes_on_with_two(store, uninterrupted, tmp_path):
    worker = Path(__file__).with_name("hf_worker.py")
    checkpoint = f"{uninterrupted.args.output_dir}/checkpoint-4"
    run_two_ranks(worker, store.path, checkpoint, tmp_path)
    reports = [json.loads((tmp_path / f"report_{rank}.json").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        loader = batchloom.Loader(store, **SIZES, steps=STEPS, rank=rank, world_size=2)
        expected = [batch["input_ids"].tolist() for batch in micro_batches(loader, 4)]
        assert reports[rank]["ids"] == expected
    assert reports[0]["losses"] == pytest.approx(list(get_losses(uninterrupted).values()), rel=1e-4)
    step_losses = compute_step_losses(store.subset("val"), uninterrupted.model)
    total, count = torch.cat(step_losses).double().sum(0)
    for rank in (0, 1):
        assert "seed is 0 on rank 0 and 1 on rank 1" in reports[rank]["refused"]
        assert "max_steps is 6 on rank 0 and 5 on rank 1" in reports[rank]["unlike"]
        evaluation = reports[rank]["evaluation"]
        assert evaluation["eval_token_loss"] == pytest.approx((total / count).item(), rel=1e-4)
        means = [(losses[:, 0].sum() / losses[:, 1].sum()).item() for losses in step_losses]
        assert evaluation["eval_loss"] == pytest.approx(np.mean(means), rel=1e-4)


def compute_step_losses(held_out, model):
    """Return the ``compute_row_losses`` of each step of an evaluation."""
    model.eval()
    step_losses = []
    for batch in batchloom.Loader(held_out, **HELD_OUT, rank=0, world_size=1):
        with torch.no_grad():
            step_losses.append(compute_row_losses(model(**{**batch, "labels": None}).logits, batch["labels"]))
    return step_losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 7}, "spec.seed was 0 and is 7"),
        pytest.param({"seq_len": 64}, "spec.seq_len was 32 and is 64", marks=pytest.mark.slow),
        pytest.param({"packing": "wrap"}, "spec.packing was 'best_fit' and is 'wrap'", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused_by_name(store, uninterrupted, tmp_path, settings, message):
    trainer = make_trainer(store, tmp_path, loader=make_loader(store, **settings))
    with pytest.raises(StateError, match=message):
        trainer.train(resume_from_checkpoint=f"{uninterrupted.args.output_dir}/checkpoint-4")


def test_a_checkpoint_without_a_state_is_refused(store, uninterrupted, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(f"{uninterrupted.args.output_dir}/checkpoint-4", folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["stateful_callbacks"].pop("PlanState")["attributes"]["loader"]["position"] == 32
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(StateError, match="holds no loader state"):
        make_trainer(store, tmp_path / "out").train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_sampling_strategy": "random"}, "train_sampling_strategy: 'random'; the plan already shuffles"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length'; the plan already shuffles"),
        (
            {"dataloader_drop_last": True},
            r"dataloader_drop_last: True; .*\(last='drop'\)",
        ),
        ({"max_steps": -1}, "num_train_epochs: 3.0 would repeat the same steps"),
        ({"max_steps": STEPS + 1}, f"max_steps: 7, and the plan has {STEPS}"),
        ({"per_device_train_batch_size": 3}, "make 12 a step.*1 x 8, 2 x 4, 4 x 2, 8 x 1"),
        ({"gradient_accumulation_steps": 3}, r"make 6 a step.*Loader\(global_batch_size=6\)"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: True"),
        ({"use_cache": True}, "the documents of a packed row see each other"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
    ],
)
def test_settings_that_would_change_the_plan_are_refused_with_the_remedy(store, tmp_path, settings, message):
    with pytest.raises(SettingsError, match=message):
        make_trainer_parts(make_loader(store), make_args(tmp_path, **settings))


@pytest.mark.slow
def test_settings_that_change_later_are_refused_before_the_first_step(store, tmp_path):
    trainer = make_trainer(store, tmp_path)
    trainer.args.train_sampling_strategy = "random"
    with pytest.raises(SettingsError, match="train_sampling_strategy='sequential'"):
        trainer.train()
    trainer = make_trainer(store, tmp_path)
    trainer.data_collator = transformers.default_data_collator
    with pytest.raises(TrainError, match=r"data_collator=parts\.collator"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": "shifted"}, "shift labels themselves"),
        ({"output": "numpy"}, "takes tensors"),
    ],
)
def test_a_loader_of_another_form_is_refused(store, tmp_path, settings, message):
    with pytest.raises(SettingsError, match=message):
        make_trainer_parts(make_loader(store, **settings), make_args(tmp_path))


def test_a_loader_of_another_rank_or_step_is_refused(store, tmp_path):
    loader = batchloom.Loader(store, **SIZES, steps=STEPS, rank=1, world_size=2)
    with pytest.raises(SettingsError, match="reads the share of rank 1 of 2, and the trainer's process is 0 of 1"):
        make_trainer_parts(loader, make_args(tmp_path))
    resumed = make_loader(store)
    resumed.load_state_dict(resumed.state_at(2))
    with pytest.raises(SettingsError, match="is at step 2"):
        make_trainer_parts(resumed, make_args(tmp_path))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 2), (2, 1), (3, 2)])
def test_rows_are_numbered_as_accelerate_deals_them(batch_size, accumulation, world_size):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    steps = 3
    rows = batch_size * accumulation * world_size * steps
    for rank in range(world_size):
        batches = BatchSampler(range(rows), batch_size, drop_last=False)
        batching = TrainerBatching(batch_size, accumulation, rank, world_size)
        located = [
            batching.locate_micro_batch(rows_of_batch) for rows_of_batch in BatchSamplerShard(batches, world_size, rank)
        ]
        assert located == [(step, micro) for step in range(steps) for micro in range(accumulation)]


@pytest.mark.parametrize("numbers", [[0, 2], [1, 2], [0, 1, 2, 3], [2, 3]])
def test_rows_that_are_shuffled_or_dealt_otherwise_are_refused(numbers):
    with pytest.raises(TrainError, match="train_sampling_strategy='sequential'"):
        TrainerBatching(2, 2, 0, 2).locate_micro_batch(numbers)


def test_the_dataset_is_changed_by_nothing(store, tmp_path):
    rows = make_trainer_parts(make_loader(store), make_args(tmp_path)).dataset
    assert len(rows) == STEPS * 8
    assert torch.equal(rows[11]["input_ids"], make_loader(store)[1]["input_ids"][3:4])
    assert torch.equal(next(iter(rows))["input_ids"], rows[0]["input_ids"])
    for name in ("map", "shuffle", "select", "filter"):
        with pytest.raises(InputError, match="skip_prepare_dataset"):
            getattr(rows, name)
    with pytest.raises(InputError, match="by their numbers"):
        rows["length"]
    with pytest.raises(IndexError):
        rows[len(rows)]


class Blind(torch.nn.Module):
    """Model that accepts positions and still lets documents see each other."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels=None, position_ids=None, **settings):
        running = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.model(input_ids=input_ids, labels=labels, position_ids=running, **settings)


def test_a_model_that_lets_documents_see_each_other_is_refused(store, tmp_path):
    with pytest.raises(TrainError, match=r"Blind lets packed documents see each other.*packing='none'"):
        make_trainer(store, tmp_path, model=Blind(tiny_model(store))).train()


@pytest.mark.slow
def test_a_cache_that_was_turned_on_is_turned_off(store, tmp_path):
    cached, plain = (
        make_trainer(store, tmp_path / "cached", max_steps=1),
        make_trainer(store, tmp_path / "plain", max_steps=1),
    )
    cached.model.config.use_cache = True
    cached.train()
    assert cached.model.config.use_cache is False
    plain.train()
    assert get_losses(cached) == get_losses(plain)


class ByMask(torch.nn.Module):
    """Model that separates documents only by its mask."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        running = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.model(input_ids, attention_mask=attention_mask, position_ids=running)


class Wrapped(torch.nn.Module):
    """Model that passes on other keywords, as PEFT's models do."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return self.model(input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class Deaf(torch.nn.Module):
    """Model without position_ids."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False)


def drop_positions(batch):
    return {name: value for name, value in batch.items() if name != "position_ids"}


def add_ones_mask(batch):
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def mask_and_drop_positions(batch):
    return drop_positions(add_dense_mask(batch))


def check_model(store, folder, kind, form, settings):
    loader = make_loader(store, **settings)
    parts = make_trainer_parts(loader, make_args(folder), form=form)
    model = kind(tiny_model(store)) if kind else tiny_model(store)
    model.config.use_cache = False
    check_no_leak(model, loader, parts.collator, 2)
    assert model.training


@pytest.mark.parametrize(
    ("kind", "form", "settings"),
    [
        (None, add_dense_mask, {}),
        (None, to_varlen, {}),
        (None, None, {"form": "varlen"}),
        (ByMask, add_dense_mask, {}),
        (Deaf, mask_and_drop_positions, {}),
        (Wrapped, None, {}),
        (Wrapped, None, {"form": "varlen"}),
        (Blind, to_padded, {"packing": "none"}),
    ],
)
def test_models_are_checked_in_the_form_they_are_trained_in(store, tmp_path, kind, form, settings):
    check_model(store, tmp_path, kind, form, settings)


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        (None, drop_positions, "LlamaForCausalLM lets packed documents see each other"),
        (None, add_ones_mask, "LlamaForCausalLM lets packed documents see each other"),
        (ByMask, None, "ByMask lets packed documents see each other.*dense_mask"),
        (Wrapped, add_ones_mask, "Wrapped lets packed documents see each other"),
        (Deaf, None, "Deaf takes no position_ids, .*dense_mask"),
    ],
)
def test_a_form_that_lets_documents_see_each_other_is_refused(store, tmp_path, kind, form, message):
    with pytest.raises(TrainError, match=message):
        check_model(store, tmp_path, kind, form, {})


@pytest.mark.slow
def test_a_wrapped_model_trains_with_the_form_it_was_checked_in(store, uninterrupted, tmp_path):
    trainer = make_trainer(store, tmp_path, model=Wrapped(tiny_model(store)), max_steps=2)
    trainer.train()
    expected = {step: loss for step, loss in get_losses(uninterrupted).items() if step <= 2}
    assert get_losses(trainer) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_model_or_the_smoother(store, smoothing):
    batch, model = make_loader(store)[0], tiny_model(store)
    labels = batch.pop("labels")
    outputs = model(**batch)
    count = torch.tensor(5)
    if smoothing:
        from transformers.trainer_pt_utils import LabelSmoother

        expected = LabelSmoother(smoothing)(outputs, labels, True, count)
    else:
        expected = model(**batch, labels=labels, num_items_in_batch=count).loss
    loss = TokenLoss(smoothing)(outputs, labels, count)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    no_labels = torch.full_like(labels, -100)
    assert TokenLoss(smoothing)(outputs, no_labels, torch.tensor(0)).item() == 0
    assert TokenLoss(smoothing)(outputs, no_labels).item() == 0


def test_sft_trainer_trains_padded_rows_of_masked_conversations(masked, tmp_path):
    args = make_args(
        tmp_path,
        trl.SFTConfig,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
        max_steps=1,
    )
    loader = make_loader(masked, packing="none", group_by_length=4)
    model = tiny_model(masked)
    trained = sum((row["labels"] != -100).sum().item() for row in loader[0].split(1))
    assert any((row["labels"] == -100).all() for row in loader[0].split(1))
    widths = {to_padded(part)["input_ids"].shape[1] for part in loader[0].split(2)}
    assert len(widths) > 1
    with torch.no_grad():
        logits = model(**{**loader[0], "labels": None}).logits
    expected = compute_row_losses(logits, loader[0]["labels"])[:, 0].sum().item() / trained
    parts = make_trainer_parts(loader, args, form=to_padded)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<end>": 0})))
    trainer = trl.SFTTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        processing_class=tokenizer,
        callbacks=[parts.callback],
    )
    trainer.train()
    assert get_losses(trainer)[1] == pytest.approx(expected, rel=1e-5)


def test_sft_settings_that_would_prepare_rows_again_are_refused(store, tmp_path):
    with pytest.raises(SettingsError, match="skip_prepare_dataset.: True") as error:
        make_trainer_parts(make_loader(store), make_args(tmp_path, trl.SFTConfig, bf16=False, packing=True))
    assert "packing: True, and the loader already packs" in str(error.value)


def test_an_evaluation_smaller_than_a_step_is_the_mean_over_its_tokens(store, tmp_path):
    args = make_args(tmp_path, per_device_eval_batch_size=4)
    held_out = store.subset("val")
    evaluation = batchloom.Loader(held_out, **HELD_OUT, rank=0, world_size=1)
    assert len(evaluation) == 3
    parts = make_trainer_parts(make_loader(store), args, evaluation=evaluation)
    model = tiny_model(store)
    trainer = Trainer(
        model,
        args,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        eval_dataset=parts.eval_dataset,
        preprocess_logits_for_metrics=compute_row_losses,
        compute_metrics=compute_token_loss,
    )
    metrics = trainer.evaluate()
    step_losses = compute_step_losses(held_out, model)
    total, count = torch.cat(step_losses).double().sum(0)
    assert metrics["eval_token_loss"] == pytest.approx((total / count).item(), rel=1e-6)
    means = [(losses[:, 0].sum() / losses[:, 1].sum()).item() for losses in step_losses]
    assert metrics["eval_loss"] == pytest.approx(np.mean(means), rel=1e-5)
    assert np.isfinite(metrics["eval_loss"])
    smaller = make_args(tmp_path, per_device_eval_batch_size=8)
    with pytest.raises(SettingsError, match="give its Loader global_batch_size=8"):
        make_trainer_parts(make_loader(store), smaller, evaluation=evaluation)


@pytest.mark.slow
def test_documents_left_out_are_logged_once_per_loader(tmp_path, caplog):
    long, short = [[1] * 60] * 5, [[2, 3, 4, 5]] * 40
    store = write_store(tmp_path / "s", {"train": long + short, "val": long[:2] + short})
    args = make_args(tmp_path, per_device_eval_batch_size=4, max_steps=1)
    loader = make_loader(store, overlong="drop", steps=1)
    options = {**HELD_OUT, "overlong": "drop"}
    evaluation = batchloom.Loader(store.subset("val"), **options, rank=0, world_size=1)
    parts = make_trainer_parts(loader, args, evaluation=evaluation)
    trainer = Trainer(
        tiny_model(store),
        args,
        train_dataset=parts.dataset,
        eval_dataset=parts.eval_dataset,
        data_collator=parts.collator,
        callbacks=[parts.callback],
        compute_loss_func=parts.loss,
    )
    trainer.train()
    trainer.evaluate()
    messages = [record.getMessage() for record in caplog.records if "leaves" in record.getMessage()]
    assert [message.partition(" documents")[0] for message in messages] == [
        "overlong='drop' leaves 5 of 45",
        "overlong='drop' leaves 2 of 42",
    ]


def test_an_evaluation_without_trained_tokens_is_finite(masked, tmp_path):
    untrained = write_store(tmp_path / "nothing", {"train": [[1, 2, 3]] * 5}, trained={"train": [[0, 0, 0]] * 5})
    args = make_args(tmp_path, per_device_eval_batch_size=4)
    evaluation = batchloom.Loader(untrained, **HELD_OUT, rank=0, world_size=1)
    parts = make_trainer_parts(make_loader(masked), args, evaluation=evaluation)
    trainer = Trainer(
        tiny_model(masked),
        args,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        eval_dataset=parts.eval_dataset,
    )
    assert trainer.evaluate()["eval_loss"] == 0
