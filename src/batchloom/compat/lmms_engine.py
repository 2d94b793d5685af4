"""lmms-engine's configuration of data sets, as its own code reads it."""

import os
from dataclasses import replace

from batchloom.core.addresses import is_url
from batchloom.preparation import DatasetConfig


def load_lmms_engine_config(path: str | os.PathLike[str]) -> DatasetConfig:
    """Load the data sets of lmms-engine's YAML file, with its meaning of folders.

    There, ``data_folder`` is the folder of a data set's media (``media_folder`` here), and paths are relative to the
    current folder. In a manifest, ``data_folder`` is the folder of its ``path``, and paths are relative to the file.

    Args:
        path: file with a ``dataset`` block, or a list of data sets.

    Returns:
        The configuration, for ``prepare``, ``MultiModalDataset`` or ``MultiModalIterableDataset``.

    Raises:
        InputMissingError: the file, or the list that it names, is missing or empty.
        RecordError: a file is not valid YAML; with line and column.
        SettingsError: all problems of its settings, each with its path.
    """
    config = DatasetConfig.load(path)
    if config.dataset_path is None and config.datasets is None:
        return config
    if config.datasets is None and config.dataset_format != "yaml":
        return replace(config, dataset_path=_resolve_from_current_folder(str(config.dataset_path)))
    listed = config.datasets or DatasetConfig.load(str(config.dataset_path)).datasets or ()
    entries = tuple(
        replace(
            entry,
            path=_resolve_from_current_folder(entry.path),
            data_folder=None,
            media_folder=_resolve_from_current_folder(entry.data_folder) if entry.data_folder else None,
        )
        for entry in listed
    )
    return replace(config, datasets=entries, dataset_path=None, dataset_format=None)


def _resolve_from_current_folder(path: str) -> str:
    """Return an existing local path as an absolute one; names and URLs stay."""
    return path if is_url(path) or not os.path.lexists(path) else os.path.abspath(path)  # noqa: PTH100
