"""Endless order of one source: the row of each of its sequences.

An epoch takes the pools of the source in its own order, and serves all sequences of a pool before the next. With K
lanes, pool k belongs to lane k mod K, and an epoch takes the next pools of all lanes at once: they form a slot.
Sequence i is the next one of lane i mod K, so that a reader of every K-th sequence reads one pool in K. When the pools
of a lane in the slot have no sequence left, the surplus of the other lanes follows, lane by lane. A slot has several
pools per lane because a surplus is fetched twice, in blocks of documents: by the readers of its own lane and by those
who serve it. The more pools per lane, the smaller that part is.
"""

from bisect import bisect_right
from collections import OrderedDict
from typing import Any, NamedTuple, final

import numpy as np

from batchloom.plan.mixture import PlanStore
from batchloom.plan.order.pool_counts import PoolCounts, PoolRows
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec
from batchloom.plan.packing.pools import Pools
from batchloom.plan.packing.rows import Ints, Rows, join_rows, reorder_rows, slice_rows

_MAX_CACHED_EPOCHS = 2
_MAX_CACHED_ANCHORS = 1024
# Slot of the sequences that were packed again after an edit. They precede all slots.
REMAINDER = -1
# Pools of a lane in a slot, and documents of all lanes: they are counted before the first sequence of the slot, and
# packed again together if an edit changes ``seq_len``.
_LANE_POOLS = 16
_MAX_SLOT_DOCUMENTS = 1 << 22


class Cursor(NamedTuple):
    """Start of a slot."""

    epoch: int
    slot: int  # index in the epoch's order
    before: int  # sequences of the source before the slot, since the last change of ``seq_len``


class SequenceLocation(NamedTuple):
    """Location of a sequence: its slot, its row in it, and the rows left in the slot."""

    cursor: Cursor
    row: int
    remaining: int


class SourceCut(NamedTuple):
    """Next sequence of a source at an edit that packs it again."""

    epoch: int
    slot: int
    row: int
    before: int = 0  # sequences before the slot; with several lanes, their order depends on it


class Epoch(NamedTuple):
    """One epoch of a source."""

    slots: Ints  # pools of each lane in each slot, -1 for none, int64 [slots, lanes, pools of a lane]
    ends: Ints | None  # served sequences at the end of each slot, int64 [slots]; None before all pools are counted


def interleave(counts: Ints, before: int, numbers: Ints) -> tuple[Ints, Ints]:
    """Return the lane of each sequence of a slot, and its number there, int64 [N].

    Args:
        counts: sequences of each lane in the slot, int64 [lanes].
        before: sequences of the source before the slot.
        numbers: numbers of the sequences in the slot, int64 [N].
    """
    lane_count = len(counts)
    lanes = (before + numbers) % lane_count
    rows = numbers // lane_count
    missing = np.flatnonzero(rows >= counts[lanes])
    if missing.size:
        firsts = (np.arange(lane_count) - before) % lane_count
        turns = np.maximum(0, -(-(int(counts.sum()) - firsts) // lane_count))
        earlier_turns = np.maximum(0, -(-(numbers[missing, None] - firsts) // lane_count))
        # Turns without a sequence take the surplus in their order.
        index = np.maximum(earlier_turns - counts, 0).sum(axis=1)
        surplus_ends = np.cumsum(np.maximum(counts - turns, 0))
        owners = surplus_ends.searchsorted(index, side="right")
        lanes[missing] = owners
        rows[missing] = index - surplus_ends[owners] + counts[owners]
    return lanes, rows


@final
class SourceOrder:
    """Order of one source under one spec, from a cursor on.

    Args:
        name: name of the source, part of every key.
        store: store with the documents of the source.
        spec: settings; ``lanes``, ``seq_len`` and those that :class:`Pools` reads are used.
        remainder: rows that were packed again after an edit, and come first.
        begin: first slot after them; ``before`` is their number.
        served_tokens: upper bound of the tokens in sequences served before ``remainder``.

    Attributes:
        pools: pools of the source.
        counts: sequences of each pool.
        pool_rows: rows of the latest pools.
        anchors: starts of known slots, by the sequences before them.
    """

    def __init__(
        self,
        name: str,
        store: PlanStore,
        spec: PlanSpec,
        *,
        remainder: Rows | None = None,
        begin: Cursor = Cursor(0, 0, 0),  # noqa: B008 - immutable
        served_tokens: int = 0,
    ) -> None:
        self.name = name
        self.store = store
        self.spec = spec
        self.pools = Pools(store.lengths, spec, name)
        self.remainder = remainder
        self.begin = begin
        self.served_tokens = served_tokens
        self.counts = PoolCounts(self.pools, spec.seq_len)
        self.pool_rows = PoolRows(self.counts, spec.lanes)
        self.anchors = [begin]
        self._latest: tuple[int, SequenceLocation] | None = None
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()

    def copy_counts(self, known: "SourceOrder") -> None:
        """Take over the counts of another order of the same source and spec."""
        self.counts.copy_from(known.counts)
        self.anchors = list(known.anchors)

    @property
    def table_identity(self) -> dict[str, Any]:
        """Fields that the sequence counts depend on, as the key of their cache.

        Epochs, lanes and batch size are not among them.
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

    def count_before(self, epoch: int) -> int:
        """Count the sequences from ``begin`` to an epoch; counts all pools."""
        if epoch <= self.begin.epoch:
            return 0
        total = self.counts.sequences
        ends = self.epoch(self.begin.epoch).ends
        first = int(ends[-1]) if ends is not None and ends.size else self.begin.before
        return first + (epoch - self.begin.epoch - 1) * total

    def find_epoch(self, index: int) -> int:
        """Return the epoch of a sequence; counts all pools first."""
        first = self.count_before(self.begin.epoch + 1)
        return self.begin.epoch + (0 if index < first else 1 + (index - first) // self.counts.sequences)

    def surely_has(self, sequences: int, epochs: int) -> bool:
        """Return whether the first ``epochs`` have this many sequences.

        Only as many pools are counted as the answer needs.
        """
        tokens = epochs * self.store.tokens - self.served_tokens
        if self.spec.overlong == "split" and tokens > (sequences - 1) * self.spec.seq_len:
            return True
        return self._count_ahead(sequences, epochs) >= sequences

    def _count_ahead(self, target_count: int, epochs: int) -> int:
        """Count sequences of the first ``epochs`` until ``target_count`` is reached."""
        if epochs <= self.begin.epoch:
            return 0
        passes = np.full(self.pools.count, epochs - self.begin.epoch - 1)
        first_slots = self.epoch(self.begin.epoch).slots[self.begin.slot :]
        passes[first_slots[first_slots >= 0]] += 1
        counts = self.counts.by_pool
        sequence_count = self.begin.before + int((np.maximum(counts, 0) * passes).sum())
        for pool in np.flatnonzero((counts < 0) & (passes > 0)).tolist():
            if sequence_count >= target_count:
                break
            sequence_count += self.counts.count(pool) * int(passes[pool])
        return sequence_count

    def epoch(self, epoch: int) -> Epoch:
        """Return the slots and sequence counts of an epoch."""
        known = self._epochs.pop(epoch, None)
        if known is None or (known.ends is None and self.counts.is_complete):
            slots = self._list_slots(epoch)
            known = Epoch(slots, self._compute_ends(epoch, slots) if self.counts.is_complete else None)
        self._epochs[epoch] = known
        while len(self._epochs) > _MAX_CACHED_EPOCHS:
            self._epochs.popitem(last=False)
        return known

    def _list_slots(self, epoch: int) -> Ints:
        order = self.pools.order(epoch)
        lanes = self.spec.lanes
        if lanes == 1:
            return order[:, None, None]
        lane_pools = min(max(_MAX_SLOT_DOCUMENTS // (lanes * self.spec.pool_size), 1), _LANE_POOLS)
        count = -(-len(order) // (lanes * lane_pools))
        slots = np.full((lanes, count * lane_pools), -1, np.int64)
        for lane in range(lanes):
            pools = order[order % lanes == lane]
            slots[lane, : len(pools)] = pools
        return slots.reshape(lanes, count, lane_pools).swapaxes(0, 1)

    def _compute_ends(self, epoch: int, slots: Ints) -> Ints:
        counts = self.counts.get(slots).sum(axis=(1, 2))
        if epoch == self.begin.epoch:
            counts[: self.begin.slot] = 0
            return np.cumsum(counts) + self.begin.before
        return np.cumsum(counts)

    def find(self, index: int, epochs: int | None = None) -> SequenceLocation | None:
        """Return the location of a sequence; None past ``epochs``.

        If all pools are counted, this is a binary search over sums that are computed once per epoch. Otherwise it
        walks from the nearest known slot and counts the pools in between.
        """
        if self._latest is not None:
            first, latest = self._latest
            ahead = index - first
            # Most lookups hit the slot of the previous one.
            if 0 <= ahead < latest.remaining and (epochs is None or latest.cursor.epoch < epochs):
                return SequenceLocation(latest.cursor, latest.row + ahead, latest.remaining - ahead)
        if index < self.begin.before:
            if epochs is not None and self.begin.epoch >= epochs:
                return None
            location: SequenceLocation | None = SequenceLocation(
                Cursor(self.begin.epoch, REMAINDER, 0), index, self.begin.before - index
            )
        else:
            location = (self._search if self.counts.is_complete else self._walk)(index, epochs)
        if location is not None:
            self._latest = (index, location)
        return location

    def _search(self, index: int, epochs: int | None) -> SequenceLocation | None:
        epoch = self.find_epoch(index)
        if epochs is not None and epoch >= epochs:
            return None
        earlier = self.count_before(epoch)
        ends = self.epoch(epoch).ends
        if ends is None:
            raise AssertionError("the ends of a counted order are known")
        slot = int(ends.searchsorted(index - earlier, side="right"))
        previous_end = int(ends[slot - 1]) if slot else 0
        before = earlier + max(previous_end, self.begin.before if epoch == self.begin.epoch else 0)
        return SequenceLocation(Cursor(epoch, slot, before), index - before, earlier + int(ends[slot]) - index)

    def _walk(self, index: int, epochs: int | None) -> SequenceLocation | None:
        """Find a sequence from the nearest known slot; count the pools in between."""
        cursor = self.anchors[max(bisect_right(self.anchors, index, key=lambda anchor: anchor.before) - 1, 0)]
        while not self.counts.is_complete:
            if epochs is not None and cursor.epoch >= epochs:
                return None
            slots = self.epoch(cursor.epoch).slots
            if cursor.slot >= len(slots):
                cursor = Cursor(cursor.epoch + 1, 0, cursor.before)
                continue
            count = self._count_slot(slots[cursor.slot], cursor.epoch, is_next=index == cursor.before)
            if index < cursor.before + count:
                self.anchor(cursor)
                return SequenceLocation(cursor, index - cursor.before, cursor.before + count - index)
            cursor = Cursor(cursor.epoch, cursor.slot + 1, cursor.before + count)
        return self._search(index, epochs)

    def anchor(self, cursor: Cursor) -> None:
        """Remember the start of a slot; the first and the latest ones are cached."""
        anchor_index = bisect_right(self.anchors, cursor.before, key=lambda anchor: anchor.before)
        if not anchor_index or self.anchors[anchor_index - 1] != cursor:
            self.anchors.insert(anchor_index, cursor)
        if len(self.anchors) > _MAX_CACHED_ANCHORS:
            del self.anchors[1]

    def find_cursor(self, index: int) -> Cursor:
        """Return the start of the slot of a sequence, or else the first slot."""
        location = self.find(index) if index else None
        return location.cursor if location is not None and location.cursor.slot != REMAINDER else self.begin

    def _count_slot(self, pools: Ints, epoch: int, *, is_next: bool) -> int:
        if is_next and pools.size == 1:
            # A lookup of the first sequence of a pool is followed by reading it, so the pool is packed only once.
            return len(self.pool_rows.get(int(pools[0, 0]), epoch))
        return sum(self.counts.count(pool) for pool in pools[pools >= 0].tolist())

    def rows(self, indices: Ints, epochs: int | None = None) -> list[Rows]:
        """Return the rows of sequences, ascending int64 [N], by slot.

        There are fewer if ``epochs`` end before the last.
        """
        row_slices = []
        begin = 0
        while begin < len(indices):
            first = int(indices[begin])
            location = self.find(first, epochs)
            if location is None:
                break
            end = int(indices.searchsorted(first + location.remaining))
            row_slices.append(self._slot_rows(location.cursor, indices[begin:end] - first + location.row))
            begin = end
        return row_slices

    def slot_rows(self, cut: SourceCut) -> Rows | None:
        """Return the rows of a slot from a row on; None if it has none there."""
        if cut.slot == REMAINDER:
            rows = self.remainder
            return None if rows is None or cut.row >= len(rows) else slice_rows(rows, cut.row, len(rows))
        slots = self.epoch(cut.epoch).slots
        count = self._count_slot(slots[cut.slot], cut.epoch, is_next=True) if cut.slot < len(slots) else 0
        if cut.row >= count:
            return None
        return self._slot_rows(Cursor(cut.epoch, cut.slot, cut.before), np.arange(cut.row, count))

    def _slot_rows(self, cursor: Cursor, numbers: Ints) -> Rows:
        """Return the rows of a slot with these numbers, ascending."""
        if cursor.slot == REMAINDER:
            if self.remainder is None:
                raise AssertionError("remaining sequences exist only after a cut")
            return _take_rows(self.remainder, numbers)
        slot_pools = self.epoch(cursor.epoch).slots[cursor.slot]
        if slot_pools.size == 1:
            return _take_rows(self.pool_rows.get(int(slot_pools[0, 0]), cursor.epoch), numbers)
        pools, rows = self.locate(cursor, numbers)
        # Rows are taken pool by pool, and then put back into their order.
        order = np.argsort(pools, kind="stable")
        pool_rows = [
            reorder_rows(self.pool_rows.get(pool, cursor.epoch), rows[pools == pool])
            for pool in np.unique(pools).tolist()
        ]
        inverse_order = np.empty(len(order), np.int64)
        inverse_order[order] = np.arange(len(order))
        return reorder_rows(join_rows(pool_rows, len(order)), inverse_order)

    def locate(self, cursor: Cursor, numbers: Ints | None = None) -> tuple[Ints, Ints]:
        """Return the pool of each sequence of a counted slot, and its row there.

        ``numbers`` are those of the sequences in the slot, int64 [N]; None for all.
        """
        pools = self.epoch(cursor.epoch).slots[cursor.slot]
        counts = self.counts.get(pools)
        if numbers is None:
            numbers = np.arange(int(counts.sum()))
        lanes, lane_rows = interleave(counts.sum(axis=1), cursor.before, numbers)
        ends = np.cumsum(counts, axis=1)
        index = (ends[lanes] <= lane_rows[:, None]).sum(axis=1)
        return pools[lanes, index], lane_rows - (ends - counts)[lanes, index]


def _take_rows(rows: Rows, numbers: Ints) -> Rows:
    first = int(numbers[0])
    last = int(numbers[-1])
    if last - first + 1 == len(numbers):
        return slice_rows(rows, first, last + 1)
    return reorder_rows(rows, numbers)
