"""--resume on a run with changed files: errors name the file, fault and remedy."""

import json
import shutil

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from batchloom import StateError
from batchloom.adapters.logging import read_log
from batchloom.core.fingerprint import fingerprint
from batchloom.train import RunFolder
from train.runs import read_steps, run_training, small_store

SHORT = {"steps": 4, "save_interval": 2}
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture(scope="module")
def finished(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run_training(store, out, SHORT)
    return out


@pytest.fixture
def run(finished, tmp_path):
    """Copy of a finished run, with checkpoints of steps 2 and 4."""
    return shutil.copytree(finished, tmp_path / "run")


def resume_with_error(store, run):
    """Return the error of resuming, which may change no file."""
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(StateError) as caught:
        run_training(store, run, SHORT, resume=True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    return str(caught.value)


def reseal(folder, changes=None):
    """Update the checksums of a checkpoint, and its state."""
    state = json.loads((folder / "state.json").read_text())
    for name in (MODEL, OPTIMIZER):
        state["checksums"][name] = xxhash.xxh3_128_hexdigest((folder / name).read_bytes())
    state.update(changes or {})
    state.pop("check")
    (folder / "state.json").write_text(json.dumps({**state, "check": fingerprint(state)}))


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_tensors(folder, name, change):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    reseal(folder)


CHECKPOINT_DAMAGE = {
    "no state": (lambda c: (c / "state.json").unlink(), "state.json does not exist"),
    "no JSON": (lambda c: (c / "state.json").write_text("{"), "state.json is not JSON"),
    "no UTF-8": (lambda c: (c / "state.json").write_bytes(b'{"\xff"'), "is not JSON"),
    "a list": (lambda c: (c / "state.json").write_text("[]"), "holds list, not a JSON object"),
    "empty": (lambda c: (c / "state.json").write_text("{}"), "its check does not match"),
    "too deep": (lambda c: (c / "state.json").write_text("[" * 200_000), "is not JSON"),
    "a folder": (
        lambda c: ((c / "state.json").unlink(), (c / "state.json").mkdir()),
        "state.json cannot be read",
    ),
    "another step": (lambda c: reseal(c, {"step": 3}), "says step 3 and is in the folder"),
    "a step as text": (lambda c: reseal(c, {"step": "4"}), "says step '4' and is in the folder"),
    "a loader as list": (lambda c: reseal(c, {"loader": []}), "its check does not match"),
    "no weights": (lambda c: (c / MODEL).unlink(), f"{MODEL} cannot be read: No such file"),
    "a flipped bit": (lambda c: flip_bit(c / MODEL), f"{MODEL} has the checksum"),
    "a flipped bit of a moment": (lambda c: flip_bit(c / OPTIMIZER), f"{OPTIMIZER} has the checksum"),
    "cut weights": (
        lambda c: ((c / MODEL).write_bytes((c / MODEL).read_bytes()[:-9]), reseal(c)),
        f"{MODEL} is not a safetensors file",
    ),
    "another shape": (
        lambda c: change_tensors(c, MODEL, lambda t: t.update({"norm.gain": torch.ones(31)})),
        f"{MODEL} has float32 [31] for norm.gain, the model has float32 [32]",
    ),
    "another dtype": (
        lambda c: change_tensors(c, MODEL, lambda t: t.update({"norm.gain": torch.ones(32).bfloat16()})),
        f"{MODEL} has bfloat16 [32] for norm.gain, the model has float32 [32]",
    ),
    "a moment of another shape": (
        lambda c: change_tensors(c, OPTIMIZER, lambda t: t.update({"exp_avg.norm.gain": torch.ones(1)})),
        f"{OPTIMIZER} has float32 [1] for exp_avg.norm.gain, the model has float32 [32]",
    ),
    "a moment of another dtype": (
        lambda c: change_tensors(c, OPTIMIZER, lambda t: t.update({"step.norm.gain": torch.tensor(4)})),
        f"{OPTIMIZER} has int64 [] for step.norm.gain, the model has float32 []",
    ),
    "a moment too few": (
        lambda c: change_tensors(c, OPTIMIZER, lambda t: t.pop("exp_avg_sq.norm.gain")),
        f"{OPTIMIZER} has nothing for exp_avg_sq.norm.gain",
    ),
    "a weight too many": (
        lambda c: change_tensors(c, MODEL, lambda t: t.update({"more": torch.ones(1)})),
        f"{MODEL} has float32 [1] for more, the model has nothing",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINT_DAMAGE)
def test_a_damaged_checkpoint_is_refused(store, run, name):
    damage, message = CHECKPOINT_DAMAGE[name]
    newest = RunFolder(run).find_newest_checkpoint()
    damage(newest)
    error = resume_with_error(store, run)
    assert f"{newest}/" in error
    assert message in error
    assert f"Delete the folder {newest}; --resume then continues" in error


def test_a_damaged_checkpoint_can_be_deleted(store, run):
    shutil.rmtree(RunFolder(run).find_newest_checkpoint())
    _, lines = run_training(store, run, SHORT, resume=True)
    assert "resume from the checkpoint after 2 steps" in lines
    assert [step for step, *_ in read_steps(run)] == [0, 1, 2, 3]


def test_a_checkpoint_under_another_name(store, run):
    newest = RunFolder(run).find_newest_checkpoint()
    newest.rename(newest.with_name("step_00000009"))
    assert "says step 4 and is in the folder step_00000009" in resume_with_error(store, run)


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path):
    for name in ("step_99999999", "step_100000000", "step_notes", "step_00000007.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert RunFolder(tmp_path).find_newest_checkpoint().name == "step_100000000"


def test_a_run_without_checkpoints_starts_again(store, run, finished):
    shutil.rmtree(run / "checkpoints")
    _, lines = run_training(store, run, SHORT, resume=True)
    assert any(line.startswith("resume from the start") for line in lines)
    assert read_steps(run) == read_steps(finished)


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"\xff", b"\0\0\0", b"[1]"),
        b'{"kind": "step", "loss": 2.0}',
        b'{"kind": "step", "step": "1", "loss": 2.0}',
        b'{"kind": "val", "step": 1, "loss": "2"}',
    ],
)
def test_a_damaged_log_is_refused(store, run, line):
    log = run / "log.jsonl"
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
    error = resume_with_error(store, run)
    assert f"{log}, line 2 is not an entry of a log" in error
    assert "Delete that line, or the whole log" in error


def test_a_damaged_log_can_be_deleted(store, run):
    (run / "log.jsonl").unlink()
    shutil.rmtree(RunFolder(run).find_newest_checkpoint())
    run_training(store, run, SHORT, resume=True)
    assert [step for step, *_ in read_steps(run)] == [2, 3]


def test_a_log_that_lacks_entries_can_be_resumed(store, run):
    log = run / "log.jsonl"
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(lines[2:]))
    run_training(store, run, {**SHORT, "steps": 5}, resume=True)
    assert [step for step, *_ in read_steps(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "holds list, not a JSON object"),
    ],
)
def test_a_damaged_description_of_the_run(store, run, content, message):
    (run / "run.json").write_bytes(content)
    error = resume_with_error(store, run)
    assert f"{run}/run.json {message}" in error
    assert "from the last line of kind start in log.jsonl" in error


def test_a_run_is_described_by_its_log(store, run):
    (run / "run.json").write_text("null")
    starts = [e for e in read_log(run / "log.jsonl") if e["kind"] == "start"]
    assert "holds NoneType" in resume_with_error(store, run)
    (run / "run.json").write_text(json.dumps(starts[-1]["run"]))
    outcome, _ = run_training(store, run, SHORT, resume=True)
    assert outcome.steps == 4
