"""Places behind URLs, through fsspec: what is there, and stretches of its bytes.

A file elsewhere is described as the system describes its own, by an ``os.stat_result``, whose
modification time stands for its ETag or version: a number that is another one when the file
is written anew. So listing, resuming and checking need not know where a file lies.
"""

import os
import stat
from collections.abc import Callable
from typing import Any

import xxhash

from batchloom.core.addresses import scheme_of, shown
from batchloom.remote.client import first_contact, info_of, is_web, reach, version_of
from batchloom.remote.parallel_map import begun

# No device of this machine has this number.
_ELSEWHERE = -1


def remote_status(url: str) -> os.stat_result | None:
    """What lies at a URL; None where there is nothing.

    Raises:
        MissingDependencyError: no library for such URLs is installed.
        AccessError: it may not be read.
        DownloadError: it cannot be reached.
    """
    if (known := _LOOKED_AT.pop(url, None)) is not None:
        return known
    try:
        return first_contact(url, lambda: status_of(url, _info(url)))
    except FileNotFoundError:
        return None


# What was found a moment ago, for the next who asks, and whether stretches of it can be had.
_LOOKED_AT: dict[str, os.stat_result] = {}
_RANGES: dict[str, bool] = {}


def look_ahead(url: str) -> os.stat_result | None:
    """What :func:`remote_status` says; it says so once more without asking anybody.

    Raises:
        InputError: as :func:`remote_status`.
    """
    found = remote_status(url)
    if found is not None:
        _LOOKED_AT[url] = found
    return found


def forget_looks() -> None:
    """Ask anew for everything."""
    _LOOKED_AT.clear()
    _RANGES.clear()


def remote_glob(pattern: str) -> list[tuple[str, os.stat_result]]:
    """The files that match a URL with wildcards, sorted; each with its URL.

    Raises:
        InputError: as :func:`remote_status`.
    """
    fs, path = reach(pattern)
    return _described(fs, pattern, lambda: fs.glob(path, detail=True))


def remote_files(url: str) -> list[tuple[str, str, os.stat_result]]:
    """All files below the URL of a folder, sorted by path; each with its URL and path inside.

    Raises:
        InputError: as :func:`remote_status`.
    """
    fs, path = reach(url)
    base = len(fs.unstrip_protocol(path).rstrip("/")) + 1
    files = _described(fs, url, lambda: fs.find(path, detail=True))
    return [(place, shown(place)[base:], status) for place, status in files]


def _described(
    fs: Any, url: str, look: Callable[[], dict[str, Any]]
) -> list[tuple[str, os.stat_result]]:
    files = []
    try:
        found = first_contact(url, look)
    except FileNotFoundError:
        return []
    listed = lists_well(url)
    places = [
        (fs.unstrip_protocol(name), info)
        for name, info in found.items()
        if info.get("type") != "directory"
    ]
    # Elsewhere a listing says less of a file than a look at it, or says it in another way.
    for place, info in places if listed else begun(places, lambda one: look_ahead(one[0])):
        status = status_of(place, info) if listed else remote_status(place)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            files.append((place, status))
    return sorted(files, key=lambda file: file[0].split("/"))


def status_of(url: str, info: dict[str, Any]) -> os.stat_result:
    """What fsspec says of a file, in the system's form."""
    folder = info.get("type") == "directory"
    stamp = xxhash.xxh3_64_intdigest(version_of(info).encode()) >> 4
    mode = stat.S_IFDIR if folder else stat.S_IFREG
    inode = xxhash.xxh3_64_intdigest(url.encode()) >> 1
    size = int(info.get("size") or 0)
    return os.stat_result(
        (mode, inode, _ELSEWHERE, 1, 0, 0, size, 0, stamp // 10**9, 0), {"st_mtime_ns": stamp}
    )


def lists_well(url: str) -> bool:
    """Whether a listing tells as much of a file as a look at it, and in the same way."""
    return scheme_of(url) in _LIST_WELL


_LIST_WELL = ("s3", "s3a", "gs", "gcs", "hf")


def has_ranges(url: str) -> bool:
    """Whether stretches of a file can be had: some web servers give whole files only."""
    if (known := _RANGES.pop(url, None)) is not None:
        return known
    return not is_web(url) or bool(first_contact(url, lambda: _info(url))["ranges"])


def _info(url: str) -> dict[str, Any]:
    info = info_of(url)
    if is_web(url) and "ranges" in info:
        _RANGES[url] = bool(info["ranges"])
    return info
