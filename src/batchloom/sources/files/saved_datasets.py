"""Folders written by ``datasets.save_to_disk``: their data files, in order."""

import os
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

import msgspec

from batchloom.core.errors import InputError

_DATASET_NAME, _STATE_NAME, _SPLITS_NAME = "dataset_info.json", "state.json", "dataset_dict.json"
_WANTED_SPLIT = "train"


def find_saved_split(folder: str) -> tuple[str, str] | None:
    """Return the split folder to read and a note; None if no saved DatasetDict.

    Raises:
        InputError: no split is the default, or the folder is damaged.
    """
    if not os.path.exists(f"{folder}/{_SPLITS_NAME}"):  # noqa: PTH110 - called for every folder
        return None
    splits = _read_json(f"{folder}/{_SPLITS_NAME}").get("splits")
    if not isinstance(splits, list) or not all(_is_plain_name(name) for name in splits) or not splits:
        raise InputError(f"{folder}/{_SPLITS_NAME} names no splits; save the dataset again.")
    if _WANTED_SPLIT not in splits and len(splits) > 1:
        raise InputError(f"{folder} holds the splits {', '.join(splits)}; name one, for example {folder}/{splits[0]}")
    split = _WANTED_SPLIT if _WANTED_SPLIT in splits else splits[0]
    other_folders = [f"{folder}/{name}" for name in splits if name != split]
    note = f"Split {split} of the saved dataset {folder} is read"
    return f"{folder}/{split}", note + (
        f"; for other splits name {', '.join(other_folders)}." if other_folders else "."
    )


def list_saved_files(folder: str) -> list[str] | None:
    """Return the data files of a saved dataset in order; None for another folder.

    Raises:
        InputError: it is damaged, or selects rows with its own index.
    """
    required = (_STATE_NAME, _DATASET_NAME)
    if not all(os.path.exists(f"{folder}/{name}") for name in required):  # noqa: PTH110
        return None
    state = _read_json(f"{folder}/{_STATE_NAME}")
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder} is a saved dataset that selects its rows by an index; save it again after flatten_indices()."
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not isinstance(entries, list) or len(names) != len(entries) or not all(map(_is_plain_name, names)):
        raise InputError(f"{folder}/{_STATE_NAME} does not name its data files; save the dataset again.")
    return [f"{folder}/{name}" for name in names]


def is_saved_dataset(paths: Collection[str]) -> bool:
    """Return whether relative file paths show that a folder holds a saved dataset."""
    folders = {path.rpartition("/")[0] for path in paths if PurePosixPath(path).name == _STATE_NAME}
    return any(f"{folder}/{_DATASET_NAME}".lstrip("/") in paths for folder in folders)


def _is_plain_name(name: Any) -> bool:
    """Return whether a name stays inside its folder."""
    return isinstance(name, str) and PurePosixPath(name).name == name and name not in ("", "..")


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return msgspec.json.decode(file.read(16 << 20), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); save the dataset again.") from error
