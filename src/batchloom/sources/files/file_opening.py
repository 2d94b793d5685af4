"""Names and opening of files: local ones, cached copies of Hub files, and URLs."""

import contextlib
import os
import re
from typing import BinaryIO

from batchloom.core.addresses import is_url
from batchloom.remote import open_remote_file

_WORD_PATTERN = r"[A-Za-z0-9_][\w.+-]*"
_PINNED_URL_PATTERN = re.compile(rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN})@([0-9a-f]{{40}})/(.+)")


def find_local_path(location: str, size: int) -> str | None:
    """Return the local path of a file of ``size`` bytes, or None if it is remote."""
    return find_cached_copy(location, size) if is_url(location) else location


def open_location(location: str, size: int, stamp: int) -> BinaryIO:
    """Open the file at a location for reading and seeking."""
    path = find_local_path(location, size)
    # The caller closes it.
    return open_remote_file(location, size, stamp) if path is None else open(path, "rb")  # noqa: PTH123


def get_pinned_revision(url: str) -> str:
    """Return the commit to which a Hub URL is pinned, or "" if it is not pinned."""
    # Most locations are paths, for which the cheap test suffices.
    match = _PINNED_URL_PATTERN.fullmatch(url) if "://" in url else None
    return match[2] if match else ""


def find_cached_copy(url: str, size: int) -> str | None:
    """Return the path of the downloaded copy of a pinned file, or None."""
    if not get_pinned_revision(url):
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional

    repo, commit, inside = split_pinned_url(url)
    cached_path = try_to_load_from_cache(repo, inside, repo_type="dataset", revision=commit)
    if not isinstance(cached_path, str):
        return None
    with contextlib.suppress(OSError):
        if os.stat(cached_path).st_size == size:  # noqa: PTH116 - paths remain strings
            return cached_path
    return None


def split_pinned_url(url: str) -> tuple[str, str, str]:
    """Return repository, commit and path of a URL that is pinned to a commit."""
    match = _PINNED_URL_PATTERN.fullmatch(url)
    if match is None:
        raise AssertionError("only files that are pinned to a commit are downloaded")
    return match[1], match[2], match[3]


def get_suffix(name: str) -> str:
    """Return the last suffix of a name with its dot, as ``pathlib`` does, or ""."""
    # A pathlib.PurePath per file would take a third of the time to list many files.
    last = name.rstrip("/").rpartition("/")[2]
    dot = last.rfind(".")
    return last[dot:] if 0 < dot < len(last) - 1 else ""
