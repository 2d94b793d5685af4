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


def test_no_home_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder() == tmp_path / ".cache" / "batchloom"
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert find_cache_folder() == Path(f"/scratch/cache-{os.getuid()}/batchloom")
