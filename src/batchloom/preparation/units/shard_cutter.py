"""Where shards end: a matter of the lengths of documents alone."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.settings import SHARD_DOCUMENTS
from batchloom.store import CHOSEN


@final
class ShardCutter:
    """Where the shards of one unit and subset end, as its documents pass.

    Args:
        most_tokens: a shard has at most so many, except for a single longer document or pair.
        most_documents: a shard has at most so many.
    """

    def __init__(self, most_tokens: int, most_documents: int = SHARD_DOCUMENTS) -> None:
        self._most_tokens, self._most_documents = most_tokens, most_documents
        self._tokens = self._documents = 0
        self.shards = 0

    def cut(self, rows: NDArray[np.void]) -> list[tuple[int, int, bool]]:
        """Stretches (start, stop, whether a shard begins) of the next documents.

        Args:
            rows: the documents [D], with the second of each pair that begins among them.
        """
        sums = np.cumsum(rows["length"], dtype=np.int64)
        # Where a shard may end: behind every document but the first of a pair.
        ends = np.flatnonzero(rows["side"] != CHOSEN) + 1
        reach = sums[ends - 1]
        pieces, at, start = [], 0, 0
        while at < len(ends):
            before = int(reach[at - 1]) if at else 0
            room = before + self._most_tokens - self._tokens
            last = start + self._most_documents - self._documents
            fit = int(np.searchsorted(reach, room, side="right"))
            fit = min(fit, int(np.searchsorted(ends, last, side="right")))
            if fit <= at and self._documents:
                self._tokens = self._documents = 0
                continue
            fit = max(fit, at + 1)
            stop = int(ends[fit - 1])
            fresh = self._documents == 0
            self.shards += fresh
            self._documents += stop - start
            self._tokens += int(reach[fit - 1]) - before
            pieces.append((start, stop, fresh))
            at, start = fit, stop
        return pieces
