"""A run that trains is the only one in its folder, and is handed edits."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchloom import Edit, Loader, PlanError, StateError
from batchloom.cli import run_command_line as command
from batchloom.core import locks
from batchloom.core.errors import StoreConflictError, TrainError
from batchloom.testing import write_store
from batchloom.train import RunFolder, edit_run, read_log, submit_edit
from batchloom.train.edit_requests import EditInbox
from processes import rank_environments, run_ranks, start_processes
from train.runs import PLAIN, WORKER, run_training, small_store, steps_of, wait_for_step

# Holds a run as a trainer does, for so many seconds, and answers nobody.
HOLDS = """
import sys, time
from pathlib import Path
from batchloom.train.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path / "s")


@contextmanager
def holding(out, seconds):
    script = out.with_name("holds.py")
    script.write_text(HOLDS)
    with start_processes(script, out, seconds) as (process,):
        while process.process.is_alive() and not process.out.read_text():
            time.sleep(0.01)
        assert process.out.read_text() == "held\n"
        yield process


def leave_request(out, edit):
    """Ask a run that gives no answer; returns the file of the request."""
    with pytest.raises(TrainError, match="gave no answer within 0 s"):
        submit_edit(out / "edits", edit, 0, lambda: False)
    return max((out / "edits").glob("*.json"))


def tokens_by_plan(store, steps, *edits):
    loader = Loader(store, seq_len=32, global_batch_size=4, steps=steps, rank=0, world_size=1)
    for edit in edits:
        loader.edit(edit)
    found = []
    for step in range(steps):
        rows = loader.plan.rows(*loader.plan.positions_of(step))
        # What is banned is padding.
        kept = rows.lengths if rows.banned is None else rows.lengths[~rows.banned]
        found.append(int(kept.sum()))
    return found


def tokens_of(out):
    return [tokens for *_, tokens in steps_of(out)]


def journal_of(out):
    newest = RunFolder(out).find_newest_checkpoint()
    return json.loads((newest / "state.json").read_text())["loader"]["edits"]


def test_two_ranks_take_an_edit_at_one_step_and_a_kill_loses_nothing(tmp_path, store, capfd):
    out, config = tmp_path / "run", tmp_path / "small.json"
    config.write_text(json.dumps({**PLAIN, "steps": 10**6}))
    words = ["train", "--data", store.path, "--config-file", config, "--device", "cpu"]
    words = [*map(str, words), "--out", str(out)]
    with start_processes("-m", "batchloom", *words, environments=rank_environments()) as (
        process,
        _,
    ):
        try:
            edit = Edit(step=wait_for_step(process, out, 10) + 150, global_batch_size=2, note="n")
            found = edit_run(out, store.path, edit)
            assert (found.checkpoint, found.number) == (None, 1)
            with pytest.raises(PlanError, match=r"refused the edit.* Step 5 was delivered.* can change"):
                edit_run(out, store.path, Edit(step=5, skip=1))
            other = max(edit.step + 5, wait_for_step(process, out, 10) + 150)
            asked = ["--data", str(store.path), "--at-step", str(other)]
            assert command(["edit", str(out), *asked, "--global-batch-size", "3"]) == 1
            assert "2 ranks" in capfd.readouterr().err
            assert command(["edit", str(out), *asked, "--ban", "0,1,2,3,4,5,6,7"]) == 0
            assert re.search(r"in use by process \d+ on .* sent", capfd.readouterr().out)
            assert command([*words, "--resume"]) == 1
            assert re.search(r"in use by process \d+ on .* stop it", capfd.readouterr().err)
            last = wait_for_step(process, out, other + 30)
        finally:
            os.kill(int(RunFolder(out).read_holder().split()[1]), signal.SIGKILL)
            process.wait()
    killed = tokens_of(out)[:last]
    assert RunFolder(out).find_newest_checkpoint() is None
    expected = tokens_by_plan(store, last, edit, Edit(step=other, ban={"data": range(8)}))
    assert killed == expected
    # No checkpoint had the edits: they are taken up again, once.
    run_training(store, out, {"steps": last}, resume=True)
    assert tokens_of(out) == expected
    assert [entry["step"] for entry in journal_of(out)] == [edit.step, other]


def test_a_request_without_an_answer_is_taken_up_once(tmp_path, store):
    out, edit = tmp_path / "run", Edit(step=6, skip=3)
    run_training(store, out, {"steps": 12}, stop_at=4)
    late = leave_request(out, Edit(step=2, skip=1))
    path = leave_request(out, edit)
    with pytest.raises(StateError, match="The same edit is already pending"):
        submit_edit(out / "edits", edit, 0, lambda: False)
    with pytest.raises(StateError, match=r"received the edit in .*000001.*That edit must be applied first"):
        edit_run(out, store.path, Edit(step=8, skip=1))
    _, said = run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert f"edit   {path.name} is accepted, and applies after 6 steps" in said
    assert any(f"{late.name} is refused: Step 2 was delivered" in line for line in said)
    assert "Step 2 was delivered" in json.loads(late.read_text())["refused"]
    assert [one["edit"]["step"] for one in read_log(out / "log.jsonl") if one["kind"] == "edit"] == [6]
    # As if the run had died before any checkpoint that has it; then after one.
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    for stop in (7, 9, 12):
        run_training(store, out, {"steps": 12}, resume=True, stop_at=stop)
        assert journal_of(out) == [json.loads(path.read_text())["taken"]]
    assert tokens_of(out) == tokens_by_plan(store, 12, edit)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({}, "missing 1 required"),
        ({"step": 8, "skpi": 1}, "skpi"),
        ({"step": "x", "skip": 1}, "step: "),
        ({"step": 8, "ban": {"data": "5"}}, "'5' is not a document number"),
        ({"step": 8, "weights": 5}, "a single store has no weights"),
        ({"step": 8, "ban": {"data": [10**9]}}, "does not exist"),
        ({"step": 4, "seq_len": 1 << 24, "global_batch_size": 1 << 24}, "lower global_batch_size"),
    ],
)
def test_what_is_no_edit_is_refused_by_name_and_the_run_goes_on(tmp_path, store, edit, why):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 4}, stop_at=2)
    path = leave_request(out, Edit(step=8, skip=1))
    path.write_text(json.dumps({"edit": edit}))
    outcome, said = run_training(store, out, {"steps": 4}, resume=True)
    assert outcome.step == 4
    assert journal_of(out) == []
    assert why in json.loads(path.read_text())["refused"]
    assert any(f"{path.name} is refused: " in line for line in said)


def test_an_edit_that_was_taken_is_taken_again_or_nothing_is_trained(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 12}, stop_at=4)
    path = leave_request(out, Edit(step=6, global_batch_size=6))
    run_training(store, out, {"steps": 12}, resume=True, stop_at=5)
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    with pytest.raises(TrainError, match=rf"applied the edit in .*{path.name} before .*batch_size"):
        run_training(store, out, {"steps": 12, "batch_size": 4}, resume=True)
    path.write_text("{")
    with pytest.raises(StateError, match="is not JSON.* Fix the file, or delete it"):
        run_training(store, out, {"steps": 12}, resume=True)
    path.unlink()
    run_training(store, out, {"steps": 12}, resume=True)
    assert tokens_of(out) == tokens_by_plan(store, 12)


def test_a_run_is_held_until_its_process_dies(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 12}, stop_at=4)
    with holding(out, 600) as holder:
        number = holder.process.pid
        with pytest.raises(StoreConflictError, match=rf"in use by process {number} on .*--out"):
            run_training(store, out, {"steps": 12}, resume=True)
        edit = Edit(step=6, skip=1)
        with pytest.raises(TrainError, match=r"no answer within 0\.3 s.* stays in .*Delete that file"):
            edit_run(out, store.path, edit, patience=0.3)
        with pytest.raises(TrainError, match="Give the folder of the run"):
            edit_run(RunFolder(out).find_newest_checkpoint(), store.path, edit)
        said = []
        assert edit_run(out, store.path, edit, dry_run=True, print_line=said.append).checkpoint
        assert "in use: changes since its newest checkpoint are not included" in said[0]
    run_training(store, out, {"steps": 12}, resume=True)
    assert len(journal_of(out)) == 1


def test_a_run_that_ends_meanwhile_is_edited_as_one_that_stands_still(tmp_path, store):
    out, said = tmp_path / "run", []
    run_training(store, out, {"steps": 12}, stop_at=4)
    with holding(out, 1.5):
        found = edit_run(out, store.path, Edit(step=4, skip=1), print_line=said.append)
    assert found.checkpoint == RunFolder(out).find_newest_checkpoint()
    assert said[1:] == ["The run ended in the meantime."]
    assert not list((out / "edits").iterdir())
    assert len(journal_of(out)) == 1


def test_a_ban_of_very_many_documents_is_kept_and_read_again(tmp_path, capfd):
    store = write_store(tmp_path / "many", {"train": [[1 + n % 200, 2, 3] for n in range(61_000)]})
    out, ban = tmp_path / "run", Edit(step=6, ban={"data": range(60_000)})
    run_training(store, out, {"steps": 12}, stop_at=4)
    words = ["edit", str(out), "--data", str(store.path), "--at-step", "6", "--dry-run"]
    assert command([*words, "--ban", ",".join(map(str, range(9_000)))]) == 0
    assert '{"data": "9,000 documents from 0 to 8999"}' in capfd.readouterr().out
    edit_run(out, store.path, ban)
    path = leave_request(out, Edit(step=7, ban={"data": range(60_500)}))
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert path.stat().st_size > 1 << 19
    # Its answer is all that is left of it.
    shutil.rmtree(RunFolder(out).find_newest_checkpoint())
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert [len(entry["ban"]["data"]) for entry in journal_of(out)] == [60_000, 60_500]
    assert edit_run(out, store.path, Edit(step=9, skip=1)).number == 3


@pytest.mark.slow
def test_a_journal_that_no_checkpoint_could_keep_is_refused_before_anything_changes(tmp_path, store):
    out, edit = tmp_path / "run", Edit(step=6, skip=1, note="x" * (1 << 27))
    run_training(store, out, {"steps": 12}, stop_at=4)
    with pytest.raises(PlanError, match=r"would have 134,\d+,\d+ bytes, .* up to 134,217,728: "):
        edit_run(out, store.path, edit)
    with pytest.raises(PlanError, match="up to 134,217,728"):
        submit_edit(out / "edits", edit, 0, lambda: False)
    assert not (out / "edits").exists()
    path = leave_request(out, Edit(step=6, skip=1))
    path.write_text(json.dumps({"edit": {"step": 6, "skip": 1, "note": edit.note}}))
    _, said = run_training(store, out, {"steps": 12}, resume=True)
    assert any(f"{path.name} is refused: The journal of edits would have" in one for one in said)
    assert journal_of(out) == []


def test_what_is_deleted_while_ranks_try_it_is_withdrawn(tmp_path, store, monkeypatch):
    out, told = tmp_path / "run", []
    run_training(store, out, {"steps": 12}, stop_at=4)
    look = EditInbox.take

    def deleted_after_the_look(inbox, run):
        found = look(inbox, run)
        for path, _ in found:
            path.unlink()
        return found

    def ask():
        with pytest.raises(StateError) as refused:
            submit_edit(out / "edits", Edit(step=6, skip=1), 60, lambda: False)
        told.append(str(refused.value))

    asking = threading.Thread(target=ask)
    asking.start()
    while not list((out / "edits").glob("*.json")):
        time.sleep(0.01)
    monkeypatch.setattr(EditInbox, "take", deleted_after_the_look)
    _, said = run_training(store, out, {"steps": 12}, resume=True)
    asking.join(60)
    assert "the edit is withdrawn" in told[0]
    assert any(line.endswith("was deleted, so the edit is withdrawn") for line in said)
    assert journal_of(out) == []
    assert not list((out / "edits").iterdir())
    assert tokens_of(out) == tokens_by_plan(store, 12)


def test_a_request_whose_answer_a_kill_cut_short_is_found_again(tmp_path, store):
    out, edit = tmp_path / "run", Edit(step=6, skip=1)
    run_training(store, out, {"steps": 12}, stop_at=4)
    path = leave_request(out, edit)
    path.rename(f"{path}.claimed")
    with pytest.raises(StateError, match=rf"received the edit in .*{path.name} while"):
        edit_run(out, store.path, Edit(step=8, skip=1))
    path.rename(f"{path}.claimed")
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    assert [one.name for one in (out / "edits").iterdir()] == [path.name]
    assert journal_of(out) == [json.loads(path.read_text())["taken"]]
    path.rename(f"{path}.claimed")
    run_training(store, out, {"steps": 12}, resume=True)
    assert tokens_of(out) == tokens_by_plan(store, 12, edit)


def test_a_request_that_is_gone_when_it_is_read_is_none(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 4}, stop_at=2)
    (out / "edits").mkdir()
    (out / "edits" / "000001-whatever.json").symlink_to("nowhere")
    assert run_training(store, out, {"steps": 4}, resume=True)[0].step == 4
    assert edit_run(out, store.path, Edit(step=4, skip=1)).number == 1


def test_an_edit_that_no_step_follows_is_in_the_newest_checkpoint(tmp_path, store):
    out = tmp_path / "run"
    run_training(store, out, {"steps": 4})
    path = leave_request(out, Edit(step=4, skip=1))
    run_training(store, out, {"steps": 4}, resume=True)
    assert journal_of(out) == [json.loads(path.read_text())["taken"]]
    assert edit_run(out, store.path, Edit(step=6, skip=1)).number == 2
    run_training(store, out, {"steps": 8}, resume=True)
    edits = [Edit(step=4, skip=1), Edit(step=6, skip=1)]
    assert tokens_of(out) == tokens_by_plan(store, 8, *edits)


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_older_checkpoint_is_edited_unless_the_newest_lacks_an_edit(tmp_path, store, dry_run):
    out, edit = tmp_path / "run", Edit(step=10, skip=1)
    run_training(store, out, {"steps": 12}, stop_at=4)
    older = RunFolder(out).find_newest_checkpoint()
    leave_request(out, Edit(step=9, skip=1))
    for place in (out, older):
        with pytest.raises(StateError, match="That edit must be applied first"):
            edit_run(place, store.path, edit, dry_run=dry_run)
    run_training(store, out, {"steps": 12}, resume=True, stop_at=8)
    for place, number in ((older, 1), (out, 2)):
        assert edit_run(place, store.path, edit, dry_run=dry_run).number == number


def test_an_answer_is_on_the_disk_before_the_next_step(tmp_path, store, monkeypatch):
    out, synced, sync = tmp_path / "run", [], os.fsync
    run_training(store, out, {"steps": 12}, stop_at=4)
    path = leave_request(out, Edit(step=6, skip=1))

    def noting(descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((place, "taken" in path.read_text() if path.exists() else False))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    run_training(store, out, {"steps": 12}, resume=True, stop_at=5)
    assert (path.parent, True) in synced


def test_where_nothing_can_be_locked_the_warning_says_what_becomes_of_an_edit(tmp_path, store, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run_training(store, tmp_path / "run", {"steps": 2})
    monkeypatch.setattr(locks.fcntl, "flock", none)
    edit_run(tmp_path / "run", store.path, Edit(step=6, skip=1))
    assert re.search(r"No locks .*never reads again, and is lost .*: stop a run", caplog.text)


def test_ranks_on_different_data_are_stopped_by_name(tmp_path, store):
    small_store(tmp_path / "r0")
    small_store(tmp_path / "r1", longest=20)
    config = tmp_path / "small.json"
    config.write_text(json.dumps(PLAIN))
    words = ["train", "--data", tmp_path / "rRANK", "--config-file", config, "--device", "cpu"]
    words += ["--out", tmp_path / "run", "--max-iters", 2]
    done = run_ranks(WORKER, tmp_path, store.path, *words)
    assert any(one.returncode for one in done)
    different = r"different orders: rank 0 has [0-9a-f]{32}, rank 1 has [0-9a-f]{32}\."
    assert any(re.search(different, one.stderr) for one in done)
