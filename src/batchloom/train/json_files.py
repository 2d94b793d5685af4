"""JSON files of a run: read defensively, because anyone may change them."""

import json
import os
from pathlib import Path
from typing import Any

from batchloom.core.errors import OutputError
from batchloom.core.files import PARTIAL_SUFFIX, read_regular_file

# Settings files are a few kilobytes.
_MAX_BYTES = 1 << 20
# Files that a run writes list the stores of a mixture, and the documents that edits ban.
MAX_RUN_FILE_BYTES = 1 << 28


def read_json_object(path: Path, most: int = _MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``most`` bytes.

    Otherwise raise ValueError, whose message continues a sentence that begins with the file's name.
    """
    try:
        return parse_json_object(read_regular_file(path, most))
    except FileNotFoundError as error:
        raise ValueError("does not exist") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; ValueError is that of :func:`read_json_object`."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, not a JSON object")  # noqa: TRY004
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    partial_path, text = path.with_name(path.name + PARTIAL_SUFFIX), encode_json(value)
    if len(text) > MAX_RUN_FILE_BYTES:
        raise OutputError(
            f"{path} was not written: it would have {len(text):,} bytes, more than the limit of "
            f"{MAX_RUN_FILE_BYTES:,}. Give fewer stores or edits."
        )
    partial_path.write_text(text, "utf-8")
    fsync_path(partial_path)
    partial_path.rename(path)


def encode_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def fsync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
