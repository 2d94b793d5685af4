"""Errors of writing, and files that are synced and closed."""

import errno
import os

import numpy as np
import pytest

import batchloom
from batchloom import OutputError, StoreError
from batchloom.core.errors import StoreMissingError
from batchloom.preparation.phases.finish import make_subset_entry
from batchloom.store import ShardEntry, read_manifest, wrap_write_errors
from batchloom.testing import write_store


def test_read_errors_are_not_wrapped_as_write_errors(tmp_path):
    with pytest.raises(StoreMissingError), wrap_write_errors(tmp_path):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, "--tokens-per-shard"),
        (errno.ELOOP, "choose another --out"),
        (errno.ENAMETOOLONG, "choose a shorter --out"),
        (errno.EIO, "on another disk"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_every_write_error_names_a_remedy(tmp_path, number, remedy):
    with pytest.raises(OutputError, match=remedy), wrap_write_errors(tmp_path):
        raise OSError(number, "x")


def test_lengths_that_cannot_be_finished_leave_no_file_open(tmp_path):
    """An open file raises a ResourceWarning, which is an error in the tests."""
    entry = ShardEntry(name="shard_00000", documents=1, tokens=1, bytes=2, bin="", idx="", docs="", sums="")
    (tmp_path / "shard_00000.idx").write_bytes(np.zeros(4, "u1").tobytes())
    with pytest.raises(StoreError, match="is cut short"):
        make_subset_entry(tmp_path, [entry])
    assert not (tmp_path / "lengths.u32").exists()


def prepare_store(folder):
    (folder / "a.txt").write_text("a document\n")
    batchloom.prepare(folder / "a.txt", out=folder / "s", tokenizer="bytes", workers=1)


def write_ids(folder):
    write_store(folder / "s", [[1, 2], [3]], trained=[[1, 0], [1]])


@pytest.mark.parametrize("make", [prepare_store, write_ids])
def test_every_file_of_a_store_is_synced_in_full(tmp_path, monkeypatch, make):
    """Without a sync, a power cut leaves files of zeros with the right name and size."""
    synced = set()
    sync = os.fsync

    def record(descriptor):
        sync(descriptor)
        synced.add((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", record)
    make(tmp_path)
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert [str(p) for p in files if (p.stat().st_ino, p.stat().st_size) not in synced] == []
