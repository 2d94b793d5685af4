"""Opening the file of a place, wherever it lies: here, in the cache of the Hub, behind a URL."""

from typing import BinaryIO

from batchloom.core.addresses import is_url
from batchloom.remote import open_remote_file
from batchloom.sources.files.hub_datasets import find_cached_copy


def find_local_path(location: str, size: int) -> str | None:
    """The path of a file of ``size`` bytes on this machine; None where it lies elsewhere."""
    return find_cached_copy(location, size) if is_url(location) else location


def open_location(location: str, size: int, stamp: int) -> BinaryIO:
    """The file at a place, for reading and seeking.

    Args:
        location: its path or URL.
        size: its bytes.
        stamp: its modification time, or what stands for it elsewhere.

    Raises:
        OSError: it cannot be opened, or read; as InputError where it lies elsewhere.
    """
    path = find_local_path(location, size)
    # The caller closes it.
    return open_remote_file(location, size, stamp) if path is None else open(path, "rb")  # noqa: PTH123
