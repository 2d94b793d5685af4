"""Packed rows of multimodal conversations, and lmms-engine configurations."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from batchloom.batches import Loader, MediaOptions
from batchloom.batches.assembly import DEFAULT_MEDIA_SPEC
from batchloom.batches.loading import require_plan_feed
from batchloom.batches.media import CollateRow, collate_rows, stacks_features_by_row, take_single_row
from batchloom.compat.script_arguments import check_output
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, OutputError, SettingsError
from batchloom.core.files import describe_os_error, find_cache_folder
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import check_index, to_plain
from batchloom.preparation import DatasetConfig, prepare
from batchloom.store import Store, open_store

# Number of rows that are read from the plan at once.
_AT_ONCE = 1 << 16

_LOG = logging.getLogger("batchloom")
Collator = Callable[[Sequence[CollateRow]], dict[str, Any]]


@final
class MultiModalDataset:
    """Datasets of a ``DatasetConfig``, packed; item n is row n.

    ``DataLoader(dataset, batch_size=B, collate_fn=dataset.get_collator(), num_workers=N)`` gives the batches of
    ``Loader(store, global_batch_size=B, **config.plan_settings())`` over the same store. Use that for exact resuming,
    balanced ranks, and a new order in each epoch.

    Args:
        config: datasets and their packing, or the YAML file of one.
        out: folder of the store to make; None for a folder in the user's cache, named by the config.
        seed: seed of the data order.
        output: ``torch`` or ``numpy``.
        media: options for reading images and audio.

    Raises:
        SettingsError: the config does not define rows (a bare list), or settings are invalid.
        MissingDependencyError: torch is required and not installed.
    """

    def __init__(
        self,
        config: DatasetConfig | str | os.PathLike[str],
        *,
        out: str | os.PathLike[str] | None = None,
        seed: int = 0,
        output: str = "torch",
        media: MediaOptions = DEFAULT_MEDIA_SPEC,
    ) -> None:
        check_output(output)
        self._config = config if isinstance(config, DatasetConfig) else DatasetConfig.load(config)
        self._settings = self._config.plan_settings()
        if not self._settings:
            problem = f"config: {self._config.location.file} lists data sets and does not say how to make rows of them"
            raise SettingsError([f"{problem}; write dataset: with packing and packing_length"])
        self._settings |= {"seed": seed, "output": output, "media": media}
        self._folder = _get_default_folder(self._config) if out is None else Path(out)
        self._store: Store | None = None
        self._by_row = False
        self._process_loader: tuple[int, Loader] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process_loader": None}

    def build(self) -> None:
        """Prepare the datasets, unless they are prepared; one process works, others wait.

        Raises:
            BatchloomError: any error of ``prepare``.
        """
        with _lock_folder(self._folder):
            result = prepare(self._config, out=self._folder, val_fraction=0)
        _LOG.info("%s documents are in %s.", f"{result.counts.documents:,}", self._folder)
        self._store = open_store(self._folder)
        self._process_loader = None
        self._by_row = stacks_features_by_row(self._store)
        require_plan_feed(self._get_loader().feed, 0).announce()

    def _get_loader(self) -> Loader:
        """Return this process's loader, whose step p is row p."""
        if self._store is None:
            raise InputError("There are no rows yet: call build() first.")
        # Locks and maps do not survive a fork.
        if self._process_loader is None or self._process_loader[0] != os.getpid():
            settings = {**self._settings, "global_batch_size": 1, "rank": 0, "world_size": 1}
            self._process_loader = os.getpid(), Loader(self._store, prefetch=0, **settings)
        return self._process_loader[1]

    def make_loader(
        self, *, global_batch_size: int, micro_batch_size: int, steps: int | None, epochs: int | None
    ) -> Loader:
        """Return a loader of these rows for a trainer, on its rank.

        Args:
            global_batch_size: rows of a step on all ranks.
            micro_batch_size: rows of a pass.
            steps: number of steps; None for ``epochs``.
            epochs: number of epochs; None for ``steps``.

        Raises:
            InputError: ``build`` was not called.
        """
        self._get_loader()
        settings = {**self._settings, "global_batch_size": global_batch_size, "steps": steps, "epochs": epochs}
        return Loader(self._store, micro_batch_size=micro_batch_size, **settings)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._get_loader())

    def __getitem__(self, number: int) -> CollateRow:
        """Return a row: ``input_ids``, ``labels`` and ``position_ids``, each int64 [S].

        Labels are -100 without a loss. Positions are [4, S] for models with M-RoPE. A row with media also has the
        processor's keys, each with an axis of media first.

        Raises:
            MediumError: a medium cannot be read, or has changed.
            InputError: ``build`` was not called.
        """
        return self.read_row(check_index(number, len(self), "row"))

    def read_row(self, position: int) -> CollateRow:
        """Return a row by its position; one after the last has no document and no loss."""
        return take_single_row(self._get_loader().batch(position), by_row=self._by_row)

    def get_collator(self) -> Collator:
        """Return the ``collate_fn``: tokens are stacked, media features concatenated."""
        self._get_loader()
        return partial(collate_rows, by_row=self._by_row)

    @property
    def modality_length(self) -> list[int]:
        """Tokens of each row, positive with an image or audio, negative with text alone.

        Samplers with ``group_by_modality_length`` take it (LLaVA's ``LengthGroupedSampler``).
        """
        feed = require_plan_feed(self._get_loader().feed, 0)
        row_lengths = list[int]()
        for start in range(0, len(feed), _AT_ONCE):
            rows = feed.plan.rows(start, min(start + _AT_ONCE, len(feed)))
            tokens = np.add.reduceat(rows.lengths, rows.pointers[:-1])
            media = feed.costs.media_tokens(feed.plan, rows)
            row_lengths += np.where(media > 0, tokens, -tokens).tolist()
        return row_lengths


def _get_default_folder(config: DatasetConfig) -> Path:
    # Relative paths depend on the config's folder, so it is part of the name.
    base_path = str(Path(config.location.file or "").absolute())
    return find_cache_folder() / "datasets" / fingerprint({"config": to_plain(config), "begin": base_path})


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a store folder, so that one process at a time makes it."""
    lock_path = folder.with_name(f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OutputError(f"{lock_path} cannot be written: {describe_os_error(error)}.") from error
    try:
        # The kernel releases the lock when the process ends, even if it is killed.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
