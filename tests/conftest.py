import logging
import os
from pathlib import Path

import hypothesis
import pytest

# How long an example takes, or takes to make, is a matter of what else the machine does.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real inputs, where there is one."""
    folder = os.environ.get("BATCHLOOM_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("BATCHLOOM_REAL_DATA names no folder: real inputs are not here")
    return Path(folder)


@pytest.fixture(scope="session")
def s3():
    """An S3 server and a client of it; the environment leads to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    known = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = dict(os.environ)
    os.environ.update(known)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()
    os.environ.clear()
    os.environ.update(before)
    server.stop()
