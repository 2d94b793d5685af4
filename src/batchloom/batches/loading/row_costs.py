"""What the rows of a step cost: attention, and the work that media are before they are tokens."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import Plan, compute_row_costs
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia

Ids = NDArray[np.int64]


@final
class RowCosts:
    """Costs of rows: the squares of their spans, and where stores hold media the tokens that stand for these.

    What a model's tower does for a medium grows with its tokens, whatever else the row holds. The same on every
    rank: it is told of the plan, and of files that lie beside the tokens and never change.
    """

    def __init__(self) -> None:
        self._media_by_source: dict[str, tuple[Store, StoreMedia]] = {}

    def of(self, plan: Plan, rows: Rows) -> Ids:
        """The costs of rows [R]: int64 [R]; where a store of the plan holds media int64 [2, R], their tokens last.

        Raises:
            StoreError: a file of media is missing or damaged.
            InputError: a store with media lies elsewhere.
        """
        squares = compute_row_costs(rows)
        media = [self._media_of(name, store) for name, store in plan.stores.items()]
        if not any(store_media is not None for store_media in media):
            return squares
        return np.stack([squares, count_media_tokens(rows, media)])

    def media_tokens(self, plan: Plan, rows: Rows) -> Ids:
        """Tokens of each row that stand for media, int64 [R]; raises as :meth:`of`."""
        return count_media_tokens(rows, [self._media_of(name, store) for name, store in plan.stores.items()])

    def _media_of(self, name: str, store: object) -> StoreMedia | None:
        """The media of a source's store; None where it holds none, or is only lengths."""
        if not isinstance(store, Store) or store.manifest is None or not store.manifest.processor:
            return None
        cached_media = self._media_by_source.get(name)
        # By an edit a source may have another store than it had.
        if cached_media is None or cached_media[0] is not store:
            cached_media = self._media_by_source[name] = store, StoreMedia(store)
        return cached_media[1] if cached_media[1].any else None


def count_media_tokens(rows: Rows, media: list[StoreMedia | None]) -> Ids:
    """Tokens of each row that stand for media, int64 [R].

    Args:
        rows: of documents that are numbered inside their sources.
        media: of each source, in the order of their numbers; None where it holds none.

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
