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

import record
import tiers

pytest_plugins = ["leaks"]

# Without bytecode files each process that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# With it a command that does not flush its output seems to print at once.
os.environ.pop("PYTHONUNBUFFERED", None)
sys.dont_write_bytecode = False
# Test files run in parallel, and models this small are slower on two threads.
os.environ["OMP_NUM_THREADS"] = "1"
# A thread would send facts of the process to a hub, which no test reaches.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# DataLoader workers are forked. MKL's allocator deadlocks in them if a thread was inside it during the fork.
os.environ["MKL_DISABLE_FAST_MM"] = "1"
# fsync takes most of the time of a small store, and a RAM disk has room for stores of this size.
_RAM_DISK = Path("/dev/shm")
if os.access(_RAM_DISK, os.W_OK) and shutil.disk_usage(_RAM_DISK).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_RAM_DISK))
# A shell ignores Ctrl-C for background jobs and their children, and tests send it to processes.
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
    # No deadline: the duration of an example depends on the load of the machine. The examples are the same in every
    # run, so that no run fails by chance; `make explore` searches among others.
    hypothesis.settings.register_profile(
        "suite",
        deadline=None,
        derandomize=tiers.tier != "properties",
        max_examples=tiers.examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("suite")
    record.register(config)


def pytest_collection_modifyitems(config, items):
    tier, slice_text = config.getoption("--tier"), config.getoption("--slice")
    chosen = [
        item
        for item in items
        if tiers.is_in_tier(
            tier,
            slow=item.get_closest_marker("slow") is not None,
            is_property=getattr(getattr(item, "obj", None), "is_hypothesis_test", False),
        )
    ]
    if slice_text:
        number, count = tiers.parse_slice(slice_text)
        names = tiers.select_slice((item.nodeid for item in chosen), number, count)
        chosen = [item for item in chosen if item.nodeid in names]
    chosen_items = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen_items])
    items[:] = chosen


def pytest_collection_finish():
    # Otherwise every full collection would traverse all imported modules. Tests import more of them, and full
    # collections come often while little else is old: the check for leftovers collects where something is left.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 200)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real inputs; skip the test without one."""
    return _get_folder("BATCHLOOM_REAL_DATA", "real inputs")


@pytest.fixture(scope="session")
def real_tokenizers() -> Path:
    """Return the folder of published tokenizers; skip the test without one."""
    return _get_folder("BATCHLOOM_REAL_TOKENIZERS", "published tokenizers")


def _get_folder(variable: str, content: str) -> Path:
    folder = os.environ.get(variable)
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"{variable} names no folder: {content} are not here")
    return Path(folder)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Start an S3 server on loopback and yield its address."""
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
def s3_environment(s3_server, monkeypatch):
    """Environment variables that point to the S3 server, and no client of an earlier test."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    for name, value in zip(names, S3_IDENTITY.values(), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    _forget_s3_clients()
    yield
    _forget_s3_clients()


@pytest.fixture
def s3(s3_server, s3_client, s3_environment):
    """Return a client of an S3 server with one empty bucket, "bucket"."""
    urllib.request.urlopen(f"{s3_server}/moto-api/reset", data=b"").close()
    s3_client.create_bucket(Bucket="bucket")
    return s3_client


def _forget_s3_clients():
    # s3fs instances cache their address, credentials and listings; batchloom caches that there are no credentials.
    if s3fs := sys.modules.get("s3fs"):
        s3fs.S3FileSystem.clear_instance_cache()
    if client_module := sys.modules.get("batchloom.remote.client"):
        # A test may have replaced the function by one without a cache.
        getattr(client_module._make_storage_options, "cache_clear", lambda: None)()
