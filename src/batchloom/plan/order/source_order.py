"""Endless order of one source: the row of each sequence of each of its lanes.

The pools of a source are distributed over the lanes, pool k to lane k mod K. In an epoch each lane serves its own
pools in the epoch's order. Lanes hold unequal numbers of sequences but must serve equal numbers, so the last
sequences of longer lanes go to shorter ones. Each sequence is served once per epoch, and nearly all by their own
lane.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from batchloom.core.errors import PlanError
from batchloom.plan.mixture import PlanStore
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec
from batchloom.plan.packing.pools import Pools
from batchloom.plan.packing.rows import Ints, Rows, slice_rows

_MAX_CACHED_EPOCHS = 2
_MAX_CACHED_ANCHORS = 1024


class Cursor(NamedTuple):
    """Pool in a lane's order: its epoch, its index, the lane's sequences before it."""

    epoch: int
    slot: int
    before: int


class SequenceLocation(NamedTuple):
    """Location of a sequence in a pool.

    ``pool`` -1 - k is the remainder of lane k after an edit. ``run`` counts the consecutive rows from ``row`` on.
    ``cursor`` is None for a remainder and for sequences lent by another lane.
    """

    pool: int
    epoch: int
    row: int
    run: int
    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a source: per lane its pools in order, and cumulative sequences.

    ``ends`` is empty before all pools are counted. It includes ``remainder_counts``; pools before ``begins`` have
    no sequences.
    """

    orders: tuple[Ints, ...]
    ends: tuple[Ints, ...]
    remainder_counts: tuple[int, ...]

    def count_sequences(self, lane: int) -> int:
        return int(self.ends[lane][-1]) if self.ends[lane].size else self.remainder_counts[lane]


class PoolCountCache(NamedTuple):
    """Known counts of an order: sequences per pool, their total, and pool locations."""

    counts: Ints
    total: int
    anchors: tuple[tuple[Cursor, ...], ...]


@final
class SourceOrder:
    """Order of one source under one spec, from a cursor on.

    Args:
        name: name of the source, part of every key.
        store: store with the documents of the source.
        spec: settings; ``lanes``, ``seq_len`` and those that :class:`Pools` reads are used.
        remainders: repacked rows of each lane that come first after an edit.
        begins: first complete pool of each lane after them; ``before`` is the length of the lane's remainder.
        served_tokens: upper bound of the tokens in sequences served before ``remainders``.

    Attributes:
        pools: pools of the source.
        lanes: number of lanes.
        counts: sequences of each pool, -1 if unknown, int64 [pools].
        total: sum of ``counts``, or -1 if unknown.
        first_epoch: first epoch with unserved sequences.
        max_cached_pools: pools of each lane whose rows are cached; the caller lowers it for many sources.
    """

    def __init__(
        self,
        name: str,
        store: PlanStore,
        spec: PlanSpec,
        *,
        remainders: tuple[Rows | None, ...] | None = None,
        begins: tuple[Cursor, ...] | None = None,
        served_tokens: int = 0,
    ) -> None:
        self.name, self.spec, self.lanes = name, spec, spec.lanes
        self.store = store
        self.pools = Pools(store.lengths, spec, name)
        self.remainders = remainders or (None,) * self.lanes
        self.begins = begins or (Cursor(0, 0, 0),) * self.lanes
        self.served_tokens = served_tokens
        self.first_epoch = min(begin.epoch for begin in self.begins)
        self._last_begun = max(begin.epoch for begin in self.begins)
        self._cumulative_sequences: list[int] = []
        self.max_cached_pools = 4 if self.lanes == 1 else 2
        self.counts = np.full(self.pools.count, -1, np.int64)
        self.total = -1
        self._latest_locations: dict[int, tuple[int, SequenceLocation]] = {}
        # The cache is per lane, so that a reader of some lanes does not cache pools of the others.
        self._cached_rows: dict[int, OrderedDict[tuple[int, int], Rows]] = {}
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        # Cursors of pools whose number of preceding sequences is known, per lane.
        self.anchors = [[begin] for begin in self.begins]

    @property
    def is_counted(self) -> bool:
        """True if the number of sequences of every pool is known."""
        return self.total >= 0

    @property
    def count_cache(self) -> PoolCountCache:
        """Copy of the known counts, for another order of the same source and spec."""
        # Read the total first: it is set after all counts, and another thread may be counting.
        total = self.total
        return PoolCountCache(self.counts.copy(), total, tuple(tuple(own) for own in self.anchors))

    def load_count_cache(self, count_cache: PoolCountCache) -> None:
        """Load the counts of another order of the same source and spec."""
        self.counts, self.total = count_cache.counts, count_cache.total
        self.anchors = [list(own) for own in count_cache.anchors]

    def forget_rows(self) -> None:
        """Drop the cached rows; they are rebuilt on demand."""
        self._cached_rows.clear()

    def adopt(self, counts: Ints) -> None:
        """Set the number of sequences of every pool from a cached table."""
        counted_pools = self.counts >= 0
        if counts.shape != self.counts.shape or (counts[counted_pools] != self.counts[counted_pools]).any():
            raise PlanError(
                f"The cached table has {counts.size} pools and this plan has {self.pools.count}. Delete the table; "
                "it will be made again."
            )
        self.counts = counts.astype(np.int64)
        self.total = self._compute_total()

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> Ints:
        """Return the sequences of every pool; ``progress`` gets (pools counted, pools)."""
        for pool in range(self.pools.count):
            if self.counts[pool] < 0:
                self.counts[pool] = self.pools.count_sequences(pool)
            if progress:
                progress(pool + 1, self.pools.count)
        self.total = self._compute_total()
        return self.counts.copy()

    def _compute_total(self) -> int:
        total = int(self.counts.sum())
        if not total:
            raise PlanError(
                f"No sequence can be made of {self.pools.documents} documents: all are empty, or longer than seq_len "
                f"{self.spec.seq_len} with overlong='drop'. Raise seq_len or use overlong='split' (not for documents "
                "with images or audio)."
            )
        return total

    @property
    def sequences(self) -> int:
        """Sequences of one epoch; counts all pools first if necessary."""
        if self.total < 0:
            self.count_all()
        return self.total

    def quotas(self, epochs: int) -> Ints:
        """Return the sequences of each lane in the first ``epochs``; counts all pools."""
        return compute_quotas(self._count_before(epochs), self.lanes)

    def _count_before(self, epoch: int) -> int:
        """Count the sequences of all lanes from ``begins`` to an epoch; counts all pools."""
        if not self._cumulative_sequences:
            total = self.sequences
            if not any(any(begin) for begin in self.begins):
                self._cumulative_sequences = [total]
            for epoch_number in range(self.first_epoch + len(self._cumulative_sequences), self._last_begun + 1):
                epoch_layout = self.epoch(epoch_number)
                own = sum(epoch_layout.count_sequences(lane) for lane in range(self.lanes))
                self._cumulative_sequences.append(
                    own + (self._cumulative_sequences[-1] if self._cumulative_sequences else 0)
                )
        epochs_before = epoch - self.first_epoch
        if epochs_before <= len(self._cumulative_sequences):
            return self._cumulative_sequences[epochs_before - 1] if epochs_before > 0 else 0
        return self._cumulative_sequences[-1] + (epochs_before - len(self._cumulative_sequences)) * self.total

    def find_epoch(self, lane: int, index: int) -> int:
        """Return the epoch of a sequence of a lane; counts all pools first."""
        # Sequences are dealt to the lanes one by one, so index of this lane is sequence index * lanes + lane
        # overall.
        number, partial = index * self.lanes + lane, self._count_before(self._last_begun + 1)
        if number < partial:
            return self.first_epoch + bisect_right(self._cumulative_sequences, number)
        return self._last_begun + 1 + (number - partial) // self.total

    def surely_has(self, counts: Ints, epochs: int) -> bool:
        """Return whether each lane has this many sequences in the first ``epochs``.

        Only as many pools are counted as the answer needs.
        """
        # Sequences are dealt to the lanes one by one, until each lane has its count.
        dealt = ((counts - 1) * self.lanes + np.arange(self.lanes) + 1)[counts > 0]
        return self._surely_has(int(dealt.max(initial=0)), epochs)

    def _surely_has(self, sequences: int, epochs: int) -> bool:
        """Return whether the first ``epochs`` have this many sequences in total."""
        tokens = epochs * self.store.tokens - self.served_tokens
        if self.spec.overlong == "split" and tokens > (sequences - 1) * self.spec.seq_len:
            return True
        return self._count_ahead(sequences, epochs) >= sequences

    def _count_ahead(self, target_count: int, epochs: int) -> int:
        """Count sequences of the first ``epochs`` until ``target_count`` is reached."""
        pass_counts = np.zeros(self.pools.count, np.int64)
        sequence_count = 0
        for lane, begin in enumerate(self.begins):
            pass_counts[lane :: self.lanes] = max(epochs - begin.epoch - 1, 0)
            if epochs > begin.epoch:
                pass_counts[self.epoch(begin.epoch).orders[lane][begin.slot :]] += 1
                sequence_count += begin.before
        counted_pools = self.counts > 0
        sequence_count += int((self.counts[counted_pools] * pass_counts[counted_pools]).sum())
        for pool in np.flatnonzero((self.counts < 0) & (pass_counts > 0)).tolist():
            if sequence_count >= target_count:
                break
            sequence_count += self._count(pool) * int(pass_counts[pool])
        return sequence_count

    def find_cursor(self, lane: int, index: int) -> Cursor:
        """Return the cursor of a lane's next sequence, or else the lane's first one."""
        location = self.find(lane, index) if index else None
        return location.cursor if location and location.cursor else self.begins[lane]

    @property
    def table_identity(self) -> dict[str, Any]:
        """Fields that the sequence counts depend on, as the key of their cache.

        Epochs and batch size are not among them.
        """
        names = ["seq_len", "packing", "overlong", "seed", "shuffle", "pool_size"]
        names += ["align"] if self.spec.align > 1 else []
        spec = self.spec.identity_fields()
        return {
            "order_version": ORDER_VERSION,
            "store": self.store.fingerprint,
            "source": self.name,
            "block": self.pools.blocks[0],
            **self.pools.layers_identity(),
            **{name: spec[name] for name in names},
        }

    def find(self, lane: int, index: int, epochs: int | None = None) -> SequenceLocation | None:
        """Return the location of sequence ``index`` of a lane; None past ``epochs``.

        If all pools are counted, this is a binary search over sums that are computed once per epoch. Otherwise it
        walks from the nearest known pool and counts the pools in between.
        """
        latest = self._latest_locations.get(lane)
        if latest is not None:
            begin, cached_location = latest
            ahead = index - begin
            # Most lookups hit the pool of the previous one.
            if 0 <= ahead < cached_location.run and (epochs is None or cached_location.epoch < epochs):
                pool, epoch, row, run, cursor = cached_location
                return SequenceLocation(pool, epoch, row + ahead, run - ahead, cursor)
        is_counted = self.total >= 0
        location = (self._search if is_counted else self._walk)(lane, index, epochs)
        if location is not None:
            self._latest_locations[lane] = (index, location)
        return location

    def _search(self, lane: int, index: int, epochs: int | None) -> SequenceLocation | None:
        epoch = self.find_epoch(lane, index)
        if epochs is not None and epoch >= epochs:
            return None
        epoch_layout = self.epoch(epoch)
        earlier = _compute_quota(self._count_before(epoch), lane, self.lanes)
        inside = index - earlier
        if inside >= epoch_layout.count_sequences(lane):
            return self._find_lent(epoch_layout, epoch, lane, inside)
        location = self.locate_own(epoch, lane, inside)
        quota = _compute_quota(self._count_before(epoch + 1), lane, self.lanes) - earlier
        cursor = location.cursor and location.cursor._replace(before=earlier + location.cursor.before)
        return location._replace(run=min(location.run, quota - inside), cursor=cursor)

    def locate_own(self, epoch: int, lane: int, inside: int) -> SequenceLocation:
        """Locate a sequence of a lane's own pools; counts from the start of the epoch."""
        epoch_layout = self.epoch(epoch)
        remainder_count = epoch_layout.remainder_counts[lane]
        if inside < remainder_count:
            return SequenceLocation(-1 - lane, epoch, inside, remainder_count - inside, None)
        ends = epoch_layout.ends[lane]
        slot = int(ends.searchsorted(inside, side="right"))
        before = int(ends[slot - 1]) if slot else remainder_count
        cursor = Cursor(epoch, slot, before)
        pool = int(epoch_layout.orders[lane][slot])
        return SequenceLocation(pool, epoch, inside - before, int(ends[slot]) - inside, cursor)

    def _find_lent(self, epoch_layout: Epoch, epoch: int, lane: int, inside: int) -> SequenceLocation:
        """Locate a sequence that another lane lends to a lane with too few of its own."""
        quotas, own_counts = self.count_shares(epoch)
        spare, short = np.maximum(own_counts - quotas, 0), np.maximum(quotas - own_counts, 0)
        number = int(short[:lane].sum()) + inside - epoch_layout.count_sequences(lane)
        spare_ends = np.cumsum(spare)
        lender = int(spare_ends.searchsorted(number, side="right"))
        inside = int(quotas[lender]) + number - (int(spare_ends[lender]) - int(spare[lender]))
        location = self.locate_own(epoch, lender, inside)
        remaining_shortfall = int(short[: lane + 1].sum()) - number
        run = min(location.run, int(spare_ends[lender]) - number, remaining_shortfall)
        return location._replace(run=run, cursor=None)

    def count_shares(self, epoch: int) -> tuple[Ints, Ints]:
        """Return each lane's required and own sequences of an epoch; counts all pools."""
        quotas = compute_quotas(self._count_before(epoch + 1), self.lanes)
        quotas -= compute_quotas(self._count_before(epoch), self.lanes)
        epoch_layout = self.epoch(epoch)
        return quotas, np.array([epoch_layout.count_sequences(lane) for lane in range(self.lanes)], np.int64)

    def find_servers(self, epoch: int, owners: Ints, insides: Ints) -> tuple[Ints, Ints]:
        """Return the lanes that serve sequences, and their indices; counts all pools.

        ``owners`` are their own lanes and ``insides`` their numbers in the epoch.
        """
        quotas, own_counts = self.count_shares(epoch)
        spare, short = np.maximum(own_counts - quotas, 0), np.maximum(quotas - own_counts, 0)
        short_ends = np.cumsum(short)
        numbers = (np.cumsum(spare) - spare)[owners] + insides - quotas[owners]
        lent = insides >= quotas[owners]
        lanes = np.where(lent, short_ends.searchsorted(numbers, side="right"), owners)
        lanes = np.minimum(lanes, self.lanes - 1)
        inside = np.where(lent, own_counts[lanes] + numbers - (short_ends[lanes] - short[lanes]), insides)
        return lanes, inside + self.quotas(epoch)[lanes]

    def _walk(self, lane: int, index: int, epochs: int | None) -> SequenceLocation | None:
        begin, anchors = self.begins[lane], self.anchors[lane]
        anchor_index = bisect_right(anchors, index, key=lambda anchor: anchor.before)
        cursor = anchors[max(anchor_index - 1, 0)]
        if cursor == begin and begin.epoch != self.first_epoch:
            # The number of sequences lent to this lane before its own ones depends on all counts.
            self.count_all()
        elif index < begin.before and self._has_own(lane, begin.before, begin.epoch):
            return self.locate_own(begin.epoch, lane, index)
        empty = 0
        while True:
            if self.total >= 0:
                return self._search(lane, index, epochs)
            order = self.epoch(cursor.epoch).orders[lane]
            if cursor.slot >= len(order):
                if self.lanes > 1:
                    # The number of sequences that other lanes lend depends on all counts.
                    self.count_all()
                    continue
                cursor = Cursor(cursor.epoch + 1, 0, cursor.before)
                continue
            if epochs is not None and cursor.epoch >= epochs:
                return None
            pool = int(order[cursor.slot])
            # A lookup of the first sequence of a pool is followed by reading it, so the pool is packed now and
            # only once.
            starts_pool = index == cursor.before
            count = len(self.get_pool_rows(pool, cursor.epoch)) if starts_pool else self._count(pool)
            if index < cursor.before + count:
                if not self._has_own(lane, cursor.before + count, cursor.epoch):
                    continue
                self.anchor(lane, cursor)
                inside = index - cursor.before
                return SequenceLocation(pool, cursor.epoch, inside, count - inside, cursor)
            empty = 0 if count else empty + 1
            if empty >= self.pools.count:
                self._compute_total()
            cursor = Cursor(cursor.epoch, cursor.slot + 1, cursor.before + count)

    def _has_own(self, lane: int, count: int, epoch: int) -> bool:
        """Return whether a lane serves this many own sequences until an epoch ends."""
        if self.lanes > 1 and not self._surely_has((count - 1) * self.lanes + lane + 1, epoch + 1):
            self.count_all()
        return self.lanes == 1 or self.total < 0

    def anchor(self, lane: int, cursor: Cursor) -> None:
        """Remember the start of a pool; the first and the latest ones are cached."""
        anchors = self.anchors[lane]
        anchor_index = bisect_right(anchors, cursor.before, key=lambda anchor: anchor.before)
        if not anchor_index or anchors[anchor_index - 1] != cursor:
            anchors.insert(anchor_index, cursor)
        if len(anchors) > _MAX_CACHED_ANCHORS:
            del anchors[1]

    def _count(self, pool: int) -> int:
        if self.counts[pool] < 0:
            self.counts[pool] = self.pools.count_sequences(pool)
            self._update_total()
        return int(self.counts[pool])

    def _update_total(self) -> None:
        if (self.counts >= 0).all():
            self.total = self._compute_total()

    def epoch(self, epoch: int) -> Epoch:
        """Return the pools and sequence counts of an epoch."""
        epoch_layout, is_counted = self._epochs.pop(epoch, None), self.total >= 0
        if epoch_layout is None or (is_counted and not epoch_layout.ends):
            order = self.pools.order(epoch)
            if self.lanes == 1:
                orders: tuple[Ints, ...] = (order,)
            else:
                orders = tuple(order[order % self.lanes == lane] for lane in range(self.lanes))
            remainder_counts = tuple(begin.before if begin.epoch == epoch else 0 for begin in self.begins)
            ends = tuple(self._ends(epoch, *lane_order) for lane_order in enumerate(orders)) if is_counted else ()
            epoch_layout = Epoch(orders, ends, remainder_counts)
        self._epochs[epoch] = epoch_layout
        while len(self._epochs) > _MAX_CACHED_EPOCHS:
            self._epochs.popitem(last=False)
        return epoch_layout

    def _ends(self, epoch: int, lane: int, order: Ints) -> Ints:
        """Return a lane's cumulative sequences at the end of each pool of an epoch."""
        begin, counts = self.begins[lane], self.counts[order]
        if epoch > begin.epoch:
            return np.cumsum(counts)
        counts[: begin.slot if epoch == begin.epoch else None] = 0
        return np.cumsum(counts) + (begin.before if epoch == begin.epoch else 0)

    def rows(self, lane: int, start: int, stop: int, epochs: int | None = None) -> list[Rows]:
        """Return the rows of sequences ``start`` to ``stop - 1`` of a lane, by pool.

        There are fewer if ``epochs`` end before ``stop``.
        """
        row_slices = []
        while start < stop:
            location = self.find(lane, start, epochs)
            if location is None:
                break
            rows = self.get_pool_rows(location.pool, location.epoch)
            end = min(start + location.run, stop)
            row_slices.append(slice_rows(rows, location.row, location.row + end - start))
            start = end
        return row_slices

    def get_pool_rows(self, pool: int, epoch: int) -> Rows:
        """Return all rows of a pool in the order of an epoch.

        Pool -1 - k is the remainder of lane k after an edit.
        """
        if pool < 0:
            remainder_rows = self.remainders[-1 - pool]
            if remainder_rows is None:
                raise AssertionError("remaining sequences exist only after a cut")
            return remainder_rows
        lane_cache = self._cached_rows.setdefault(pool % self.lanes, OrderedDict())
        rows = lane_cache.pop((epoch, pool), None)
        if rows is None:
            # A small source returns to the same pool often, so its rows are reordered instead of repacked.
            cached_key = next((cache_key for cache_key in lane_cache if cache_key[1] == pool), None)
            if cached_key is not None:
                rows = self.pools.rebuild_rows(lane_cache[cached_key], pool, cached_key[0], epoch)
            else:
                rows = self.pools.rows(pool, epoch)
            if self.counts[pool] < 0:
                self.counts[pool] = len(rows)
                self._update_total()
            elif self.counts[pool] != len(rows):
                raise PlanError(
                    f"Pool {pool} packs into {len(rows)} sequences, and the cached table says {self.counts[pool]}: "
                    "it belongs to another plan, or the store has changed. Delete the table; it will be made again."
                )
        lane_cache[epoch, pool] = rows
        while len(lane_cache) > self.max_cached_pools:
            lane_cache.popitem(last=False)
        return rows


def _compute_quota(sequences: int, lane: int, lanes: int) -> int:
    """Return how many of ``sequences`` dealt round-robin belong to one lane."""
    return max(0, -(-(sequences - lane) // lanes))


def compute_quotas(sequences: int, lanes: int) -> Ints:
    """Return each lane's share of ``sequences`` dealt round-robin, int64 [lanes]."""
    return np.maximum(0, -(-(sequences - np.arange(lanes)) // lanes))
