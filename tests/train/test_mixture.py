"""Training on a mixture, and edits of stopped runs."""

import json
from contextlib import contextmanager

import pytest

from batchloom import Edit, Mixture, PlanError, SettingsError, StateError, open_store
from batchloom.adapters.logging import read_log
from batchloom.adapters.rank_group import join_ranks
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line as command
from batchloom.core.errors import TrainError
from batchloom.plan import SourceSpec
from batchloom.testing import append_documents, write_store
from batchloom.train import (
    RunFolder,
    RunLog,
    edit_run,
    make_settings,
    set_up_run,
    submit_edit,
    train,
)
from batchloom.train.loop import iter_training
from batchloom.train.run_data import open_source
from train.runs import BASE_SETTINGS, counting_documents, read_steps, small_store


@pytest.fixture
def mixture(tmp_path):
    small_store(tmp_path / "web")
    write_store(
        tmp_path / "code",
        {"train": counting_documents(60, 5), "val": counting_documents(20, 7)},
    )
    write_store(tmp_path / "math", counting_documents(30, 6))
    return read_mixture(f"{tmp_path}/web=0.7,{tmp_path}/code=0.3,{tmp_path}/math")


@contextmanager
def open_mixture_run(mixture, out, changes=None, *, resume=False):
    """Yield the run, and the list of the lines that it prints."""
    lines, folder = [], RunFolder(out)
    with join_ranks("cpu") as ranks:
        data = open_source(mixture, folder, ranks, resume=resume)
        settings = make_settings(BASE_SETTINGS, {"steps": 12, "save_interval": 3, **(changes or {})})
        yield set_up_run(data, settings, folder, ranks, RunLog(folder.log, lines.append)), lines


def run_mixture(mixture, out, changes=None, *, resume=False, stop_at=None):
    with open_mixture_run(mixture, out, changes, resume=resume) as (run, lines):
        return train(run, resume=resume, stop_at=stop_at), "\n".join(lines)


def test_a_run_on_a_mixture_logs_shares_and_val_losses_by_source(mixture, tmp_path):
    outcome, output = run_mixture(mixture, tmp_path / "run", {"eval_interval": 6})
    assert outcome.steps == 12
    assert "mix    web 69." in output
    assert "of the sequences" in output
    assert "val    none of math: the data has no val subset" in output
    log = read_log(tmp_path / "run" / "log.jsonl")
    steps = [entry for entry in log if entry["kind"] == "step"]
    for entry in steps:
        assert sum(source["tokens"] for source in entry["sources"].values()) == entry["tokens"]
    epochs = [entry["sources"]["web"]["epoch"] for entry in steps]
    assert epochs == sorted(epochs)
    assert epochs[-1] > 0
    val_entries = [entry for entry in log if entry["kind"] == "val"]
    assert [(entry["step"], sorted(entry["sources"])) for entry in val_entries] == [
        (5, ["code", "web"]),
        (11, ["code", "web"]),
    ]
    assert outcome.val_loss == val_entries[-1]["loss"]
    assert (
        min(val_entries[-1]["sources"].values()) <= val_entries[-1]["loss"] <= max(val_entries[-1]["sources"].values())
    )


def test_a_run_resumes_exactly_on_the_generations_it_began_with(mixture, tmp_path):
    run_mixture(mixture, tmp_path / "whole")
    run_mixture(mixture, tmp_path / "run", stop_at=5)
    append_documents(tmp_path / "web", counting_documents(9, 9))
    newer = read_mixture(f"{tmp_path}/web=0.7,{tmp_path}/code=0.3")
    run_mixture(newer, tmp_path / "run", resume=True)
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "whole")


def test_other_weights_are_refused_by_name_and_an_edit_is_not(mixture, tmp_path):
    run_mixture(mixture, tmp_path / "run", stop_at=6)
    changed_mixture = Mixture({"web": 1, "code": 1}, stores=mixture.stores)
    with pytest.raises(StateError, match=r"data\.mixture\.weights\.code was 0\.3 and is 1\.0"):
        run_mixture(changed_mixture, tmp_path / "run", resume=True)
    preview = edit_run(tmp_path / "run", mixture, Edit(step=8, weights={"math": 1}, note="maths"), dry_run=True)
    newest = RunFolder(tmp_path / "run").find_newest_checkpoint()
    assert json.loads((newest / "state.json").read_text())["loader"]["edits"] == []
    assert "mix    math 100.00% of the sequences, after 8 steps; no longer read: code, web" in preview.after
    edit_run(tmp_path / "run", mixture, Edit(step=8, weights={"math": 1}, note="maths"))
    edit_run(newest, mixture, Edit(step=10, global_batch_size=2, seq_len=16))
    outcome, output = run_mixture(mixture, tmp_path / "run", resume=True)
    assert outcome.steps == 12
    assert "2 edits in the journal, the last applies after 10 steps" in output
    entries = [e for e in read_log(tmp_path / "run" / "log.jsonl") if e["kind"] == "step"]
    assert [e["tokens"] for e in entries if e["step"] >= 10] < [40] * 2
    state = json.loads((RunFolder(tmp_path / "run").find_newest_checkpoint() / "state.json").read_text())
    assert [entry["step"] for entry in state["loader"]["edits"]] == [8, 10]
    assert state["loader"]["edits"][0]["note"] == "maths"


def test_requested_weights_are_applied_or_refused(mixture, tmp_path):
    out = tmp_path / "run"
    run_mixture(mixture, out, stop_at=6)
    for weights in ({"math": 1}, {"wbe": 1}):
        with pytest.raises(TrainError, match="no answer within 0 s"):
            submit_edit(out / "edits", Edit(step=8, weights=weights), 0, lambda: False)
    _, output = run_mixture(mixture, out, resume=True)
    assert "mix    math 100.00% of the sequences, after 8 steps" in output
    assert "is refused: weights.wbe: unknown source; the sources are code, math, web" in output
    accepted, refused = (json.loads(p.read_text()) for p in sorted((out / "edits").iterdir()))
    assert accepted["taken"]["added"].keys() == {"math"}
    assert "refused" in refused
    state = json.loads((RunFolder(out).find_newest_checkpoint() / "state.json").read_text())
    assert state["loader"]["edits"] == [accepted["taken"]]


def test_invalid_edits_change_nothing(mixture, tmp_path):
    out = tmp_path / "run"
    changes = {"steps": 3, "save_interval": 0}
    run_mixture(mixture, out, changes, stop_at=3)
    state = RunFolder(out).find_newest_checkpoint() / "state.json"
    before = state.read_bytes()
    for edit, error, message in (
        (Edit(step=2, weights={"web": 1}), PlanError, "Step 2 was done already"),
        (Edit(step=4, weights={"wbe": 1}), SettingsError, "weights.wbe: unknown source"),
        (Edit(step=4, ban={"web": [150]}), SettingsError, "document 150 does not exist"),
    ):
        with pytest.raises(error, match=message):
            edit_run(out, mixture, edit)
    without_math = Mixture({"web": 0.7, "code": 0.3}, stores={n: mixture.stores[n] for n in ("web", "code")})
    edit_run(out, mixture, Edit(step=5, weights={"math": 1}))
    with pytest.raises(StateError, match="adds source 'math' at step 5: add its store to"):
        edit_run(out, without_math, Edit(step=7, skip=1))
    edited = state.read_bytes()
    state.write_bytes(edited.replace(b'"step": 5', b'"step": 6', 1))
    with pytest.raises(StateError, match="its check does not match"):
        edit_run(out, mixture, Edit(step=7, skip=1))
    state.write_bytes(before.replace(b'"step": 3', b'"step": 4', 1))
    with pytest.raises(StateError, match="its check does not match"):
        edit_run(out, mixture, Edit(step=5, skip=1))


def test_a_run_stops_when_its_source_is_exhausted(mixture, tmp_path):
    math_only = Mixture({"math": 1}, stores=mixture.stores, exhausted="stop", sources={"math": SourceSpec(epochs=2)})
    outcome, output = run_mixture(math_only, tmp_path / "run", {"steps": 50, "save_interval": 0})
    assert 3 < outcome.steps < 50
    assert f"mix    math is exhausted after {outcome.steps} steps: the run ends" in output
    assert f"The sources are exhausted after {outcome.steps} of 50 steps; the run ends." in output
    assert RunFolder(tmp_path / "run").find_newest_checkpoint().name == f"step_{outcome.steps:08d}"
    resumed, _ = run_mixture(math_only, tmp_path / "run", {"steps": 50, "save_interval": 0}, resume=True)
    assert resumed.steps == outcome.steps
    with open_mixture_run(math_only, tmp_path / "new", {"steps": 50, "save_interval": 0}) as (run, _):
        assert list(iter_training(run)) == list(range(outcome.steps + 1))


def test_the_commands(mixture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--mixture", "web=0.7,code=0.3,math"]
    sizes = ["--seq-len", "32", "--global-batch-size", "4", "--device", "cpu", "--out", "run"]
    assert command(["train", *options, *sizes, "--max-iters", "2"]) == 0
    edits = ["--weights", "web=1,math=1", "--ban", "web:1,2", "--ban", "code:3", "--note", "n"]
    assert command(["edit", "run", *options, "--at-step", "3", *edits]) == 0
    output = capsys.readouterr().out
    assert "edit 1 of its journal" in output
    assert "of the sequences, after 3 steps; no longer read: code" in output
    assert command(["train", *options, *sizes, "--max-iters", "5", "--resume"]) == 0
    for args, message in (
        (["train", "--data", "web", *options], "--data and --mixture exclude each other"),
        (["edit", "run", *options, "--data", "web", "--at-step", "9"], "give either --data or --mixture"),
        (["edit", "run", *options, "--at-step", "9", "--ban", "web:x"], "is no SOURCE:NUMBER"),
        (["edit", "run", *options, "--at-step", "9", "--ban", "17,18"], "(code, math, web): give --ban code:17,18"),
        (
            ["edit", "run", *options, "--at-step", "9", "--ban", "cod:17"],
            "ban.cod: unknown source; the sources are code",
        ),
        (["edit", "run", "--data", "web", "--at-step", "9", "--ban", "web:17"], "no source web: give --ban 17"),
        (["edit", "run", *options, "--at-step", "9", "--weights", "web"], "is not NAME=WEIGHT"),
        (["edit", "run", *options, "--at-step", "9"], "the edit changes nothing"),
    ):
        assert command(args) != 0
        assert message in capsys.readouterr().err


def test_a_run_on_one_store_is_edited_too(tmp_path, mixture):
    store = tmp_path / "web"
    out, folder = tmp_path / "run", RunFolder(tmp_path / "run")
    for resume in (False, True):
        with join_ranks("cpu") as ranks:
            settings = make_settings(BASE_SETTINGS, {"steps": 8, "save_interval": 3})
            run = set_up_run(store, settings, folder, ranks, RunLog(folder.log, print))
            train(run, resume=resume, stop_at=None if resume else 4)
        if not resume:
            edit_run(out, store, Edit(step=5, ban={"data": range(40)}, skip=3))
    assert len(open_store(store)) == 150
    assert [entry[0] for entry in read_steps(out)] == list(range(8))
