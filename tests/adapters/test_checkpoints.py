"""A checkpoint takes its name when it is on the disk, and the place of an earlier one of the same step."""

import os
import subprocess
import sys

import pytest

from batchloom.adapters.checkpoints import find_newest_checkpoint, writing_checkpoint
from batchloom.examples.job import Job

# For each N: ends a process, as a kill does, at the N-th time that a name is about to change or to go.
KILLED = """
import os, sys
from pathlib import Path
from batchloom.adapters.checkpoints import writing_checkpoint

left = -1

def end(event, args):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        left -= 1
        if left == 0:
            os._exit(9)

def save(folder, said):
    with writing_checkpoint(Path(folder), 3) as aside:
        (aside / "weights").write_text(said)

sys.addaudithook(end)
for folder in sys.argv[1:]:
    save(folder, "old")
    if not (child := os.fork()):
        left = int(Path(folder).name)
        save(folder, "new")
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_checkpoint_that_takes_anothers_place_loses_neither_to_a_kill(tmp_path):
    folders = [tmp_path / str(number) for number in range(1, 12)]
    subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=120,
    )
    for folder in folders:
        found = {path.parent.name: path.read_text() for path in folder.glob("*/weights")}
        assert found.get("checkpoint-3") == "new" or "old" in found.values(), (folder, found)
        with writing_checkpoint(folder, 3) as aside:
            (aside / "weights").write_text("again")
        assert list(folder.iterdir()) == [find_newest_checkpoint(folder)]
    # The last of them was not killed at all.
    assert found == {"checkpoint-3": "new"}


def test_files_are_on_the_disk_before_the_name_says_so(tmp_path, monkeypatch):
    synced, sync = set(), os.fsync

    def noted(descriptor):
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with writing_checkpoint(tmp_path, 3) as aside:
        (aside / "part").mkdir()
        (aside / "part" / "weights").write_text("new")
    own = tmp_path.resolve() / "checkpoint-3.partial"
    wanted = {own / "part" / "weights", own / "part", own, own.parent}
    assert synced == {str(path) for path in wanted}


def test_what_stops_an_examples_save_leaves_the_checkpoint_before(tmp_path):
    job = Job(data="", out=str(tmp_path), save_every=1, resume=True)
    job.save(7, {"step": 7})
    with pytest.raises((AttributeError, TypeError, ValueError), match="pickle"):
        job.save(14, {"step": 14, "none": (one for one in ())})
    assert job.newest() == {"step": 7}
