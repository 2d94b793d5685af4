"""Failing disks, changed inputs, other runs and Ctrl-C: errors, then resuming."""

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

import batchloom
from batchloom import InputError
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import ExecutionSettings, Progress, RunSettings, run_recipe
from preparation.jobs import make_job, run_job, start_job, wait_for_job
from preparation.stores import SMALL_LIMITS, hash_store_files, make_recipe, read_texts, write_jsonl
from processes import have_ended
from waiting import LIMIT_S, wait_until

POOL = {"workers": 3}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Folder of the inputs, which tests copy to change them."""
    folder = tmp_path_factory.mktemp("inputs") / "given"
    folder.mkdir()
    for name, count in (("a", 300), ("b", 300), ("c", 100)):
        rows = [{"text": f"{name} {n} " + "word " * (n % 40)} for n in range(count)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture
def inputs(given, tmp_path):
    return sorted(Path(shutil.copytree(given, tmp_path / "given")).iterdir())


@pytest.fixture(scope="module")
def expected_files(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare_units(sorted(given.iterdir()), out)
    return hash_store_files(out)


def prepare_units(inputs, out, listener=lambda event: None, workers=1, tokens_per_shard=100_000_000, **run_settings):
    """Run a job whose coordinator is this process, with a listener."""
    settings = RunSettings(
        limits=SMALL_LIMITS, unit_bytes=6000, execution=ExecutionSettings(workers=workers), **run_settings
    )
    recipe = make_recipe(inputs=tuple(map(str, inputs)), tokenizer="bytes", tokens_per_shard=tokens_per_shard)
    return run_recipe(recipe, out, listener, settings=settings)


def on_first_progress(phase, action):
    """Return a listener that acts once, at the first progress of a phase."""
    events = []

    def listen(event):
        if isinstance(event, Progress) and event.phase == phase and not events:
            events.append(event)
            action()

    return listen


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("limit", "execution"),
    [
        # test_resume.py has smaller jobs in the fast tier.
        (600, {}),
        (7000, POOL),
        (5500, {}),
        (7000, {}),
        (600, POOL),
    ],
)
@pytest.mark.slow
def test_no_room_on_the_disk(limit, execution, inputs, expected_files, tmp_path):
    """RLIMIT_FSIZE makes writes fail as a full disk does, in workers too."""
    report = wait_for_job(start_job(make_job(inputs, tmp_path / "out", execution=execution, limits=limit)))
    assert report["error"].startswith("Cannot ")
    assert re.search(r"(too large|room|disk|limit).*; .*\.$", report["error"]), report
    assert "\n" not in report["error"]
    assert "error" not in run_job(make_job(inputs, tmp_path / "out", execution=execution))
    assert hash_store_files(tmp_path / "out") == expected_files


DISK_CASES = [
    ("read", "EIO", "b.jsonl cannot be read: the disk or the network failed"),
    ("fsync", "EIO", r"Cannot (write|use) .*: the disk failed \(input/output error\); look at"),
    ("fsync", "ENOSPC", "Cannot (write|use) .*: the disk is full; free some space"),
    ("rename", "EROFS", "Cannot (write|use) .*: the file system is read-only; choose"),
]
FAST_CASES = [DISK_CASES[0], DISK_CASES[2]]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: no EIO")
@pytest.mark.parametrize(
    ("call", "error", "message", "execution"),
    [
        pytest.param(*case, execution, marks=[pytest.mark.slow] * (case not in FAST_CASES or execution is POOL))
        for case in DISK_CASES
        for execution in ({}, POOL)
    ],
)
def test_a_disk_that_fails(call, error, message, execution, inputs, expected_files, tmp_path):
    """Inject system errors with strace, into the coordinator and its workers."""
    job = make_job(inputs, tmp_path / "out", execution=execution)
    path_filter = ["-P", str(inputs[1])] if call == "read" else []
    occurrence = {"read": "7+", "fsync": "20+", "rename": "9+"}[call]
    # With the filter only the traced calls stop the process.
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, *path_filter]
    fault = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={occurrence}"]
    report = wait_for_job(start_job(job, prefix=[*strace, *fault]))
    assert re.match(message, report["error"]), report
    assert "\n" not in report["error"]
    assert "error" not in run_job({**job, "execution": {}})
    assert hash_store_files(tmp_path / "out") == expected_files


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_input_that_vanishes_between_units(workers, inputs, expected_files, tmp_path):
    moved_path = tmp_path / "away"
    listen = on_first_progress("tokenize", lambda: inputs[2].rename(moved_path))
    with pytest.raises(InputError, match=r"^c.jsonl is missing: .*; put it back and give the same"):
        prepare_units(inputs, tmp_path / "out", listen, workers)
    moved_path.rename(inputs[2])
    result = prepare_units(inputs, tmp_path / "out", workers=workers)
    assert result.resumed_units > 0
    assert hash_store_files(tmp_path / "out") == expected_files


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_input_that_grows_while_it_is_read(workers, inputs, expected_files, tmp_path):
    before, times = inputs[2].read_bytes(), inputs[2].stat()

    def grow():
        with inputs[2].open("a") as file:
            file.write('{"text": "more"}\n')

    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"^c.jsonl was changed while .*; let its writer finish"):
        prepare_units(inputs, out, on_first_progress("tokenize", grow), workers)
    with pytest.raises(StoreConflictError, match=r"c.jsonl has .* bytes, had .*give --restart"):
        prepare_units(inputs, out, workers=workers)
    shutil.copytree(out, tmp_path / "again")
    # Units of other files are kept.
    assert prepare_units(inputs, tmp_path / "again", workers=workers, restart=True).resumed_units > 0
    assert read_texts(tmp_path / "again")[-1] == "more"
    inputs[2].write_bytes(before)
    os.utime(inputs[2], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert prepare_units(inputs, out, workers=workers).resumed_units > 0
    assert hash_store_files(out) == expected_files


def test_restart_keeps_the_units_that_are_the_same(inputs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_units(inputs, out, on_first_progress("write", interrupt))
    units = len(list((out / ".work" / "units").iterdir()))
    inputs[0].write_text(inputs[0].read_text().replace('"a ', '"A '))
    with pytest.raises(StoreConflictError, match="a.jsonl was rewritten.*give --restart"):
        prepare_units(inputs, out)
    result = prepare_units(inputs, out, restart=True)
    # All units are kept except those of the first file and the one already written to shards.
    assert units * 0.4 < result.resumed_units < units
    prepare_units(inputs, tmp_path / "fresh")
    assert hash_store_files(out) == hash_store_files(tmp_path / "fresh")


def test_restart_with_another_recipe_begins_anew(inputs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_units(inputs, out, on_first_progress("write", interrupt))
    with pytest.raises(StoreConflictError, match="tokens_per_shard: .* -> 9000.*give --restart"):
        prepare_units(inputs, out, tokens_per_shard=9000)
    assert prepare_units(inputs, out, tokens_per_shard=9000, restart=True).resumed_units == 0
    prepare_units(inputs, tmp_path / "fresh", tokens_per_shard=9000)
    assert hash_store_files(out) == hash_store_files(tmp_path / "fresh")


def test_inputs_are_distinguished_by_content(inputs, expected_files, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_units(inputs, out, on_first_progress("write", interrupt), hash_inputs=True)
    shutil.copytree(out, tmp_path / "other")
    for path in inputs:
        path.touch()
    assert prepare_units(inputs, out, hash_inputs=True).resumed_units > 0
    assert hash_store_files(out) == expected_files
    times = inputs[1].stat()
    inputs[1].write_text(inputs[1].read_text().replace("b 7 ", "B 7 "))
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StoreConflictError, match="b.jsonl has other content.*give --restart"):
        prepare_units(inputs, tmp_path / "other", hash_inputs=True)


def rewrite_with_old_time(path, content):
    """Replace the content of a file and keep its time."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_inputs_of_a_finished_store_are_distinguished_by_content(inputs, tmp_path):
    out = tmp_path / "out"
    prepare_units(inputs, out)
    assert prepare_units(inputs, out, hash_inputs=True).already_done
    before = inputs[1].read_bytes()
    rewrite_with_old_time(inputs[1], before.replace(b"b 7 ", b"B 7 "))
    assert prepare_units(inputs, out).already_done
    with pytest.raises(StoreConflictError, match="b.jsonl has other content"):
        prepare_units(inputs, out, hash_inputs=True)
    rewrite_with_old_time(inputs[1], before)
    # The report, which knows the file as JSON Lines, is not used.
    size = inputs[0].stat().st_size
    rewrite_with_old_time(inputs[0], b"[" + b'{"text": "c"}'.ljust(size - 2) + b"]")
    with pytest.raises(StoreConflictError, match="a.jsonl has other content"):
        prepare_units(inputs, out, hash_inputs=True)
    (out / "report.json").unlink()
    with pytest.raises(StoreConflictError, match="a.jsonl has other content"):
        prepare_units(inputs, out, hash_inputs=True)


def test_two_runs_and_a_lock_that_a_dead_one_left(inputs, expected_files, tmp_path):
    job = make_job(inputs, tmp_path / "out", execution=POOL)
    process = start_job(job)
    wait_until((tmp_path / "out" / ".work" / "job.json").exists, "the job file")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        other_job = make_job(inputs[:1], tmp_path / "out", tokens_per_shard=9000)
        for second_job in (job, other_job):
            assert re.fullmatch(
                rf"Another run is preparing into .* \(process {process.pid}\); wait for it, or choose another --out\.",
                run_job(second_job)["error"],
            )
    finally:
        process.kill()
    assert wait_for_job(process) is None
    assert (tmp_path / "out" / ".work" / "lock").read_text() == str(process.pid)
    assert "error" not in run_job({**job, "execution": {}})
    assert hash_store_files(tmp_path / "out") == expected_files


def test_ctrl_c_ends_all_processes_and_the_job_goes_on_later(inputs, expected_files, tmp_path):
    job = make_job(inputs, tmp_path / "out", execution=POOL)
    process = start_job(job)
    wait_until((tmp_path / "out" / ".work" / "units").exists, "the first unit")
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert have_ended([worker.pid for worker in workers], LIMIT_S)
    assert "error" not in run_job({**job, "execution": {}})
    assert hash_store_files(tmp_path / "out") == expected_files


def test_a_clock_that_jumps(inputs, expected_files, tmp_path, monkeypatch):
    """Wall time jumps by years between any two calls; durations use another clock."""
    out, clock_reads, events = tmp_path / "out", [], []

    def read_jumping_clock():
        clock_reads.append(0)
        return (1 + len(clock_reads) % 3) * 10**18

    monkeypatch.setattr(time, "time_ns", read_jumping_clock)
    monkeypatch.setattr(time, "time", lambda: read_jumping_clock() / 10**9)
    with pytest.raises(KeyboardInterrupt):
        prepare_units(inputs, out, on_first_progress("write", interrupt))
    prepare_units(inputs, out, events.append)
    assert clock_reads
    progress = [event.bytes_done for event in events if isinstance(event, Progress)]
    assert progress == sorted(progress)
    report = json.loads((out / "report.json").read_bytes())
    # A jump would be a year.
    assert 0 < report["seconds"] < 3600
    assert hash_store_files(out) == expected_files


def test_a_work_folder_that_cannot_be_deleted_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "in.txt").write_text("a text")

    def refuse(path, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("batchloom.preparation.units.work_folder.shutil.rmtree", refuse)
    batchloom.prepare(tmp_path / "in.txt", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    assert f"{tmp_path}/s/.work is not needed any more but cannot be deleted (permission denied;" in caplog.text
    assert len(batchloom.open_store(tmp_path / "s")) == 1
