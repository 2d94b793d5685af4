"""``MultiModalDataset``: packed rows of multimodal conversations, map-style."""

import os
from typing import final

from batchloom.batches import MediaOptions
from batchloom.batches.assembly import DEFAULT_MEDIA_SPEC
from batchloom.batches.loading import CollateRow
from batchloom.compat.multimodal_rows import Collator, PackedRows
from batchloom.core.errors import InputError
from batchloom.core.settings import as_int, quote_value
from batchloom.preparation import DatasetConfig


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
        self._rows = PackedRows(config, out, seed, output, media)

    def build(self) -> None:
        """Prepare the datasets, unless they are prepared; one process works, others wait.

        Raises:
            BatchloomError: any error of ``prepare``.
        """
        self._rows.build()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> CollateRow:
        """Return a row: ``input_ids``, ``labels`` and ``position_ids``, each int64 [S].

        Labels are -100 without a loss. Positions are [4, S] for models with M-RoPE. A row with media also has the
        processor's keys, each with an axis of media first.

        Raises:
            MediumError: a medium cannot be read, or has changed.
            InputError: ``build`` was not called.
        """
        count, index = len(self), as_int(number)
        if index is None:
            raise InputError(f"Rows are read one by one, by a whole number, not by {quote_value(number)}.")
        if not -count <= index < count:
            raise IndexError(f"There is no row {number}: there are {count:,}, numbered from 0.")
        return self._rows.row(index % count)

    def get_collator(self) -> Collator:
        """Return the ``collate_fn``: tokens are stacked, media features concatenated."""
        return self._rows.collator()

    @property
    def modality_length(self) -> list[int]:
        """Tokens of each row, positive with an image or audio, negative with text alone.

        Samplers with ``group_by_modality_length`` take it (LLaVA's ``LengthGroupedSampler``).
        """
        return self._rows.lengths()
