"""Sequences of each pool of a source, and the rows of its latest pools."""

from collections import OrderedDict
from collections.abc import Callable
from typing import final

import numpy as np

from batchloom.core.errors import PlanError
from batchloom.plan.packing.pools import Pools
from batchloom.plan.packing.rows import Ints, Rows


@final
class PoolCounts:
    """Number of sequences of each pool, counted when it is first needed.

    Attributes:
        pools: pools of the source.
        by_pool: sequences of each pool, -1 if unknown, int64 [pools].
        total: sum of ``by_pool``, or -1 if unknown.
        is_complete: True if the sequences of every pool are known.
    """

    def __init__(self, pools: Pools, seq_len: int) -> None:
        self.pools = pools
        self._seq_len = seq_len
        self.by_pool = np.full(pools.count, -1, np.int64)
        self.total = -1

    @property
    def is_complete(self) -> bool:
        return self.total >= 0

    @property
    def sequences(self) -> int:
        """Sequences of one epoch; counts all pools first if necessary."""
        if self.total < 0:
            self.count_all()
        return self.total

    def copy_from(self, known: "PoolCounts") -> None:
        """Take over the counts of another order of the same source and spec."""
        # Read the total first: it is set after all counts, and another thread may be counting.
        total = known.total
        self.by_pool = known.by_pool.copy()
        self.total = total

    def adopt(self, counts: Ints) -> None:
        """Set the number of sequences of every pool from a cached table."""
        counted_pools = self.by_pool >= 0
        if counts.shape != self.by_pool.shape or (counts[counted_pools] != self.by_pool[counted_pools]).any():
            raise PlanError(
                f"The cached table has {counts.size} pools and this plan has {self.pools.count}. Delete the table; "
                "it will be made again."
            )
        self.by_pool = counts.astype(np.int64)
        self.total = self._compute_total()

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> Ints:
        """Return the sequences of every pool; ``progress`` gets (pools counted, pools)."""
        for pool in range(self.pools.count):
            if self.by_pool[pool] < 0:
                self.by_pool[pool] = self.pools.count_sequences(pool)
            if progress:
                progress(pool + 1, self.pools.count)
        self.total = self._compute_total()
        return self.by_pool.copy()

    def count(self, pool: int) -> int:
        """Return the sequences of a pool; counts it first if necessary."""
        if self.by_pool[pool] < 0:
            self.record(pool, self.pools.count_sequences(pool))
        return int(self.by_pool[pool])

    def record(self, pool: int, count: int) -> None:
        """Set or compare the sequences of a pool that was packed."""
        if self.by_pool[pool] < 0:
            self.by_pool[pool] = count
            if (self.by_pool >= 0).all():
                self.total = self._compute_total()
        elif self.by_pool[pool] != count:
            raise PlanError(
                f"Pool {pool} packs into {count} sequences, and the cached table says {self.by_pool[pool]}: it belongs "
                "to another plan, or the store has changed. Delete the table; it will be made again."
            )

    def get(self, pools: Ints) -> Ints:
        """Return the sequences of counted pools, 0 for pool -1."""
        return np.where(pools >= 0, self.by_pool[pools], 0)

    def _compute_total(self) -> int:
        total = int(self.by_pool.sum())
        if not total:
            raise PlanError(
                f"No sequence can be made of {self.pools.documents} documents: all are empty, or longer than seq_len "
                f"{self._seq_len} with overlong='drop'. Raise seq_len or use overlong='split' (not for documents "
                "with images or audio)."
            )
        return total


@final
class PoolRows:
    """Rows of the latest pools of each lane.

    The cache is per lane, so that a reader of some lanes does not cache pools of the others.

    Attributes:
        limit: pools of each lane whose rows are cached; the caller lowers it for many sources.
    """

    def __init__(self, counts: PoolCounts, lanes: int) -> None:
        self._counts = counts
        self._lanes = lanes
        self.limit = 4 if lanes == 1 else 2
        self._cached: dict[int, OrderedDict[tuple[int, int], Rows]] = {}

    def clear(self) -> None:
        """Drop the cached rows; they are rebuilt on demand."""
        self._cached.clear()

    def count_cached(self) -> int:
        """Return the number of pools whose rows are cached."""
        return sum(map(len, self._cached.values()))

    def get(self, pool: int, epoch: int) -> Rows:
        """Return all rows of a pool in the order of an epoch."""
        pools = self._counts.pools
        cache = self._cached.setdefault(pool % self._lanes, OrderedDict())
        rows = cache.pop((epoch, pool), None)
        if rows is None:
            # A small source returns to the same pool often, so its rows are reordered instead of repacked.
            known = next((key for key in cache if key[1] == pool), None)
            rows = pools.rows(pool, epoch) if known is None else pools.rebuild_rows(cache[known], pool, known[0], epoch)
            self._counts.record(pool, len(rows))
        cache[epoch, pool] = rows
        while len(cache) > self.limit:
            cache.popitem(last=False)
        return rows
