"""Header of the sidecar files of a shard, such as ``.docs`` and ``.mask``."""

import struct
from pathlib import Path

from batchloom.core.errors import StoreError
from batchloom.store.format.megatron_index import map_file

# Magic, u64 version, u64 count, and a u64 whose meaning depends on the file type (0 if unused).
HEADER = struct.Struct("<8sQQQ")
CHECK_REMEDY = "Run batchloom check on the store."


def map_file_with_header(path: Path, magic: bytes) -> tuple[memoryview, int, int]:
    """Map a file and return its content, its count and the last header field.

    Raises:
        StoreError: the file is missing, truncated, or of another type or version.
    """
    view = map_file(path)
    return view, *read_header(view, path, magic)


def read_header(view: memoryview, path: Path, magic: bytes) -> tuple[int, int]:
    """Return the count and the last field of a header; ``path`` is for errors."""
    if len(view) < HEADER.size:
        raise StoreError(f"{path} is cut short: {len(view)} bytes, its header alone has {HEADER.size}. {CHECK_REMEDY}")
    file_magic, version, count, last = HEADER.unpack_from(view)
    if file_magic != magic or version != 1:
        raise make_wrong_format_error(path)
    return count, last


def make_wrong_format_error(path: Path) -> StoreError:
    """Build the error for a file whose type or version does not match its suffix."""
    return StoreError(f"{path} is not a {path.suffix} file of version 1. {CHECK_REMEDY}")
