"""Writing: what is told when it fails, and what is left open."""

import errno

import numpy as np
import pytest

from batchloom.core.errors import OutputError, StoreError, StoreMissingError
from batchloom.preparation.finish import subset_entry
from batchloom.store.manifest import ShardEntry, read_manifest
from batchloom.store.writer import writing


def test_an_error_about_reading_stays_one_while_something_is_written(tmp_path):
    with pytest.raises(StoreMissingError), writing(tmp_path):
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
def test_every_refusal_has_its_remedy(tmp_path, number, remedy):
    with pytest.raises(OutputError, match=remedy), writing(tmp_path):
        raise OSError(number, "x")


def test_lengths_that_cannot_be_finished_leave_no_file_open(tmp_path):
    """A file left open is a ResourceWarning, which is an error here."""
    entry = ShardEntry("shard_00000", 1, 1, 2, "", "", "")
    (tmp_path / "shard_00000.idx").write_bytes(np.zeros(4, "u1").tobytes())
    with pytest.raises(StoreError, match="is cut short"):
        subset_entry(tmp_path, [entry])
    assert not (tmp_path / "lengths.u32").exists()
