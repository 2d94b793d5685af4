"""The header that the files beside a shard share: ``.docs``, ``.mask``, ``.pairs`` and ``.bands``."""

import struct
from pathlib import Path

from batchloom.core.errors import StoreError
from batchloom.store.format.megatron_index import map_file

# Magic, u64 version, u64 count, u64 of the file's own meaning (0 where it has none).
HEADER = struct.Struct("<8sQQQ")
CHECK_REMEDY = "Run batchloom check on the store."


def map_file_with_header(path: Path, magic: bytes) -> tuple[memoryview, int, int]:
    """Map a file and read its header: the whole file, the count, and the last number.

    Raises:
        StoreError: the file is missing, cut short, of another kind or version.
    """
    view = map_file(path)
    return view, *read_header(view, path, magic)


def read_header(view: memoryview, path: Path, magic: bytes) -> tuple[int, int]:
    """The count and the last number in the header of a file, wherever it lies; ``path`` for the words of errors."""
    if len(view) < HEADER.size:
        raise StoreError(f"{path} is cut short: {len(view)} bytes, its header alone has {HEADER.size}. {CHECK_REMEDY}")
    file_magic, version, count, last = HEADER.unpack_from(view)
    if file_magic != magic or version != 1:
        raise make_wrong_format_error(path)
    return count, last


def make_wrong_format_error(path: Path) -> StoreError:
    """The error of a file that is not what its ending says."""
    return StoreError(f"{path} is not a {path.suffix} file of version 1. {CHECK_REMEDY}")
