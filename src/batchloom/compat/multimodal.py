"""``MultiModalDataset``: packed rows of conversations with images and audio, map-style."""

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
    """The data sets of a ``DatasetConfig``, of any type, packed; item n is row n.

    ``DataLoader(dataset, batch_size=B, collate_fn=dataset.get_collator(), num_workers=N)`` gives the batches of
    ``Loader(store, global_batch_size=B, **config.plan_settings())`` over the same store. For exact resuming, ranks that
    are dealt about the same, and several epochs in an order each, take that.

    Args:
        config: data sets and how they are packed, or the YAML file of one.
        out: folder of the store that they become; None for one of the user's cache, named by the config.
        seed: of the order.
        output: ``torch`` or ``numpy``.
        media: how images and audio are read.

    Raises:
        SettingsError: a config that does not say how rows are made (a bare list), or settings that are none.
        MissingDependencyError: torch is asked for and not installed.
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
        """Prepare the data sets, or find that this was done; of several processes one does it, and the others wait.

        Raises:
            BatchloomError: whatever ``prepare`` finds wrong.
        """
        self._rows.build()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> CollateRow:
        """Row ``number``: ``input_ids``, ``labels`` (-100 where nothing is trained) and ``position_ids`` int64 [S].

        Positions are [4, S] where the model takes M-RoPE. A row with media has the processor's keys, too, each with an
        axis of media first.

        Raises:
            MediumError: a medium cannot be read, or is not what it was.
            InputError: nothing was built yet.
        """
        count, index = len(self), as_int(number)
        if index is None:
            raise InputError(f"Rows are taken one by one, by a whole number, not by {quote_value(number)}.")
        if not -count <= index < count:
            raise IndexError(f"There is no row {number}: there are {count:,}, numbered from 0.")
        return self._rows.row(index % count)

    def get_collator(self) -> Collator:
        """What makes a batch of rows, for ``collate_fn``: tokens stacked, features one behind the other."""
        return self._rows.collator()

    @property
    def modality_length(self) -> list[int]:
        """Tokens of each row, positive where it holds an image or a sound, negative where it holds text alone.

        As samplers with ``group_by_modality_length`` take it (LLaVA's ``LengthGroupedSampler``).
        """
        return self._rows.lengths()
