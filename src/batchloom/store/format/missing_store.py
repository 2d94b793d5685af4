"""Errors for paths without a store, with the likely cause and remedy."""

import os
from pathlib import Path

from batchloom.core.errors import StoreMissingError
from batchloom.core.files import describe_missing_path
from batchloom.core.settings import suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.store.format.layout import MANIFEST_NAME, SUBSETS, WORK_NAME


def make_missing_store_error(path: Path) -> StoreMissingError:
    """Build the error for a path without a store; ``path`` is quoted as given."""
    try:
        return StoreMissingError(describe_partial_store(path) or _describe_missing_store(path))
    except OSError:
        # Without read permission the cause cannot be determined.
        return StoreMissingError(f"There is no readable store at {path}.")


def resolve_store_folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute folder of a store.

    Raises:
        StoreMissingError: there is no store; quotes the path as given.
    """
    folder = Path(path).absolute()
    try:
        is_missing = not (folder / MANIFEST_NAME).exists()
    except OSError:
        # An unreadable folder gets a more exact error when the manifest is read.
        is_missing = False
    if is_missing:
        raise make_missing_store_error(Path(path))
    return folder


def describe_partial_store(path: Path) -> str:
    """Describe the remedy for an unfinished store or a subset folder.

    Returns an empty string for any other path.
    """
    if (path / WORK_NAME).is_dir():
        return f"{path} is an unfinished store; give its prepare command again to continue."
    if path.name in SUBSETS and path.is_dir() and (path.parent / MANIFEST_NAME).is_file():
        return f"{path} is a subset of a store; name the store itself: {path.parent}"
    return ""


def _describe_missing_store(path: Path) -> str:
    lead = f"{'No training shards found in' if path.is_dir() else 'There is no store at'} {path}: "
    if path.suffix in (".bin", ".idx") and path.is_file():
        partner_path = path.with_suffix(".idx" if path.suffix == ".bin" else ".bin")
        return f"{lead}a Megatron prefix is a pair of files, and {partner_path.name} is missing."
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        kind = "file" if path.is_file() else f"folder without {MANIFEST_NAME}"
        return (
            f"{lead}this is a {kind}. If it holds text, make a store of it: batchloom prepare "
            f"{path} --out STORE; batchloom train also reads it directly: --input-file {path}"
        )
    if path.is_dir():
        return f"{lead}the folder is empty. Make one with: batchloom prepare INPUT... --out {path}"
    if path.exists():
        return f"{lead}this is a pipe or a device. Name the folder that batchloom prepare made."
    message = describe_missing_path(
        str(path),
        f"name a store (batchloom prepare INPUT... --out {path} makes one), or a Megatron prefix without its ending",
    )
    synthetic = suggest(str(path).partition(":")[0], SYNTHETIC_NAMES)
    return f"{message[:-1]}{synthetic}" if synthetic and message.endswith("ending.") else message
