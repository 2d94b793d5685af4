"""Shard boundaries of a unit, decided by document lengths alone."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.settings.recipe import SHARD_DOCUMENTS
from batchloom.store import CHOSEN


@final
class ShardCutter:
    """Incremental cutter of one unit and subset into shards.

    Args:
        most_tokens: maximum tokens of a shard, except for a single longer document or pair.
        most_documents: maximum documents of a shard.
    """

    def __init__(self, most_tokens: int, most_documents: int = SHARD_DOCUMENTS) -> None:
        self._most_tokens, self._most_documents = most_tokens, most_documents
        self._tokens = self._documents = 0
        self.shards = 0

    def cut(self, rows: NDArray[np.void]) -> list[tuple[int, int, bool]]:
        """Return ranges (start, stop, begins a shard) of the next documents.

        Args:
            rows: documents, ROW [D]; no preference pair may be split between calls.
        """
        cumulative_tokens = np.cumsum(rows["length"], dtype=np.int64)
        # A shard may end after every document but the first of a pair.
        ends = np.flatnonzero(rows["side"] != CHOSEN) + 1
        reach = cumulative_tokens[ends - 1]
        shard_ranges, end_index, start = [], 0, 0
        while end_index < len(ends):
            before = int(reach[end_index - 1]) if end_index else 0
            room = before + self._most_tokens - self._tokens
            last = start + self._most_documents - self._documents
            next_end_index = int(np.searchsorted(reach, room, side="right"))
            next_end_index = min(next_end_index, int(np.searchsorted(ends, last, side="right")))
            if next_end_index <= end_index and self._documents:
                self._tokens = self._documents = 0
                continue
            next_end_index = max(next_end_index, end_index + 1)
            stop = int(ends[next_end_index - 1])
            fresh = self._documents == 0
            self.shards += fresh
            self._documents += stop - start
            self._tokens += int(reach[next_end_index - 1]) - before
            shard_ranges.append((start, stop, fresh))
            end_index, start = next_end_index, stop
        return shard_ranges
