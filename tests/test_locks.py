"""Locks: one holder at a time, busy errors, and renamed or deleted files."""

import contextlib
import errno
import fcntl
import os
import sys

import pytest

from batchloom import OutputError
from batchloom.core.errors import StoreConflictError
from batchloom.core.files import lock_exclusively
from batchloom.preparation import WorkFolder
from batchloom.store import AtomicFile, export_store, lock_store
from batchloom.testing import write_store

_HOOKS = []
_INSTALLED = []


def call_before_lock(function):
    """Call a function once, just before the next lock is requested."""
    if not _INSTALLED:
        sys.addaudithook(lambda name, _: name == "fcntl.flock" and _HOOKS and _HOOKS.pop()())
        _INSTALLED.append(True)
    _HOOKS.append(function)


@contextlib.contextmanager
def open_descriptor(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock_descriptor(descriptor, path, **options):
    lock_exclusively(descriptor, path, busy=lambda: "busy", ended="ended", **options)


def test_one_holder_at_a_time_and_only_of_an_existing_file(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    with open_descriptor(path) as first, open_descriptor(path) as second:
        lock_descriptor(first, path)
        with pytest.raises(StoreConflictError, match="^busy$"):
            lock_descriptor(second, path)
    for change in (path.unlink, lambda: (tmp_path / "other").replace(path)):
        (tmp_path / "other").touch()
        with open_descriptor(path) as descriptor:
            change()
            with pytest.raises(StoreConflictError, match="^ended$"):
                lock_descriptor(descriptor, path)
        path.touch()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with open_descriptor(tmp_path) as descriptor:
        with pytest.raises(OutputError, match="^unable: no locks available$"):
            lock_descriptor(descriptor, tmp_path, unable=lambda why: f"unable: {why}")
        with pytest.raises(OSError, match="No locks available"):
            lock_descriptor(descriptor, tmp_path)
    with pytest.raises(OutputError, match="choose an --out on a file system with locks"):
        WorkFolder(tmp_path / "out")


def test_a_file_that_another_run_finished_is_not_emptied(tmp_path):
    path = tmp_path / "out.jsonl"
    with AtomicFile(path) as first, AtomicFile(path) as second:
        first.write(b"whole")
        with pytest.raises(StoreConflictError, match="Another run is writing"):
            second.write(b"x")
        call_before_lock(first.finish)
        with pytest.raises(StoreConflictError, match="has just ended"):
            second.write(b"x")
    assert path.read_bytes() == b"whole"
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_export_that_another_run_finished_stays(tmp_path):
    write_store(tmp_path / "s", [[1, 2, 256]])
    out = tmp_path / "out"

    def finish():
        (tmp_path / "out.partial" / "whole").touch()
        (tmp_path / "out.partial").rename(out)

    call_before_lock(finish)
    with pytest.raises(StoreConflictError, match="has just ended"):
        export_store(tmp_path / "s", to="flat", out=out)
    assert [file.name for file in out.iterdir()] == ["whole"]


def test_a_store_that_was_moved_is_not_changed(tmp_path):
    store = tmp_path / "s"
    store.mkdir()
    call_before_lock(lambda: store.rename(tmp_path / "t"))
    with pytest.raises(StoreConflictError, match="deleted or renamed"), lock_store(store):
        pytest.fail("it is locked under a name it has lost")
