"""Checkpoints are renamed when complete and replace earlier ones of their step."""

import os

import pytest

from batchloom.adapters.checkpoints import find_newest_checkpoint, writing_checkpoint
from batchloom.examples.job import Job
from processes import start_processes

# For each N: ends a process, as a kill does, just before the N-th rename or removal.
KILLED_SCRIPT = """
import os, sys
from pathlib import Path
from batchloom.adapters.checkpoints import writing_checkpoint

remaining = -1

def end(event, args):
    global remaining
    if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        remaining -= 1
        if remaining == 0:
            os._exit(9)

def save(folder, text):
    with writing_checkpoint(Path(folder), 3) as partial:
        (partial / "weights").write_text(text)

sys.addaudithook(end)
for folder in sys.argv[1:]:
    save(folder, "old")
    if not (child := os.fork()):
        remaining = int(Path(folder).name)
        save(folder, "new")
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path):
    folders = [tmp_path / str(number) for number in range(1, 12)]
    script = tmp_path / "killed.py"
    script.write_text(KILLED_SCRIPT)
    with start_processes(script, *folders) as (process,):
        result = process.wait()
    assert result.returncode == 0, result.stderr
    for folder in folders:
        contents = {path.parent.name: path.read_text() for path in folder.glob("*/weights")}
        assert contents.get("checkpoint-3") == "new" or "old" in contents.values(), (folder, contents)
        with writing_checkpoint(folder, 3) as partial:
            (partial / "weights").write_text("again")
        assert list(folder.iterdir()) == [find_newest_checkpoint(folder)]
    # The last process was not killed.
    assert contents == {"checkpoint-3": "new"}


def test_files_are_on_the_disk_before_the_name_says_so(tmp_path, monkeypatch):
    synced, sync = set(), os.fsync

    def record_fsync(descriptor):
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    with writing_checkpoint(tmp_path, 3) as partial:
        (partial / "part").mkdir()
        (partial / "part" / "weights").write_text("new")
    own = tmp_path.resolve() / "checkpoint-3.partial"
    expected = {own / "part" / "weights", own / "part", own, own.parent}
    assert synced == {str(path) for path in expected}


def test_a_failed_save_of_an_example_leaves_the_checkpoint_before(tmp_path):
    job = Job(data="", out=str(tmp_path), save_every=1, resume=True)
    job.save(7, {"step": 7})
    with pytest.raises((AttributeError, TypeError, ValueError), match="pickle"):
        job.save(14, {"step": 14, "none": (n for n in ())})
    assert job.newest() == {"step": 7}
