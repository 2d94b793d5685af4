"""Opening of files: local ones, cached copies of Hub files, and URLs."""

from typing import BinaryIO

from batchloom.core.addresses import is_url
from batchloom.remote import open_remote_file
from batchloom.sources.files.hub_datasets import find_cached_copy


def find_local_path(location: str, size: int) -> str | None:
    """Return the local path of a file of ``size`` bytes, or None if it is remote."""
    return find_cached_copy(location, size) if is_url(location) else location


def open_location(location: str, size: int, stamp: int) -> BinaryIO:
    """Open the file at a location for reading and seeking.

    Args:
        location: path or URL.
        size: size of the file in bytes.
        stamp: modification time, or its substitute for a remote file.

    Raises:
        OSError: it cannot be opened or read; a remote file raises InputError instead.
    """
    path = find_local_path(location, size)
    # The caller closes it.
    return open_remote_file(location, size, stamp) if path is None else open(path, "rb")  # noqa: PTH123
