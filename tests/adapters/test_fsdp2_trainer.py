"""FSDP2SFTTrainer: Hugging Face's arguments on the plan's batches."""

import json
import warnings
from itertools import product
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import batchloom
from adapters.small_stores import make_small_records, make_small_store
from batchloom import InputError, PlanError, SettingsError, StateError
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.core.errors import TrainError
from batchloom.examples.job import tiny_model
from processes import run_two_ranks

SMALL = {
    "max_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 3e-3,
    "save_steps": 3,
    "logging_steps": 1,
    "use_cpu": True,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_small_store(tmp_path_factory.mktemp("data") / "store")


def make_trainer(store, out, data=None, collator=None, dropout=0.0, **settings):
    model = tiny_model(store)
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    args = FSDP2Arguments(output_dir=str(out), **{**SMALL, **settings})
    return FSDP2SFTTrainer(
        model=model,
        args=args,
        train_dataset=store if data is None else data,
        data_collator=collator,
    )


def resolve_args(args, store, data=None):
    """Return the arguments that a trainer uses for the given ones."""
    data = store if data is None else data
    return FSDP2SFTTrainer(model=tiny_model(store), args=args, train_dataset=data).args


def read_log(out):
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def drop_timings(entries):
    return [{k: v for k, v in entry.items() if not k.startswith("perf/")} for entry in entries]


@pytest.mark.slow
def test_a_run_goes_on_exactly_with_dropout_too(store, tmp_path):
    full_run = make_trainer(store, tmp_path / "a", dropout=0.2)
    result = full_run.train()
    assert result.global_step == 6
    assert result.training_loss == pytest.approx(sum(e["loss"] for e in read_log(tmp_path / "a")) / 6)
    assert {name for name in read_log(tmp_path / "a")[0] if "/" not in name} == {
        *("step", "lr", "loss", "tokens", "grad_norm", "origin")
    }
    for step, entry in enumerate(read_log(tmp_path / "a")):
        assert entry["perf/tokens"] == full_run.loader.tokens(step)
        assert 0 <= entry["perf/data_wait_share"] < 1
    assert read_log(tmp_path / "a")[0]["origin"] == full_run.loader.origin
    assert sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-6",
    ]
    with pytest.raises(TrainError, match="holds checkpoint-6 of an earlier run"):
        make_trainer(store, tmp_path / "a").train()
    resumed = make_trainer(store, tmp_path / "a", dropout=0.2, save_total_limit=1)
    assert resumed.train(str(tmp_path / "a" / "checkpoint-3")).global_step == 6
    assert drop_timings(resumed.log_history) == drop_timings(full_run.log_history[3:])
    assert drop_timings(read_log(tmp_path / "a")) == drop_timings(full_run.log_history)
    # The later checkpoint of the earlier run is kept as abandoned.
    assert sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")) == [
        "checkpoint-6",
        "checkpoint-6.abandoned",
    ]
    assert make_trainer(store, tmp_path / "a").train(resume_from_checkpoint=True).global_step == 6
    for checkpoint, message in ((True, "no checkpoint in"), ("nowhere", "no checkpoint nowhere")):
        with pytest.raises(StateError, match=message):
            make_trainer(store, tmp_path / "b").train(resume_from_checkpoint=checkpoint)


@pytest.mark.slow
def test_a_log_line_cut_by_a_kill_is_written_again(store, tmp_path):
    full_run = make_trainer(store, tmp_path)
    full_run.train()
    log = tmp_path / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    make_trainer(store, tmp_path).train(str(tmp_path / "checkpoint-3"))
    assert drop_timings(read_log(tmp_path)) == drop_timings(full_run.log_history)
    log.write_bytes(b"nonsense\n" + log.read_bytes())
    with pytest.raises(StateError, match=r"log\.jsonl, line 1 is not an entry of a log"):
        make_trainer(store, tmp_path).train(resume_from_checkpoint=True)


def test_ids_without_a_row_in_the_model_are_refused(store, tmp_path):
    beyond = [{"input_ids": [1, 2, 100_000]}] * 40
    with pytest.raises(
        TrainError, match=r"Step 0 of source=.* holds token id 100000, .*embedding \(ids 0 to [\d,]+\)\. Use"
    ):
        make_trainer(store, tmp_path, beyond).train()


def stack_rows(sequences):
    return {name: torch.stack([row[name] for row in sequences]) for name in sequences[0]}


def stack_with_mask(sequences):
    batch = stack_rows(sequences)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


@pytest.mark.slow
def test_every_form_of_the_data_is_the_same_run(store, tmp_path):
    sizes = {"max_steps": 2, "save_strategy": "no"}
    expected = make_trainer(store, tmp_path / "a", **sizes)
    expected.train()
    plan = batchloom.Plan(store, batchloom.PlanSpec(seq_len=64, global_batch_size=4, seed=42, steps=2))
    forms = {
        "records": make_small_records(),
        "plan": plan,
        "loader": batchloom.Loader(plan, rank=0, world_size=1),
        "collator": None,
        "passes": None,
    }
    for name, data in forms.items():
        passes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
        run = make_trainer(
            store,
            tmp_path / name,
            data,
            stack_rows if name == "collator" else None,
            **{**sizes, **(passes if name == "passes" else {})},
        )
        run.train()
        assert [e["loss"] for e in run.log_history] == pytest.approx(
            [e["loss"] for e in expected.log_history], rel=1e-5
        ), name
        assert [e["tokens"] for e in run.log_history] == [e["tokens"] for e in expected.log_history], name


@pytest.mark.slow
def test_labels_of_records_say_what_is_trained(store, tmp_path):
    masked = [{**record, "labels": [-100] * len(record["input_ids"])} for record in make_small_records()]
    records = [*masked[1:], {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]
    run = make_trainer(store, tmp_path / "a", records, max_steps=-1, num_train_epochs=1)
    result = run.train()
    assert sum(entry["tokens"] for entry in run.log_history) == 2
    # The loss of a step without trained tokens is 0, not NaN.
    assert {entry["loss"] > 0 for entry in run.log_history} == {True, False}
    assert result.training_loss > 0


def test_columns_without_effect_on_the_loss_are_accepted(store, tmp_path):
    columns = {"completion_mask": None, "text": "1 2", "attention_mask": [1, 1]}
    run = make_trainer(store, tmp_path, [{"input_ids": [1, 2], **columns}] * 9, max_steps=1)
    assert run.loader.trained_tokens(0) > 0


def test_weights_that_an_update_made_infinite_become_no_checkpoint(store, tmp_path):
    # The loss is finite because it is computed before the update.
    beyond = {"max_steps": 1, "learning_rate": 1e30, "weight_decay": 1e30}
    for saves in ("steps", "no"):
        with pytest.raises(TrainError, match="Weights .* are not finite after 1 step .*learning_rate"):
            make_trainer(store, tmp_path, **beyond, save_strategy=saves).train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a"}], "Record 0 of train_dataset is {'text': 'a'}.*batchloom prepare"),
        ([{"input_ids": [1, 2], "labels": [2, 3]}], "labels that are neither its input_ids nor -100"),
        ([{"input_ids": [1, 2], "labels": [1]}], "lists of one length"),
        ([{"input_ids": [0.5]}], "Give lists of one length: token ids"),
        ([{"input_ids": [[1], [1, 2]]}], "Give lists of one length: token ids"),
        ([{"input_ids": [1, 2**32 + 5, 3]}], "token ids from 0 to 2147483647"),
        ([{"input_ids": [1, 2**31]}], "token ids from 0 to 2147483647"),
        ([{"input_ids": [1, 2], "labels": [1.0, float("nan")]}], "Give lists of one length"),
        ([{"input_ids": [1, 2], "labels": [[1], [1, 2]]}], "Give lists of one length"),
        ([{"input_ids": [1, 2], "completion_mask": [0, 1]}], "has completion_mask, .*give labels"),
        ([{"input_ids": [1, 2], "assistant_masks": [0, 1]}], "has assistant_masks, .*give labels"),
        ([{"input_ids": [1, 2], "position_ids": [0, 0]}], "has position_ids, .*give labels"),
        ([{"input_ids": [1, 2], "label_ids": [1, -100]}], "has label_ids, .*give labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], r"has attention_mask \(with values"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], r"has attention_mask \(with values"),
        ([{"input_ids": [1, 2], "attention_mask": [[1], [1, 1]]}], r"has attention_mask \(with values"),
        ([], "without records"),
        ("data/wiki", "train_dataset is 'data/wiki'.*open_store"),
    ],
)
def test_data_that_is_none_is_refused(store, tmp_path, records, message):
    with pytest.raises(InputError, match=message):
        make_trainer(store, tmp_path, records)


def test_settings_that_contradict_the_plan_are_refused(store, tmp_path):
    plan = batchloom.Plan(store, batchloom.PlanSpec(seq_len=64, global_batch_size=6, epochs=2))
    with pytest.raises(PlanError, match=r"are 4 sequences .* is 6: give 1 x 6 or 2 x 3 or 3 x 2"):
        make_trainer(store, tmp_path, plan)
    three = {"per_device_train_batch_size": 3, "max_steps": -1}
    with pytest.raises(SettingsError, match="max_length: 32 .*plan has seq_len=64"):
        make_trainer(store, tmp_path, plan, **{**three, "max_length": 32})
    wrong = {"num_train_epochs": 3, "packing": False, "seed": 42, "max_length": 1024}
    planned = {"num_train_epochs": "epochs=2", "packing": "packing='best_fit'"}
    planned |= {"seed": "seed=0", "max_length": "seq_len=64"}
    with pytest.raises(SettingsError) as refused:
        make_trainer(store, tmp_path, plan, **{**three, **wrong})
    assert sorted(refused.value.problems) == sorted(
        f"{name}: {value} is requested and the plan has {planned[name]}: leave it out, or make another Plan"
        for name, value in wrong.items()
    )
    right = {"num_train_epochs": 2, "packing": True, "seed": 0}
    for data in (plan, batchloom.Loader(plan, rank=0, world_size=1)):
        assert make_trainer(store, tmp_path, data, **{**three, **right}).steps == plan.steps
    with pytest.raises(SettingsError, match="seed: 9 is requested and the plan has seed=0"):
        args = make_hugging_face_args("transformers", tmp_path, per_device_train_batch_size=6, seed=9)
        FSDP2SFTTrainer(model=tiny_model(store), args=args, train_dataset=plan)
    steps = batchloom.Plan(store, batchloom.PlanSpec(seq_len=64, global_batch_size=6, steps=4))
    with pytest.raises(SettingsError, match="num_train_epochs: 1 .* the plan has steps=4"):
        make_trainer(store, tmp_path, steps, **three, num_train_epochs=1)
    with pytest.raises(PlanError, match="max_steps 999 are requested and the plan has"):
        make_trainer(store, tmp_path, plan, **{**three, "max_steps": 999})
    shifted = batchloom.Loader(plan, labels="shifted", form="varlen", rank=0, world_size=1)
    with pytest.raises(SettingsError, match=r"form: 'varlen'.*labels: 'shifted' instead of 'al"):
        make_trainer(store, tmp_path, shifted, **three)
    with pytest.raises(InputError, match=r"attention_mask of \[2, 64\] and rows are packed"):
        make_trainer(store, tmp_path, collator=stack_with_mask).train()
    make_trainer(store, tmp_path / "b", collator=stack_with_mask, packing=False, max_steps=1).train()
    with pytest.raises(InputError, match="Linear does not take num_items_in_batch"):
        FSDP2SFTTrainer(
            model=torch.nn.Linear(2, 2),
            args=FSDP2Arguments(output_dir=str(tmp_path)),
            train_dataset=store,
        )


def test_a_collator_that_would_train_padding_is_refused(store, tmp_path):
    def labelled(rows):
        batch = stack_rows(rows)
        return {**batch, "labels": batch["input_ids"].clone()}

    with pytest.raises(InputError, match="gives .* labels in step 0 .*padding would be"):
        make_trainer(store, tmp_path, collator=labelled, packing=False, max_steps=1).train()


def make_hugging_face_args(kind, folder, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        if kind == "trl":
            trl = pytest.importorskip("trl")
            return trl.SFTConfig(output_dir=str(folder), use_cpu=True, **settings)
        return transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, **settings)


@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_arguments_of_hugging_face_are_obeyed_or_refused_by_name(kind, store, tmp_path):
    packing = "none" if kind == "trl" else "best_fit"
    spec = batchloom.PlanSpec(seq_len=1024, global_batch_size=8, seed=42, steps=7, packing=packing)
    args = make_hugging_face_args(kind, tmp_path, max_steps=7, lr_scheduler_type="cosine", report_to="none")
    resolved = resolve_args(args, store, batchloom.Plan(store, spec))
    assert (resolved.max_steps, resolved.lr_scheduler_type) == (7, "cosine")
    assert resolved.max_length == (1024 if kind == "trl" else None)
    assert resolved.packing is (kind != "trl")
    with pytest.raises(SettingsError) as refused:
        resolve_args(
            make_hugging_face_args(
                kind,
                tmp_path,
                label_smoothing_factor=0.1,
                eval_strategy="steps",
                lr_scheduler_type="polynomial",
                optim="sgd",
                neftune_noise_alpha=5,
                dataloader_drop_last=True,
            ),
            store,
        )
    named = {problem.split(":")[0] for problem in refused.value.problems}
    assert named >= {
        *("label_smoothing_factor", "eval_strategy", "lr_scheduler_type", "optim"),
        *("neftune_noise_alpha", "dataloader_drop_last"),
    }
    assert len(named) == 6
    if kind == "transformers":
        with pytest.raises(SettingsError, match="max_length: TrainingArguments has none"):
            FSDP2SFTTrainer(model=tiny_model(store), args=make_hugging_face_args(kind, tmp_path), train_dataset=store)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_scheduler_type": "linaer"}, "lr_scheduler_type: 'linaer' is none of linear"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "constant_with_warmup"),
        ({"num_train_epochs": 1.5}, "num_train_epochs: 1.5 is not a whole number"),
        ({"save_steps": 0.5}, "save_steps: 0.5 is not a whole number"),
        ({"max_steps": 2.5}, "max_steps: 2.5 is not a whole number"),
        ({"seed": 1.5}, "seed: 1.5 is not a whole number"),
        ({"bf16": "no"}, "bf16: 'no' is neither True nor False"),
        ({"packing": "x"}, "packing: 'x' is neither True nor False"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing: 1 is neither True nor False"),
        ({"use_cpu": None}, "use_cpu: None is neither True nor False"),
        (
            {"resume_from_checkpoint": 4},
            "resume_from_checkpoint: 4 is neither True, nor False, nor",
        ),
        ({"output_dir": ""}, "output_dir: '' is not the name of a folder"),
        (
            {"max_grad_norm": -1.0},
            "max_grad_norm: -1.0 is not a finite number of at least 0",
        ),
        ({"adam_beta1": 1}, r"adam_beta1: 1 is not in \[0, 1\)"),
        ({"learning_rate": 10**400}, "learning_rate: a number of .* is not a finite number"),
    ],
)
def test_settings_that_are_none_are_refused(store, settings, message):
    with pytest.raises(SettingsError, match=message):
        resolve_args(FSDP2Arguments(**{"output_dir": "x", **settings}), store)


def test_arguments_that_are_none_are_refused(store):
    with pytest.raises(InputError, match="not 3"):
        resolve_args(3, store)


NUMERIC_FIELDS = [name for name, hint in get_type_hints(FSDP2Arguments).items() if hint in (float, float | None)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1e-3", True])
def test_invalid_numbers_are_all_reported_at_once(value, store, tmp_path):
    assert len(NUMERIC_FIELDS) == 8
    wrong = dict.fromkeys(NUMERIC_FIELDS, value)
    with pytest.raises(SettingsError) as refused:
        resolve_args(FSDP2Arguments(output_dir="x", bf16="no", save_steps=0, **wrong), store)
    named = [problem.split(":")[0] for problem in refused.value.problems]
    assert sorted(named) == sorted([*NUMERIC_FIELDS, "bf16", "save_steps"])
    args = make_hugging_face_args("transformers", tmp_path)
    for name in NUMERIC_FIELDS:
        setattr(args, name, value)
    with pytest.raises(SettingsError) as refused:
        resolve_args(args, store)
    assert {problem.split(":")[0] for problem in refused.value.problems} >= set(NUMERIC_FIELDS)


def test_the_smallest_valid_numbers_are_accepted(store, tmp_path):
    minimums = dict.fromkeys(set(NUMERIC_FIELDS) - {"num_train_epochs"}, 0)
    args = FSDP2Arguments(output_dir=str(tmp_path), use_cpu=True, **minimums)
    assert resolve_args(args, store).max_grad_norm == 0


@pytest.mark.parametrize(
    ("kind", "warmup"),
    [
        *(("linear", 3), ("cosine", 0.25), ("constant_with_warmup", 3), ("constant", 0)),
        *(
            pytest.param(kind, warmup, marks=pytest.mark.slow)
            for kind, warmup in product(("linear", "cosine", "constant_with_warmup"), (0, 3, 0.25))
        ),
    ],
)
def test_the_learning_rate_is_that_of_transformers(store, tmp_path, kind, warmup):
    from transformers import get_scheduler

    steps, rate = 12, 1e-3
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    schedule = {"max_steps": steps, "learning_rate": rate, "save_strategy": "no"}
    run = make_trainer(store, tmp_path, lr_scheduler_type=kind, warmup_steps=warmup, **sizes, **schedule)
    run.train()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_scheduler(kind, optimizer, int(warmup if warmup >= 1 else steps * warmup), steps)
    assert len(run.log_history) == steps
    for entry in run.log_history:
        assert entry["lr"] == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_two_ranks_train_rank_0s_model_as_one_process_does(store, tmp_path):
    from transformers import LlamaForCausalLM

    sizes = {"max_steps": 3}
    alone = make_trainer(store, tmp_path / "one", gradient_checkpointing=True, **sizes)
    alone.train()
    settings = {**SMALL, **sizes, "gradient_accumulation_steps": 1}
    run_two_ranks(
        Path(__file__).with_name("fsdp2_worker.py"),
        *(store.path, tmp_path / "two", json.dumps(settings)),
    )
    two_rank_log, one_rank_log = (drop_timings(read_log(tmp_path / name)) for name in ("two", "one"))
    for actual, expected in zip(two_rank_log, one_rank_log, strict=True):
        assert actual.pop("origin") == expected.pop("origin")
        assert actual == pytest.approx(expected, rel=1e-3)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "two" / "model")
    for actual, expected in zip(model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_bfloat16_trains(store, tmp_path):
    run = make_trainer(store, tmp_path, bf16=True, max_steps=3)
    run.train()
    assert {weight.dtype for weight in run.model.parameters()} == {torch.float32}
    assert run.log_history[-1]["loss"] < run.log_history[0]["loss"]
