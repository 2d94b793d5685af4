"""Remote stores for tests: in memory, and in a bucket behind a relay with faults."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from batchloom.remote import client
from preparation.s3_relay import run_relay

SECRET = "k3yphrase"


def make_documents(count=600, longest=700, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 257, int(rng.integers(0, longest))).tolist() for _ in range(count)]


def copy_to_memory(folder, name):
    """Copy a store to memory and return its URL."""
    import fsspec

    fs = fsspec.filesystem("memory")
    if fs.exists(f"/far/{name}"):
        fs.rm(f"/far/{name}", recursive=True)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/far/{name}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://far/{name}"


def copy_to_bucket(s3, folder, name="store"):
    """Copy a store to the bucket and return its URL."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            key = f"{name}/{path.relative_to(folder)}"
            s3.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    return f"s3://bucket/{name}"


def shorten_retry_delays(patch):
    """Shorten the delays between retries."""
    patch.setattr(client, "compute_backoff", lambda failures: 0.01)


@contextmanager
def relay_bucket(s3):
    """Run a relay before the bucket and point the environment to it."""
    import s3fs

    with run_relay(s3.meta.endpoint_url) as relay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", relay.url)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield relay
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


def list_block_files(cache):
    """List the block files of a cache."""
    return sorted(Path(cache).glob("*/*.blocks"))


def assert_same_batches(expected_batches, actual_batches):
    """Assert that two loaders give equal batches; return their number."""
    count = 0
    for expected, actual in zip(expected_batches, actual_batches, strict=True):
        assert expected.step == actual.step
        for key in expected:
            assert np.array_equal(expected[key], actual[key]), (expected.step, key)
        count += 1
    return count
