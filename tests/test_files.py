"""Folders and files of the machine."""

import os
from pathlib import Path

from batchloom.core.files import find_cache_folder


def test_a_user_without_home_and_account_has_a_cache_folder(monkeypatch, tmp_path):
    """This is the user of a container that is started with a number as its user."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 64001)
    assert find_cache_folder() == tmp_path / "cache-64001" / "batchloom"
    monkeypatch.setenv("HOME", "/somewhere")
    assert find_cache_folder() == Path("/somewhere/.cache/batchloom")
