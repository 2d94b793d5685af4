"""``MultiModalIterableDataset``: the rows of ``MultiModalDataset`` one after the other, a share for each rank."""

import os
from collections.abc import Iterator
from typing import final

from torch.utils.data import IterableDataset, get_worker_info

from batchloom.batches import MediaOptions, find_world
from batchloom.batches.assembly import DEFAULT_MEDIA_SPEC
from batchloom.batches.loading import CollateRow
from batchloom.compat.multimodal_rows import Collator, PackedRows
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan import check_world, rank_positions
from batchloom.preparation import DatasetConfig


@final
class MultiModalIterableDataset(IterableDataset[CollateRow]):
    """The rows of :class:`batchloom.compat.MultiModalDataset` of the same config and seed, in their order.

    ``DataLoader(dataset, batch_size=B, collate_fn=dataset.get_collator(), num_workers=N)`` gives on rank r of R the
    batches of ``Loader(store, global_batch_size=B * R, rank=r, world_size=R, **config.plan_settings())``, if
    ``batch_size=B`` is said here, too; with any other number each row comes once, in another order. What is left at
    the end is dealt to the ranks as evenly as can be, so that all have the same number of rows: some end with one that
    holds no document and has no loss. Every iteration is the same.

    Args:
        config, out, seed, output, media: as of :class:`batchloom.compat.MultiModalDataset`.
        batch_size: rows that a DataLoader makes a batch of.
        rank: data-parallel rank; found out when it is built where neither it nor ``world_size`` is given. What deals
            an iterable data set to ranks by itself (accelerate) is given 0 of 1.
        world_size: number of data-parallel ranks.

    Raises:
        SettingsError, MissingDependencyError: as :class:`batchloom.compat.MultiModalDataset`.
        PlanError: there is no such rank.
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
            raise_problems([f"batch_size: {quote_value(batch_size)} is no whole number of at least 1"])
        self._rows = PackedRows(config, out, seed, output, media)
        self._batch, self._requested_world = size, (rank, world_size)
        self._world = self._resolve_world()

    def _resolve_world(self) -> tuple[int, int]:
        rank, world_size = find_world(*self._requested_world)
        check_world(self._batch * world_size, rank, world_size)
        return rank, world_size

    def build(self) -> None:
        """As of :class:`batchloom.compat.MultiModalDataset`; the rank is found out here, and handed to workers."""
        self._rows.build()
        self._world = self._resolve_world()

    def __len__(self) -> int:
        """Rows of this rank; of one rank alone those of the map-style one."""
        _, world_size = self._world
        whole_steps = len(self._rows) // (self._batch * world_size)
        return whole_steps * self._batch + len(self._share(whole_steps))

    def __iter__(self) -> Iterator[CollateRow]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        step = number
        # A DataLoader takes a batch from each of its workers in turn.
        while share := self._share(step):
            for position in share:
                yield self._rows.row(position)
            step += workers

    def _share(self, step: int) -> list[int]:
        """The places in the order of this rank's rows of a step, those behind the last for rows that fill it up."""
        rank, world_size = self._world
        count = len(self._rows)
        start = step * self._batch * world_size
        row_count = min(self._batch * world_size, count - start)
        if row_count <= 0:
            return []
        first, stop = rank_positions(0, row_count, rank, world_size)
        positions = list(range(start + first, start + stop))
        return positions + [count] * (-(-row_count // world_size) - len(positions))

    def get_collator(self) -> Collator:
        """As of :class:`batchloom.compat.MultiModalDataset`."""
        return self._rows.collator()

    @property
    def modality_length(self) -> list[int]:
        """Of all rows, as of :class:`batchloom.compat.MultiModalDataset`."""
        return self._rows.lengths()
