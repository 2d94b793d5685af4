"""A web server on loopback, and retries without delay."""

import pytest

from batchloom.remote import client, remote_file
from sources.web_server import serve


@pytest.fixture
def web():
    with serve() as server:
        yield server


@pytest.fixture
def no_retry_delay(monkeypatch):
    """Skip the delays between retries. Another test checks their length."""
    monkeypatch.setattr(remote_file, "compute_backoff", lambda tries: 0)
    monkeypatch.setattr(client, "compute_backoff", lambda tries: 0)
