"""Locks of run folders, and edits of runs that are training."""

import errno
import json
import os
import re
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchloom import Edit, Loader, PlanError, StateError
from batchloom.adapters.logging import read_log
from batchloom.cli import run_command_line as command
from batchloom.core import files
from batchloom.core.errors import StoreConflictError, TrainError
from batchloom.testing import write_store
from batchloom.train import RunFolder, edit_run, submit_edit
from batchloom.train.run_edits import EditInbox
from processes import make_rank_environments, run_ranks, start_processes
from train.runs import BASE_SETTINGS, WORKER, read_steps, run_training, small_store, wait_for_step
from waiting import LIMIT_S, wait_until

GATED_WORKER = Path(__file__).with_name("gated_worker.py")
# Script that locks a run, as a trainer does, until it is killed or there is a file like the given one.
LOCK_SCRIPT = """
import sys
from pathlib import Path
from batchloom.train.run_folder import RunFolder
from waiting import wait_until
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    wait_until(lambda: list(Path(sys.argv[1]).glob(sys.argv[2])), "a file that ends the lock")
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def stopped(store, tmp_path_factory):
    """Run that was stopped after 4 of 12 steps."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    run_training(store, out, {"steps": 12}, stop_at=4)
    return out


@pytest.fixture
def out(stopped, tmp_path):
    """Copy of the stopped run."""
    return shutil.copytree(stopped, tmp_path / "run")


@contextmanager
def lock_run(out, until="never"):
    script = out.with_name("holds.py")
    script.write_text(LOCK_SCRIPT)
    with start_processes(script, out, until) as (process,):
        wait_until(lambda: process.out.read_text() or not process.process.is_alive(), "the lock")
        assert process.out.read_text() == "held\n"
        yield process


def submit_unanswered(out, edit):
    """Submit an edit to a run that does not answer; return the request's file."""
    with pytest.raises(TrainError, match="gave no answer within 0 s"):
        submit_edit(out / "edits", edit, 0, lambda: False)
    return max((out / "edits").glob("*.json"))


def count_plan_tokens(store, steps, *edits):
    loader = Loader(store, seq_len=32, global_batch_size=4, steps=steps, rank=0, world_size=1)
    for edit in edits:
        loader.edit(edit)
    counts = []
    for step in range(steps):
        rows = loader.plan.rows(*loader.plan.positions_of(step))
        # Banned documents are padding.
        lengths = rows.lengths if rows.banned is None else rows.lengths[~rows.banned]
        counts.append(int(lengths.sum()))
    return counts


def read_token_counts(out):
    return [tokens for *_, tokens in read_steps(out)]


def read_journal(out):
    newest = RunFolder(out).find_newest_checkpoint()
    return json.loads((newest / "state.json").read_text())["loader"]["edits"]


def test_two_ranks_take_an_edit_at_one_step_and_a_kill_loses_nothing(tmp_path, store, capfd):
    out, config = tmp_path / "run", tmp_path / "small.json"
    config.write_text(json.dumps({**BASE_SETTINGS, "steps": 10**6}))
    args = ["train", "--data", store.path, "--config-file", config, "--device", "cpu"]
    args = [*map(str, args), "--out", str(out)]
    # The ranks stay at a step until a request arrives, and at the last one until they are killed.
    gates, last = {4: 1, 5: 2, 6: 3, 7: 4, 15: 99}, 14
    command_line = [GATED_WORKER, out, json.dumps(gates), *args]
    with start_processes(*command_line, environments=make_rank_environments()) as (process, _):
        try:
            wait_for_step(process, out, 3)
            edit = Edit(step=9, global_batch_size=2, note="n")
            result = edit_run(out, store.path, edit)
            assert (result.checkpoint, result.number) == (None, 1)
            with pytest.raises(PlanError, match=r"refused the edit.* Step 2 was delivered.* can change"):
                edit_run(out, store.path, Edit(step=2, skip=1))
            ban_step = 12
            edit_args = ["--data", str(store.path), "--at-step", str(ban_step)]
            assert command(["edit", str(out), *edit_args, "--global-batch-size", "3"]) == 1
            assert "2 ranks" in capfd.readouterr().err
            assert command(["edit", str(out), *edit_args, "--ban", "0,1,2,3,4,5,6,7"]) == 0
            assert re.search(r"in use by process \d+ on .* sent", capfd.readouterr().err)
            assert command([*args, "--resume"]) == 1
            assert re.search(r"in use by process \d+ on .* stop it", capfd.readouterr().err)
            wait_for_step(process, out, last)
        finally:
            os.kill(int(RunFolder(out).read_holder().split()[1]), signal.SIGKILL)
            process.wait()
    actual = read_token_counts(out)
    assert RunFolder(out).find_newest_checkpoint() is None
    expected = count_plan_tokens(store, last, edit, Edit(step=ban_step, ban={"data": range(8)}))
    assert actual == expected
    # No checkpoint had the edits, so they are applied again, once.
    run_training(store, out, {"steps": last}, resume=True)
    assert read_token_counts(out) == expected
    assert [entry["step"] for entry in read_journal(out)] == [edit.step, ban_step]


def test_a_request_without_an_answer_is_taken_up_once(store, out):
    edit = Edit(step=6, skip=3)
    late = submit_unanswered(out, Edit(step=2, skip=1))
    path = submit_unanswered(out, edit)
    with pytest.raises(StateError, match="The same edit is already pending"):
        submit_edit(out / "edits", edit, 0, lambda: False)
    with pytest.raises(StateError, match=r"received the edit in .*000001.*That edit must be applied first"):
        edit_run(out, store.path, Edit(step=8, skip=1))
    _, lines = run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert f"edit   {path.name} is accepted, and applies after 6 steps" in lines
    assert any(f"{late.name} is refused: Step 2 was delivered" in line for line in lines)
    assert "Step 2 was delivered" in json.loads(late.read_text())["refused"]
    assert [entry["edit"]["step"] for entry in read_log(out / "log.jsonl") if entry["kind"] == "edit"] == [6]
    # Simulate a crash before a checkpoint has the edit, then after one.
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    for stop in (7, 9, 12):
        run_training(store, out, {"steps": 12}, resume=True, stop_at=stop)
        assert read_journal(out) == [json.loads(path.read_text())["taken"]]
    assert read_token_counts(out) == count_plan_tokens(store, 12, edit)


INVALID_EDITS = [
    ({}, "missing 1 required"),
    ({"step": 8, "skpi": 1}, "skpi"),
    ({"step": "x", "skip": 1}, "step: "),
    ({"step": 8, "ban": {"data": "5"}}, "'5' is not a document number"),
    ({"step": 8, "weights": 5}, "a single store has no weights"),
    ({"step": 8, "ban": {"data": [10**9]}}, "does not exist"),
    ({"step": 4, "seq_len": 1 << 24, "global_batch_size": 1 << 24}, "lower global_batch_size"),
]


def test_invalid_edits_are_refused_and_the_run_continues(store, out):
    submit_unanswered(out, Edit(step=8, skip=1)).unlink()
    paths = [out / "edits" / f"{number:06d}-{number:08x}.json" for number in range(len(INVALID_EDITS))]
    for path, (edit, _) in zip(paths, INVALID_EDITS, strict=True):
        path.write_text(json.dumps({"edit": edit}))
    outcome, lines = run_training(store, out, {"steps": 12}, resume=True, stop_at=5)
    assert outcome.steps == 5
    assert read_journal(out) == []
    for path, (_, message) in zip(paths, INVALID_EDITS, strict=True):
        assert message in json.loads(path.read_text())["refused"]
        assert any(f"{path.name} is refused: " in line for line in lines)


def test_an_applied_edit_is_applied_again_on_resume(store, out):
    path = submit_unanswered(out, Edit(step=6, global_batch_size=6))
    run_training(store, out, {"steps": 12}, resume=True, stop_at=5)
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    with pytest.raises(TrainError, match=rf"applied the edit in .*{path.name} before .*batch_size"):
        run_training(store, out, {"steps": 12, "batch_size": 4}, resume=True)
    path.write_text("{")
    with pytest.raises(StateError, match="is not JSON.* Fix the file, or delete it"):
        run_training(store, out, {"steps": 12}, resume=True)
    path.unlink()
    run_training(store, out, {"steps": 12}, resume=True)
    assert read_token_counts(out) == count_plan_tokens(store, 12)


def test_a_run_is_locked_until_its_process_dies(store, out):
    with lock_run(out) as holder:
        pid = holder.process.pid
        with pytest.raises(StoreConflictError, match=rf"in use by process {pid} on .*--out"):
            run_training(store, out, {"steps": 12}, resume=True)
        edit = Edit(step=6, skip=1)
        with pytest.raises(TrainError, match=r"no answer within 0\.3 s.* stays in .*Delete that file"):
            edit_run(out, store.path, edit, patience=0.3)
        with pytest.raises(TrainError, match="Give the folder of the run"):
            edit_run(RunFolder(out).find_newest_checkpoint(), store.path, edit)
        lines = []
        assert edit_run(out, store.path, edit, dry_run=True, print_line=lines.append).checkpoint
        assert "in use: changes since its newest checkpoint are not included" in lines[0]
    run_training(store, out, {"steps": 12}, resume=True)
    assert len(read_journal(out)) == 1


def test_a_run_that_ends_meanwhile_is_edited_as_a_stopped_one(store, out):
    lines = []
    with lock_run(out, until="edits/*.json"):
        result = edit_run(out, store.path, Edit(step=4, skip=1), print_line=lines.append)
    assert result.checkpoint == RunFolder(out).find_newest_checkpoint()
    assert lines[1:] == ["The run ended in the meantime."]
    assert not list((out / "edits").iterdir())
    assert len(read_journal(out)) == 1


@pytest.mark.slow
def test_a_ban_of_many_documents_is_saved_and_read_again(tmp_path, capfd):
    store = write_store(tmp_path / "many", {"train": [[1 + n % 200, 2, 3] for n in range(61_000)]})
    out, ban = tmp_path / "run", Edit(step=6, ban={"data": range(60_000)})
    run_training(store, out, {"steps": 12}, stop_at=4)
    args = ["edit", str(out), "--data", str(store.path), "--at-step", "6", "--dry-run"]
    assert command([*args, "--ban", ",".join(map(str, range(9_000)))]) == 0
    output = capfd.readouterr().out
    assert '{"data": "9,000 documents from 0 to 8999"}' in output
    assert "Would be written to" in output
    assert command([*args, "--skip", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["written"] is False
    assert edit_run(out, store.path, ban).written
    path = submit_unanswered(out, Edit(step=7, ban={"data": range(60_500)}))
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert path.stat().st_size > 1 << 19
    # Without the checkpoint only the answer remains.
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert [len(entry["ban"]["data"]) for entry in read_journal(out)] == [60_000, 60_500]
    assert edit_run(out, store.path, Edit(step=9, skip=1)).number == 3


def test_a_request_deleted_while_ranks_try_it_is_withdrawn(store, out, monkeypatch):
    errors = []
    take = EditInbox.take

    def take_and_delete(inbox, run):
        requests = take(inbox, run)
        for path, _ in requests:
            path.unlink()
        return requests

    def submit():
        with pytest.raises(StateError) as refused:
            submit_edit(out / "edits", Edit(step=6, skip=1), LIMIT_S, lambda: False)
        errors.append(str(refused.value))

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: list((out / "edits").glob("*.json")), "the request")
    monkeypatch.setattr(EditInbox, "take", take_and_delete)
    _, lines = run_training(store, out, {"steps": 12}, resume=True)
    thread.join(LIMIT_S)
    assert "the edit is withdrawn" in errors[0]
    assert any(line.endswith("was deleted, so the edit is withdrawn") for line in lines)
    assert read_journal(out) == []
    assert not list((out / "edits").iterdir())
    assert read_token_counts(out) == count_plan_tokens(store, 12)


def test_an_invalid_request_does_not_drop_the_others(store, out, monkeypatch):
    take, valid_paths = EditInbox.take, []

    def take_after_submission(inbox, run):
        requests = take(inbox, run)
        if not valid_paths:
            paths = [submit_unanswered(out, Edit(step=11, skip=number)) for number in (4, 3, 2, 1)]
            for path, content in zip(paths, ("{", '{"taken": {}}', '{"edit": {}, "number": "x"}'), strict=False):
                path.write_text(content)
            valid_paths.append(paths[-1])
        return requests

    monkeypatch.setattr(EditInbox, "take", take_after_submission)
    _, lines = run_training(store, out, {"steps": 12}, resume=True)
    assert [line.split("edits/")[1][:6] for line in lines if "Fix the file, or delete it" in line] == [
        "000001",
        "000002",
        "000003",
    ]
    assert read_journal(out) == [json.loads(valid_paths[0].read_text())["taken"]]


def test_a_dry_run_needs_no_lock(store, out):
    edit = Edit(step=6, skip=1)
    (out / "run.lock").unlink()
    assert not edit_run(out, store.path, edit, dry_run=True).written
    assert not (out / "run.lock").exists()
    edit_run(out, store.path, edit)
    content = (out / "run.lock").read_text()
    assert not edit_run(out, store.path, Edit(step=7, skip=1), dry_run=True).written
    assert (out / "run.lock").read_text() == content


def test_a_damaged_older_checkpoint_does_not_block_an_edit(store, out):
    older = RunFolder(out).find_newest_checkpoint()
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    (older / "state.json").write_text("{}")
    assert edit_run(out, store.path, Edit(step=10, skip=1)).number == 1


def test_a_request_that_is_missing_when_read_is_ignored(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 4}, stop_at=2)
    (out / "edits").mkdir()
    (out / "edits" / "000001-whatever.json").symlink_to("nowhere")
    assert run_training(store, out, {"steps": 4}, resume=True)[0].steps == 4
    assert edit_run(out, store.path, Edit(step=4, skip=1)).number == 1


def test_an_edit_that_no_step_follows_is_in_the_newest_checkpoint(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 4})
    path = submit_unanswered(out, Edit(step=4, skip=1))
    run_training(store, out, {"steps": 4}, resume=True)
    assert read_journal(out) == [json.loads(path.read_text())["taken"]]
    assert edit_run(out, store.path, Edit(step=6, skip=1)).number == 2
    run_training(store, out, {"steps": 8}, resume=True)
    edits = [Edit(step=4, skip=1), Edit(step=6, skip=1)]
    assert read_token_counts(out) == count_plan_tokens(store, 8, *edits)


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_older_checkpoint_is_edited_unless_the_newest_lacks_an_edit(store, out, dry_run):
    edit = Edit(step=10, skip=1)
    older = RunFolder(out).find_newest_checkpoint()
    submit_unanswered(out, Edit(step=9, skip=1))
    for target in (out, older):
        with pytest.raises(StateError, match="That edit must be applied first"):
            edit_run(target, store.path, edit, dry_run=dry_run)
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    for target, number in ((older, 1), (out, 2)):
        assert edit_run(target, store.path, edit, dry_run=dry_run).number == number


def test_an_answer_is_on_the_disk_before_the_next_step(store, out, monkeypatch):
    synced, sync = [], os.fsync
    path = submit_unanswered(out, Edit(step=6, skip=1))

    def record_sync(descriptor):
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((file, "taken" in path.read_text() if path.exists() else False))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    run_training(store, out, {"steps": 12}, resume=True, stop_at=5)
    assert (path.parent, True) in synced


def test_edits_without_file_locks_give_a_warning(tmp_path, store, monkeypatch, caplog):
    def refuse_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run_training(store, tmp_path / "run", {"steps": 2})
    monkeypatch.setattr(files.fcntl, "flock", refuse_lock)
    edit_run(tmp_path / "run", store.path, Edit(step=6, skip=1))
    assert re.search(r"No locks .*stop the run before you resume or edit it", caplog.text)


def test_ranks_on_different_data_are_stopped_by_name(tmp_path, store):
    small_store(tmp_path / "r0")
    small_store(tmp_path / "r1", longest=20)
    config = tmp_path / "small.json"
    config.write_text(json.dumps(BASE_SETTINGS))
    args = ["train", "--data", tmp_path / "rRANK", "--config-file", config, "--device", "cpu"]
    args += ["--out", tmp_path / "run", "--max-iters", 2]
    results = run_ranks(WORKER, tmp_path, store.path, *args)
    assert any(result.returncode for result in results)
    message = r"do not read the same data: .* on rank 0 and .* on rank 1"
    assert any(re.search(message, result.stderr) for result in results)
