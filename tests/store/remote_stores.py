"""Stores elsewhere, for tests: in memory, and in a bucket behind a relay with faults."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from batchloom.remote import client as reach, range_requests as ranges
from preparation.s3_relay import relaying

SECRET = "k3yphrase"


def documents(count=600, longest=700, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 257, int(rng.integers(0, longest))).tolist() for _ in range(count)]


def to_memory(folder, name):
    """A copy of a store in memory; its URL."""
    import fsspec

    fs = fsspec.filesystem("memory")
    if fs.exists(f"/far/{name}"):
        fs.rm(f"/far/{name}", recursive=True)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/far/{name}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://far/{name}"


def to_bucket(s3, folder, name="store"):
    """A copy of a store in the bucket; its URL."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            key = f"{name}/{path.relative_to(folder)}"
            s3.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    return f"s3://bucket/{name}"


def retry_at_once(patch):
    """Have nobody wait between two tries."""
    patch.setattr(ranges, "compute_backoff", lambda tries: 0.01)
    patch.setattr(reach, "compute_backoff", lambda tries: 0.01)


@contextmanager
def behind_relay(s3):
    """The bucket behind a relay, to which the environment leads."""
    import s3fs

    with relaying(s3.meta.endpoint_url) as relay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", relay.url)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield relay
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


def kept(cache):
    """The files of blocks in a cache."""
    return sorted(Path(cache).glob("*/*.blocks"))


def same_batches(ours, theirs):
    """Compare two loaders batch by batch; how many there were."""
    count = 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.step == other.step
        for key in one:
            assert np.array_equal(one[key], other[key]), (one.step, key)
        count += 1
    return count
