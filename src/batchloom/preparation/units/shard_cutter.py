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
        cumulative_tokens = np.cumsum(rows["length"], dtype=np.int64)
        # Where a shard may end: behind every document but the first of a pair.
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
