"""A server of the web on loopback, and no waiting between tries."""

import pytest

from batchloom.remote import block_file as blocks, client as reach
from sources.web_server import serving


@pytest.fixture
def web():
    with serving() as server:
        yield server


@pytest.fixture
def impatient(monkeypatch):
    """Waits between tries are left out; how long they are is a test of its own."""
    monkeypatch.setattr(blocks, "compute_backoff", lambda tries: 0)
    monkeypatch.setattr(reach, "compute_backoff", lambda tries: 0)
