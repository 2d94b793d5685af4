"""Disks that fail, inputs that go or change, other runs, Ctrl-C: one sentence, and going on gives the same bytes."""

import json
import os
import re
import shutil
import signal
import time

import psutil
import pytest

from batchloom import InputError
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import ExecutionSettings, Progress, RunSettings, run_recipe
from preparation.jobs import end, job, run_job, start
from preparation.stores import SMALL, jsonl, recipe_of, texts, tree

POOL = {"workers": 3}


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    for name, count in (("a", 300), ("b", 300), ("c", 100)):
        rows = [{"text": f"{name} {n} " + "word " * (n % 40)} for n in range(count)]
        jsonl(folder / f"{name}.jsonl", rows)
    return sorted(folder.iterdir())


@pytest.fixture
def whole(inputs, tmp_path):
    prepared(inputs, tmp_path / "whole")
    return tree(tmp_path / "whole")


def prepared(inputs, out, listener=lambda event: None, workers=1, tokens_per_shard=100_000_000, **how):
    """A job in this process (its workers in others), which can be listened to."""
    settings = RunSettings(limits=SMALL, unit_bytes=6000, execution=ExecutionSettings(workers=workers), **how)
    recipe = recipe_of(inputs=tuple(map(str, inputs)), tokenizer="bytes", tokens_per_shard=tokens_per_shard)
    return run_recipe(recipe, out, listener, settings=settings)


def on_first(phase, act):
    """A listener that acts once, when some of a phase is done."""
    done = []

    def listen(event):
        if isinstance(event, Progress) and event.phase == phase and not done:
            done.append(event)
            act()

    return listen


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("limit", "execution"),
    [
        (600, {}),
        pytest.param(7000, POOL, marks=pytest.mark.slow),
        pytest.param(5500, {}, marks=pytest.mark.slow),
        pytest.param(7000, {}, marks=pytest.mark.slow),
        pytest.param(600, POOL, marks=pytest.mark.slow),
    ],
)
def test_no_room_on_the_disk(limit, execution, inputs, whole, tmp_path):
    """RLIMIT_FSIZE refuses what a full disk refuses, in workers too."""
    told = end(start(job(inputs, tmp_path / "out", execution=execution, limits=limit)))
    assert told["error"].startswith("Cannot ")
    assert re.search(r"(too large|room|disk|limit).*; .*\.$", told["error"]), told
    assert "\n" not in told["error"]
    assert "error" not in run_job(job(inputs, tmp_path / "out", execution=execution))
    assert tree(tmp_path / "out") == whole


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: no EIO")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("read", "EIO", "b.jsonl cannot be read: the disk or the network failed"),
        ("fsync", "EIO", r"Cannot (write|use) .*: the disk failed \(input/output error\); look at"),
        ("fsync", "ENOSPC", "Cannot (write|use) .*: the disk is full; free some space"),
        ("rename", "EROFS", "Cannot (write|use) .*: the file system is read-only; choose"),
    ],
)
@pytest.mark.parametrize("execution", [{}, pytest.param(POOL, marks=pytest.mark.slow)])
def test_a_disk_that_fails(call, error, words, execution, inputs, whole, tmp_path):
    """The system's own answer, by strace, to the coordinator and its workers."""
    told = job(inputs, tmp_path / "out", execution=execution)
    only = ["-P", str(inputs[1])] if call == "read" else []
    when = {"read": "7+", "fsync": "20+", "rename": "9+"}[call]
    strace = ["strace", "-f", "-qq", "-o", os.devnull, *only]
    fault = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}"]
    said = end(start(told, before=[*strace, *fault]))
    assert re.match(words, said["error"]), said
    assert "\n" not in said["error"]
    assert "error" not in run_job({**told, "execution": {}})
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_input_that_vanishes_between_units(workers, inputs, whole, tmp_path):
    away = tmp_path / "away"
    listen = on_first("tokenize", lambda: inputs[2].rename(away))
    with pytest.raises(InputError, match=r"^c.jsonl is missing: .*; put it back and give the same"):
        prepared(inputs, tmp_path / "out", listen, workers)
    away.rename(inputs[2])
    result = prepared(inputs, tmp_path / "out", workers=workers)
    assert result.resumed_units > 0
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_input_that_grows_while_it_is_read(workers, inputs, whole, tmp_path):
    before, times = inputs[2].read_bytes(), inputs[2].stat()

    def grow():
        with inputs[2].open("a") as file:
            file.write('{"text": "more"}\n')

    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"^c.jsonl was changed while .*; let its writer finish"):
        prepared(inputs, out, on_first("tokenize", grow), workers)
    with pytest.raises(StoreConflictError, match=r"c.jsonl has .* bytes, had .*give --restart"):
        prepared(inputs, out, workers=workers)
    shutil.copytree(out, tmp_path / "again")
    # What is not of this file stays.
    assert prepared(inputs, tmp_path / "again", workers=workers, restart=True).resumed_units > 0
    assert texts(tmp_path / "again")[-1] == "more"
    inputs[2].write_bytes(before)
    os.utime(inputs[2], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert prepared(inputs, out, workers=workers).resumed_units > 0
    assert tree(out) == whole


def test_restart_keeps_the_units_that_are_the_same(inputs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepared(inputs, out, on_first("write", stop))
    units = len(list((out / ".work" / "units").iterdir()))
    inputs[0].write_text(inputs[0].read_text().replace('"a ', '"A '))
    with pytest.raises(StoreConflictError, match="a.jsonl was rewritten.*give --restart"):
        prepared(inputs, out)
    result = prepared(inputs, out, restart=True)
    # All but those of the first file, and the one that was written to shards and dropped.
    assert units * 0.4 < result.resumed_units < units
    prepared(inputs, tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_restart_with_another_recipe_begins_anew(inputs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepared(inputs, out, on_first("write", stop))
    with pytest.raises(StoreConflictError, match="tokens_per_shard: .* -> 900.*give --restart"):
        prepared(inputs, out, tokens_per_shard=900)
    assert prepared(inputs, out, tokens_per_shard=900, restart=True).resumed_units == 0
    prepared(inputs, tmp_path / "fresh", tokens_per_shard=900)
    assert tree(out) == tree(tmp_path / "fresh")


def test_inputs_that_are_told_apart_by_their_contents(inputs, whole, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepared(inputs, out, on_first("write", stop), hash_inputs=True)
    shutil.copytree(out, tmp_path / "other")
    for path in inputs:
        path.touch()
    assert prepared(inputs, out, hash_inputs=True).resumed_units > 0
    assert tree(out) == whole
    times = inputs[1].stat()
    inputs[1].write_text(inputs[1].read_text().replace("b 7 ", "B 7 "))
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StoreConflictError, match="b.jsonl has other content.*give --restart"):
        prepared(inputs, tmp_path / "other", hash_inputs=True)


def rewritten(path, content):
    """Give a file other content under its old time."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_inputs_of_a_finished_store_that_are_told_apart_by_their_contents(inputs, tmp_path):
    out = tmp_path / "out"
    prepared(inputs, out)
    assert prepared(inputs, out, hash_inputs=True).already_done
    before = inputs[1].read_bytes()
    rewritten(inputs[1], before.replace(b"b 7 ", b"B 7 "))
    assert prepared(inputs, out).already_done
    with pytest.raises(StoreConflictError, match="b.jsonl has other content"):
        prepared(inputs, out, hash_inputs=True)
    rewritten(inputs[1], before)
    # The report says that it is of lines: it is not asked.
    size = inputs[0].stat().st_size
    rewritten(inputs[0], b"[" + b'{"text": "c"}'.ljust(size - 2) + b"]")
    with pytest.raises(StoreConflictError, match="a.jsonl has other content"):
        prepared(inputs, out, hash_inputs=True)
    (out / "report.json").unlink()
    with pytest.raises(StoreConflictError, match="a.jsonl has other content"):
        prepared(inputs, out, hash_inputs=True)


def test_two_runs_and_a_lock_that_a_dead_one_left(inputs, whole, tmp_path):
    told = job(inputs, tmp_path / "out", execution=POOL)
    process = start(told)
    while not (tmp_path / "out" / ".work" / "job.json").exists():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        other = job(inputs[:1], tmp_path / "out", tokens_per_shard=900)
        for one in (told, other):
            assert re.fullmatch(
                rf"Another run is preparing into .* \(process {process.pid}\); wait for it, or choose another --out\.",
                run_job(one)["error"],
            )
    finally:
        process.kill()
    assert end(process) is None
    assert (tmp_path / "out" / ".work" / "lock").read_text() == str(process.pid)
    assert "error" not in run_job({**told, "execution": {}})
    assert tree(tmp_path / "out") == whole


def test_ctrl_c_ends_all_processes_and_the_job_goes_on_later(inputs, whole, tmp_path):
    told = job(inputs, tmp_path / "out", execution=POOL)
    process = start(told)
    while not (tmp_path / "out" / ".work" / "units").exists():
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 2
    assert (process.returncode, out, err) == (130, b"", b"")
    assert not psutil.wait_procs(workers, 0.5)[1]
    assert "error" not in run_job({**told, "execution": {}})
    assert tree(tmp_path / "out") == whole


def test_a_clock_that_jumps(inputs, whole, tmp_path, monkeypatch):
    """Years back and forth between any two looks at it; what is measured has a clock of its own."""
    out, looks, listened = tmp_path / "out", [], []

    def jumping():
        looks.append(0)
        return (1 + len(looks) % 3) * 10**18

    monkeypatch.setattr(time, "time_ns", jumping)
    monkeypatch.setattr(time, "time", lambda: jumping() / 10**9)
    with pytest.raises(KeyboardInterrupt):
        prepared(inputs, out, on_first("write", stop))
    prepared(inputs, out, listened.append)
    assert looks
    progress = [event.bytes_done for event in listened if isinstance(event, Progress)]
    assert progress == sorted(progress)
    report = json.loads((out / "report.json").read_bytes())
    assert 0 < report["seconds"] < 60
    assert tree(out) == whole
