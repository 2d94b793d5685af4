"""A web server on loopback, and retries without delay."""

import pytest

from sources.web_server import serve
from store.remote_stores import shorten_retry_delays


@pytest.fixture
def web():
    with serve() as server:
        yield server


@pytest.fixture
def no_retry_delay(monkeypatch):
    """Shorten the delays between retries. Another test checks their length."""
    shorten_retry_delays(monkeypatch)
