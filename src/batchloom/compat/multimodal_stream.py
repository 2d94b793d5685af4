"""``MultiModalIterableDataset``: rows of ``MultiModalDataset``, sharded by rank."""

import os
from collections.abc import Iterator
from typing import final

from torch.utils.data import IterableDataset, get_worker_info

from batchloom.batches import Loader, MediaOptions, find_world
from batchloom.batches.assembly import DEFAULT_MEDIA_SPEC
from batchloom.batches.loading import find_second_share
from batchloom.batches.media import CollateRow
from batchloom.compat.multimodal import Collator, MultiModalDataset
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan import check_world, rank_positions
from batchloom.preparation import DatasetConfig


@final
class MultiModalIterableDataset(IterableDataset[CollateRow]):
    """Rows of :class:`batchloom.compat.MultiModalDataset`, in order, sharded by rank.

    ``DataLoader(dataset, batch_size=B, collate_fn=dataset.get_collator(), num_workers=N)`` gives on rank r of R the
    batches of ``Loader(store, global_batch_size=B * R, rank=r, world_size=R, **config.plan_settings())``, if
    ``batch_size=B`` is given here, too. With any other number each row comes once, in another order. The rows
    of the last partial step are distributed evenly, so that all ranks have the same number: some get a final row
    without document and loss. Every iteration is the same.

    Args:
        config, out, seed, output, media: as of :class:`batchloom.compat.MultiModalDataset`.
        batch_size: batch size of the DataLoader.
        rank: data-parallel rank; detected if neither it nor ``world_size`` is given. Frameworks that distribute
            an iterable dataset themselves (Accelerate, Trainer) get the rows of all ranks.
        world_size: number of data-parallel ranks.

    Raises:
        SettingsError, MissingDependencyError: as :class:`batchloom.compat.MultiModalDataset`.
        PlanError: the rank does not exist.
    """

    def __init__(
        self,
        config: DatasetConfig | str | os.PathLike[str],
        *,
        out: str | os.PathLike[str] | None = None,
        seed: int = 0,
        output: str = "torch",
        media: MediaOptions = DEFAULT_MEDIA_SPEC,
        batch_size: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        size = as_int(batch_size) or 0
        if size < 1:
            raise_problems([f"batch_size: {quote_value(batch_size)} is not a whole number of at least 1"])
        self._rows = MultiModalDataset(config, out=out, seed=seed, output=output, media=media)
        self._batch = size
        self._requested_world = (rank, world_size)
        self._world = self._resolve_world()
        self._is_divided = False

    def _resolve_world(self) -> tuple[int, int]:
        rank, world_size = find_world(*self._requested_world)
        check_world(self._batch * world_size, rank, world_size)
        return rank, world_size

    def build(self) -> None:
        """Prepare the data and detect the rank, which workers inherit.

        See :class:`batchloom.compat.MultiModalDataset`.
        """
        self._rows.build()
        self._world = self._resolve_world()

    def __len__(self) -> int:
        """Return the rows of this rank; with one rank those of the map-style dataset."""
        _, world_size = self._find_share()
        whole_steps = len(self._rows) // (self._batch * world_size)
        return whole_steps * self._batch + len(self._share(whole_steps, *self._find_share()))

    def set_epoch(self, epoch: int) -> None:
        """Find out whether the caller divides the rows, which workers cannot see."""
        self._is_divided = find_second_share() is not None

    def _find_share(self) -> tuple[int, int]:
        """Return rank and world size; 0 of 1 if the caller divides the rows."""
        return (0, 1) if self._is_divided or find_second_share() is not None else self._world

    def __iter__(self) -> Iterator[CollateRow]:
        rank, world_size = self._find_share()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        step = number
        # A DataLoader takes a batch from each of its workers in turn.
        while share := self._share(step, rank, world_size):
            for position in share:
                yield self._rows.read_row(position)
            step += workers

    def _share(self, step: int, rank: int, world_size: int) -> list[int]:
        """Return the positions of a rank's rows in a step."""
        count = len(self._rows)
        start = step * self._batch * world_size
        row_count = min(self._batch * world_size, count - start)
        if row_count <= 0:
            return []
        first, stop = rank_positions(0, row_count, rank, world_size)
        positions = list(range(start + first, start + stop))
        return positions + [count] * (-(-row_count // world_size) - len(positions))

    def make_loader(
        self, *, global_batch_size: int, micro_batch_size: int, steps: int | None, epochs: int | None
    ) -> Loader:
        """Return a loader of these rows, see :class:`batchloom.compat.MultiModalDataset`."""
        return self._rows.make_loader(
            global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, steps=steps, epochs=epochs
        )

    def get_collator(self) -> Collator:
        """Return the collator, see :class:`batchloom.compat.MultiModalDataset`."""
        return self._rows.get_collator()

    @property
    def modality_length(self) -> list[int]:
        """Lengths of all rows, as of :class:`batchloom.compat.MultiModalDataset`."""
        return self._rows.modality_length
