"""Costs of a step's rows: attention, and the encoding of media."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import Plan, compute_row_costs
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia

Ids = NDArray[np.int64]


@final
class RowCosts:
    """Costs of rows: squared span lengths, and media tokens for stores with media.

    The work of a model's media encoder grows with the tokens of a medium, whatever else the row holds. Costs
    are the same on every rank: they come from the plan and from immutable files of the store.
    """

    def __init__(self) -> None:
        self._media_by_source: dict[str, tuple[Store, StoreMedia]] = {}

    def of(self, plan: Plan, rows: Rows) -> Ids:
        """Return the costs of rows, int64 [R]; with media int64 [2, R], media tokens last.

        Raises:
            StoreError: a file of media is missing or damaged.
            InputError: a remote store with media cannot be read.
        """
        squares = compute_row_costs(rows)
        media = [self._media_of(name, store) for name, store in plan.stores.items()]
        if not any(store_media is not None for store_media in media):
            return squares
        return np.stack([squares, count_media_tokens(rows, media)])

    def media_tokens(self, plan: Plan, rows: Rows) -> Ids:
        """Return the media tokens of each row, int64 [R]; raises as :meth:`of`."""
        return count_media_tokens(rows, [self._media_of(name, store) for name, store in plan.stores.items()])

    def _media_of(self, name: str, store: object) -> StoreMedia | None:
        """Return the media of a source's store; None if it holds none or only lengths."""
        if not isinstance(store, Store) or store.manifest is None or not store.manifest.processor:
            return None
        cached_media = self._media_by_source.get(name)
        # An edit may replace the store of a source.
        if cached_media is None or cached_media[0] is not store:
            cached_media = self._media_by_source[name] = store, StoreMedia(store)
        return cached_media[1] if cached_media[1].any else None


def count_media_tokens(rows: Rows, media: list[StoreMedia | None]) -> Ids:
    """Count the media tokens of each row, int64 [R].

    Args:
        rows: rows whose documents are numbered inside their sources.
        media: media of each source, in the order of source numbers; None for a source without media.

    Raises:
        StoreError: a file of media is missing or damaged.
    """
    tokens = np.zeros(len(rows.documents), np.int64)
    for number, store_media in enumerate(media):
        if store_media is not None:
            spans = np.flatnonzero(rows.sources == number)
            tokens[spans] = store_media.count_tokens(rows.documents[spans])
    if rows.banned is not None:
        tokens[rows.banned] = 0
    cumulative = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens, out=cumulative[1:])
    return cumulative[rows.pointers[1:]] - cumulative[rows.pointers[:-1]]
