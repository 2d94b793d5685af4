"""Training loop: exact resuming, gradient of the global batch, plain files."""

import json
import math
import shutil

import pytest
import torch

from batchloom import Loader, OutputError, SettingsError, StateError, StoreError
from batchloom.adapters.logging import read_log
from batchloom.adapters.rank_group import join_ranks
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from batchloom.train import (
    OptimSettings,
    RunFolder,
    RunLog,
    explain_memory_errors,
    make_settings,
    run_optimizer_step,
    set_up_run,
)
from batchloom.train.loop import compute_learning_rate, evaluate_val_loss
from train.runs import BASE_SETTINGS, counting_documents, read_steps, run_training, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def full_run(store, tmp_path_factory):
    """Uninterrupted run of 80 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    outcome, lines = run_training(store, out)
    return out, outcome, lines


def test_it_learns_and_logs_the_origin_of_the_data(store, full_run):
    out, outcome, lines = full_run
    losses = [loss for _, loss, _, _ in read_steps(out)]
    assert len(losses) == outcome.steps == 80
    assert losses[-1] < losses[0] - 2
    assert outcome.val_loss < losses[0] - 2
    entries = read_log(out / "log.jsonl")
    assert {entry["origin"] for entry in entries if entry["kind"] == "step"} == {
        f"source=real s/train {store.fingerprint[:12]}"
    }
    assert [entry["loss"] for entry in entries if entry["kind"] == "val"] == [outcome.val_loss]
    assert "source=real s/train" in lines[0]


def test_stopping_at_40_and_resuming_is_the_same_to_the_last_bit(store, full_run, tmp_path):
    reference, outcome, _ = full_run
    _, lines = run_training(store, tmp_path / "run", stop_at=40)
    assert len(read_steps(tmp_path / "run")) == 40
    resumed, lines = run_training(store, tmp_path / "run", resume=True)
    assert "resume from the checkpoint after 40 steps" in lines
    assert read_steps(tmp_path / "run") == read_steps(reference)
    assert resumed.val_loss == outcome.val_loss
    newest = [RunFolder(folder).find_newest_checkpoint() for folder in (reference, tmp_path / "run")]
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes()


def test_a_killed_run_repeats_the_steps_after_its_last_checkpoint(store, full_run, tmp_path):
    reference, _, _ = full_run
    out = tmp_path / "run"
    run_training(store, out, {"save_interval": 10}, stop_at=35)
    shutil.rmtree(out / "checkpoints" / "step_00000035")
    (out / "checkpoints" / "step_00000040.partial").mkdir()
    with (out / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    _, lines = run_training(store, out, {"save_interval": 30}, resume=True)
    assert "resume from the checkpoint after 30 steps" in lines
    assert "changed   save_interval was 10 and is 30, after 30 steps" in lines
    assert read_steps(out) == read_steps(reference)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step_00000060",
        "step_00000080",
    ]


def test_a_finished_run_trains_no_more_and_draws_its_curve(store, full_run, drawn_curves):
    out, _, _ = full_run
    before = read_steps(out)
    outcome, lines = run_training(store, out, resume=True)
    assert outcome.steps == 80
    assert any("80 of 80 steps are done already" in line for line in lines)
    assert read_steps(out) == before
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_can_be_made_longer(store, tmp_path):
    run_training(store, tmp_path / "run", {"steps": 4})
    outcome, lines = run_training(store, tmp_path / "run", {"steps": 6}, resume=True)
    assert outcome.steps == 6
    assert "changed   steps was 4 and is 6, after 4 steps" in lines
    assert [step for step, *_ in read_steps(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]


def test_resuming_something_else_names_the_fields(store, full_run, tmp_path):
    out, _, _ = full_run
    changes = {"seq_len": 64, "global_batch_size": 8, "order": {"packing": "wrap"}, "seed": 1}
    with pytest.raises(StateError) as caught:
        run_training(store, out, changes, resume=True)
    for sentence in ("seq_len was 32 and is 64", "global_batch_size was 4 and is 8"):
        assert sentence in str(caught.value)
    assert "packing was 'best_fit' and is 'wrap'; seed was 0 and is 1" in str(caught.value)
    other_store = small_store(tmp_path / "other", longest=30)
    with pytest.raises(StateError, match=f"was started on {store.path}, and {other_store.path} is given"):
        run_training(other_store, out, resume=True)
    larger_settings = make_settings({**BASE_SETTINGS, "model": {"layers": 3, "heads": 2, "width": 32}}, {})
    with pytest.raises(StateError, match="model.layers was 2 and is 3"):
        run_training(store, out, {"model": larger_settings.model}, resume=True)


def test_a_folder_with_something_in_it_is_refused(store, full_run, tmp_path):
    out, _, _ = full_run
    with pytest.raises(TrainError, match=r"holds a run already \(up to step 80\).*--resume"):
        run_training(store, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(TrainError, match="not an empty folder and holds no run"):
        run_training(store, tmp_path / "mine")
    with pytest.raises(TrainError, match="holds no run"):
        run_training(store, tmp_path / "mine", resume=True)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "project" / "data").mkdir(parents=True)
    with pytest.raises(TrainError, match="not an empty folder and holds no run"):
        run_training(store, tmp_path / "project")


def test_no_file_of_a_run_is_a_pickle(full_run):
    out, _, _ = full_run
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        if path.suffix in (".json", ".jsonl"):
            [json.loads(line) for line in path.read_text().splitlines()] if (path.suffix == ".jsonl") else json.loads(
                path.read_text()
            )
        else:
            assert path.suffix in (".safetensors", ".png", ".lock")
            assert not path.read_bytes().startswith((b"\x80", b"PK"))


def test_a_loss_that_is_not_finite_stops_the_run(store, tmp_path):
    with pytest.raises(TrainError, match=r"step \d+ is .*learning rate of .*Lower the learning rate \(--lr"):
        run_training(store, tmp_path / "run", {"optim": {"lr": 1e12}, "save_interval": 1})
    newest = RunFolder(tmp_path / "run").find_newest_checkpoint()
    assert newest is None or all(math.isfinite(loss) for _, loss, _, _ in read_steps(tmp_path / "run"))


def test_weights_that_are_not_finite_are_not_saved(store, tmp_path):
    """The learning rate is so high that the first step overflows the weights."""
    with pytest.raises(TrainError, match=r"not finite after 1 step .*Lower the learning rate \(--lr"):
        run_training(store, tmp_path / "run", {"optim": {"lr": 1e39}, "save_interval": 1})
    assert RunFolder(tmp_path / "run").find_newest_checkpoint() is None


def test_a_val_loss_that_is_not_finite_stops_the_run(store, tmp_path):
    with join_ranks("cpu") as ranks:
        settings = make_settings(BASE_SETTINGS, {})
        run = set_up_run(store.path, settings, RunFolder(tmp_path), ranks, RunLog(None, print))
    with torch.no_grad():
        run.model.norm.gain.fill_(math.nan)
    with pytest.raises(TrainError, match=r"val loss after step 7 is nan .*Lower the learning rate \(--lr"):
        evaluate_val_loss(run, 7)


SINGLE_TOKENS = [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize("packing", ["best_fit", "wrap", "none"])
def test_data_with_nothing_to_predict_is_refused(tmp_path, packing):
    ones = write_store(tmp_path / "s", SINGLE_TOKENS)
    with pytest.raises(TrainError, match="None of the first 80 steps .* anything to predict.*longer"):
        run_training(ones, tmp_path / "run", {"order": {"packing": packing}})
    assert not (tmp_path / "run").exists()


def test_documents_that_are_cut_to_single_tokens(tmp_path):
    """With some seeds ``wrap`` cuts the only pair of tokens."""
    pair = write_store(tmp_path / "s", [[1], [2, 3], [4]])
    seeds_without_training = [seed for seed in range(6) if not _has_loss(pair, tmp_path / str(seed), seed)]
    assert 0 < len(seeds_without_training) < 6


def _has_loss(store, out, seed):
    try:
        run_training(store, out, {"order": {"packing": "wrap"}, "seq_len": 2, "steps": 2, "seed": seed})
    except TrainError:
        return False
    return any(loss for _, loss, *_ in read_steps(out))


def test_a_step_with_nothing_to_predict_is_legal(tmp_path):
    mixed = write_store(tmp_path / "s", [*SINGLE_TOKENS, [6, 7, 8], [9]])
    sizes = {"seq_len": 4, "global_batch_size": 1, "order": {"packing": "none"}, "steps": 7}
    run_training(mixed, tmp_path / "run", sizes)
    assert sorted(loss > 0 for _, loss, *_ in read_steps(tmp_path / "run")) == [False] * 6 + [True]


def test_a_val_subset_with_nothing_to_predict_is_none(tmp_path):
    store = write_store(tmp_path / "s", {"train": counting_documents(50, 0), "val": SINGLE_TOKENS})
    outcome, lines = run_training(store, tmp_path / "run", {"steps": 2})
    assert outcome.val_loss is None
    assert any("val    none" in line and "nothing to predict" in line for line in lines)
    assert {entry["kind"] for entry in read_log(tmp_path / "run" / "log.jsonl")} == {
        "start",
        "step",
    }


def test_a_val_subset_of_documents_that_are_all_too_long_is_none(tmp_path):
    long_documents = [[*range(40), 99]]
    store = write_store(tmp_path / "s", {"train": counting_documents(50, 0), "val": long_documents})
    sizes = {"seq_len": 16, "order": {"overlong": "drop"}, "steps": 2}
    outcome, lines = run_training(store, tmp_path / "run", sizes)
    assert outcome.val_loss is None
    assert any("val    none: No sequence can be made of 1 document" in line for line in lines)


@pytest.mark.parametrize("subset", ["train", "val"])
def test_an_id_beyond_the_vocabulary_is_damage_of_the_store(tmp_path, subset):
    store = small_store(tmp_path / "s")
    tokens = store.path / subset / "shard_00000.bin"
    tokens.write_bytes(b"\xff\xff" * (tokens.stat().st_size // 2))
    message = r"shard_00000.bin holds token id 65535 in document \d+, .*batchloom check"
    with pytest.raises(StoreError, match=message):
        run_training(store, tmp_path / "run", {"steps": 1})


def test_a_folder_that_cannot_be_written(store, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Cannot write .*: a part of the path is a file"):
        run_training(store, tmp_path / "file" / "run")


def test_running_out_of_memory_names_what_to_lower():
    settings = make_settings(BASE_SETTINGS, {"batch_size": 4})
    message = "passes of 4 rows of 32 tokens: lower --batch-size .* --seq-len.* model.width"
    with pytest.raises(TrainError, match=message), explain_memory_errors(settings, 64):
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(TrainError, match=message), explain_memory_errors(settings, 64):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with pytest.raises(RuntimeError, match="shapes"), explain_memory_errors(settings, 64):
        raise RuntimeError("shapes cannot be multiplied")


def run_one_step(store, out, batch_size, uneven="refuse"):
    """Return loss, norm and gradients of a step in passes of ``batch_size`` rows."""
    sizes = {"global_batch_size": 8, "batch_size": batch_size, "order": {"uneven": uneven}}
    settings = make_settings(BASE_SETTINGS, sizes)
    with join_ranks("cpu") as ranks:
        run = set_up_run(store.path, settings, RunFolder(out), ranks, RunLog(None, print))
    gradients = {}
    for name, weight in run.model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda w, name=name: gradients.update({name: w.grad.clone()}))
    # The documents are short, so rows differ in their numbers of trained tokens.
    loss, norm, _ = run_optimizer_step(run, run.loader[0], lr=0.0)
    return loss, norm, gradients


def test_passes_do_not_change_the_gradient(tmp_path):
    store = small_store(tmp_path / "s", longest=20)
    loss, norm, gradients = run_one_step(store, tmp_path, 8)
    for rows, uneven in ((4, "refuse"), (2, "refuse"), (1, "refuse"), (3, "pad"), (9, "pad")):
        pass_loss, pass_norm, pass_gradients = run_one_step(store, tmp_path, rows, uneven)
        assert pass_loss == pytest.approx(loss, rel=1e-6)
        assert pass_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(pass_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_loss_is_per_trained_token(store, tmp_path):
    loss, _, _ = run_one_step(store, tmp_path, 2)
    settings = make_settings(BASE_SETTINGS, {"global_batch_size": 8})
    with join_ranks("cpu") as ranks:
        run = set_up_run(store.path, settings, RunFolder(tmp_path), ranks, RunLog(None, print))
    batch = Loader(store, seq_len=32, global_batch_size=8, steps=80, rank=0, world_size=1)[0]
    with torch.no_grad():
        expected = float(run.model(**batch)) / int((batch["labels"] != -100).sum())
    assert loss == pytest.approx(expected, rel=1e-6)


def test_the_learning_rate_warms_up_and_falls():
    optim = OptimSettings(lr=1.0, warmup_steps=4, final_lr_share=0.1)
    rates = [compute_learning_rate(step, 20, optim) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_store_without_val_has_no_val_loss(tmp_path):
    store = write_store(tmp_path / "s", counting_documents(50, 0))
    outcome, lines = run_training(store, tmp_path / "run", {"steps": 2})
    assert outcome.val_loss is None
    assert any(line.startswith("val    none") for line in lines)


def test_a_bare_prefix_needs_its_vocabulary_stated(store, tmp_path):
    prefix = tmp_path / "shard"
    for suffix in (".bin", ".idx"):
        shutil.copy(store.path / "train" / f"shard_00000{suffix}", prefix.with_suffix(suffix))

    class Prefix:
        path = prefix

    with pytest.raises(SettingsError, match="model.vocab_size: missing"):
        run_training(Prefix, tmp_path / "run", {"steps": 2})
    shape = {**BASE_SETTINGS["model"], "vocab_size": 257}
    stated = make_settings({**BASE_SETTINGS, "model": shape}, {}).model
    outcome, _ = run_training(Prefix, tmp_path / "run", {"steps": 2, "model": stated})
    assert outcome.steps == 2
    shape = {**BASE_SETTINGS["model"], "vocab_size": 60}
    small = make_settings({**BASE_SETTINGS, "model": shape}, {}).model
    with pytest.raises(TrainError, match="model.vocab_size"):
        run_training(Prefix, tmp_path / "small", {"steps": 2, "model": small})
