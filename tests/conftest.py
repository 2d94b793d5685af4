import gc
import logging
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import tiers

# Processes that tests start would otherwise compile all modules again, each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Files run side by side, and models this small are slower on two threads.
os.environ["OMP_NUM_THREADS"] = "1"
# A worker of a DataLoader is forked. MKL's allocator waits forever in it if a thread was inside at that moment.
os.environ["MKL_DISABLE_FAST_MM"] = "1"
# Most of a small store's time is fsync. A disk in memory has room for stores of this size.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# A shell that starts the suite in the background has Ctrl-C ignored, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

S3_IDENTITY = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "SECRET",
    "region_name": "us-east-1",
}


def pytest_addoption(parser):
    parser.addoption("--tier", choices=tiers.TIERS, default="fast", help="Tests to run (default: fast).")
    parser.addoption("--slice", metavar="K/N", help="Run part K of N of these tests.")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs in the slow tier only")
    tiers.tier = config.getoption("--tier")
    # How long an example takes is a matter of what else the machine does.
    hypothesis.settings.register_profile(
        "suite",
        deadline=None,
        max_examples=tiers.examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(config, items):
    tier, part = config.getoption("--tier"), config.getoption("--slice")
    chosen = [
        item
        for item in items
        if tiers.is_in_tier(
            tier,
            slow=item.get_closest_marker("slow") is not None,
            is_property=getattr(getattr(item, "obj", None), "is_hypothesis_test", False),
        )
    ]
    if part:
        number, count = tiers.parse_slice(part)
        chosen = [item for item in chosen if tiers.is_in_slice(item.nodeid, number, count)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish():
    # Full collections would walk through every imported module again and again.
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real inputs, where there is one."""
    folder = os.environ.get("BATCHLOOM_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("BATCHLOOM_REAL_DATA names no folder: real inputs are not here")
    return Path(folder)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server on loopback."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_client(s3_server):
    import boto3

    client = boto3.client("s3", endpoint_url=s3_server, **S3_IDENTITY)
    yield client
    client.close()


@pytest.fixture
def s3(s3_server, s3_client, monkeypatch):
    """A client of an S3 server with one empty bucket, "bucket"; the environment leads to it."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    for name, value in zip(names, S3_IDENTITY.values(), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    urllib.request.urlopen(f"{s3_server}/moto-api/reset", data=b"").close()
    s3_client.create_bucket(Bucket="bucket")
    _forget_s3_clients()
    yield s3_client
    _forget_s3_clients()


def _forget_s3_clients():
    # An instance keeps its address, its credentials and what it listed; batchloom, that there were none.
    if s3fs := sys.modules.get("s3fs"):
        s3fs.S3FileSystem.clear_instance_cache()
    if reach := sys.modules.get("batchloom.remote.client"):
        # A test may have put another function in its place.
        getattr(reach._make_storage_options, "cache_clear", lambda: None)()
