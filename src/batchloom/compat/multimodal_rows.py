"""The packed rows of the data sets of a ``DatasetConfig``, one by one: what both multimodal doors give."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from batchloom.batches import Loader, MediaOptions
from batchloom.batches.loading import (
    CollateRow,
    collate_rows,
    stacks_features_by_row,
    take_single_row,
)
from batchloom.compat.array_output import check_output
from batchloom.core.errors import InputError, OutputError, SettingsError
from batchloom.core.files import describe_os_error
from batchloom.core.fingerprint import fingerprint
from batchloom.preparation import DatasetConfig, prepare
from batchloom.store import open_store

if TYPE_CHECKING:
    from batchloom.store import Store

# Rows that are looked up at once.
_AT_ONCE = 1 << 16

_LOG = logging.getLogger("batchloom")
Collator = Callable[[Sequence[CollateRow]], dict[str, Any]]


@final
class PackedRows:
    """The rows of one epoch, in the order of a ``Loader`` over the store that :meth:`build` makes.

    Args:
        config: the data sets and how they are packed, or the YAML file of one.
        out: folder of the store; None for one of the user's cache, named by the config.
        seed: of the order.
        output: ``torch`` or ``numpy``.
        media: how images and audio are read.

    Raises:
        SettingsError: a config that does not say how rows are made, or other settings that are none.
        MissingDependencyError: torch is asked for and not installed.
    """

    def __init__(
        self,
        config: DatasetConfig | str | os.PathLike[str],
        out: str | os.PathLike[str] | None,
        seed: int,
        output: str,
        media: MediaOptions,
    ) -> None:
        check_output(output)
        self._config = config if isinstance(config, DatasetConfig) else DatasetConfig.load(config)
        self._settings = self._config.plan_settings()
        if not self._settings:
            file = self._config.location.file
            problem = f"config: {file} lists data sets and does not say how rows are made of them"
            raise SettingsError([f"{problem}; write dataset: with packing and packing_length"])
        self._settings |= {"seed": seed, "output": output, "media": media}
        self._folder = _get_default_folder(self._config) if out is None else Path(out)
        self._store: Store | None = None
        self._by_row = False
        self._process_loader: tuple[int, Loader] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process_loader": None}

    def build(self) -> None:
        """Prepare the data sets, or find that this was done, and open what they became.

        Several processes may call it at once: one does it, and the others wait.

        Raises:
            BatchloomError: whatever ``prepare`` finds wrong.
        """
        with _lock_folder(self._folder):
            result = prepare(self._config, out=self._folder, val_fraction=0)
        _LOG.info("%s documents are in %s.", f"{result.counts.documents:,}", self._folder)
        self._store, self._process_loader = open_store(self._folder), None
        self._by_row = stacks_features_by_row(self._store)
        self.loader().announce()

    def loader(self) -> Loader:
        """This process's loader, whose step p is row p.

        Raises:
            InputError: nothing was built yet.
        """
        if self._store is None:
            raise InputError("There are no rows yet: call build() first.")
        # Locks and maps do not cross a fork.
        if self._process_loader is None or self._process_loader[0] != os.getpid():
            settings = {**self._settings, "global_batch_size": 1, "rank": 0, "world_size": 1}
            self._process_loader = os.getpid(), Loader(self._store, prefetch=0, **settings)
        return self._process_loader[1]

    def __len__(self) -> int:
        return len(self.loader())

    def row(self, number: int) -> CollateRow:
        """A row by its place in the order; one behind the last holds no document and has no loss."""
        return take_single_row(self.loader().batch(number), by_row=self._by_row)

    def collator(self) -> Collator:
        """What makes a batch of rows; it can be handed to other processes."""
        self.loader()
        return partial(collate_rows, by_row=self._by_row)

    def lengths(self) -> list[int]:
        """Tokens of each row, negative where it holds no medium."""
        loader, row_lengths = self.loader(), list[int]()
        for start in range(0, len(loader), _AT_ONCE):
            rows = loader.plan.rows(start, min(start + _AT_ONCE, len(loader)))
            tokens = np.add.reduceat(rows.lengths, rows.pointers[:-1])
            media = loader.costs.media_tokens(loader.plan, rows)
            row_lengths += np.where(media > 0, tokens, -tokens).tolist()
        return row_lengths


def _get_default_folder(config: DatasetConfig) -> Path:
    """The folder of the store of a config that nobody gave one."""
    plain_config = config.model_dump(mode="json")
    # Relative paths mean others elsewhere.
    base_path = str(Path(config.location.file or "").absolute())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "batchloom" / "datasets" / fingerprint({"config": plain_config, "begin": base_path})


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process makes the store of a folder, and keep others from it."""
    lock_path = folder.with_name(f"{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OutputError(f"{lock_path} cannot be written: {describe_os_error(error)}.") from error
    try:
        # The kernel lets go of it when the process dies, however it dies.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
