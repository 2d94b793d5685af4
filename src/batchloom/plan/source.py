"""The endless order of one source: which rows sequence number ``index`` of one of its lanes is.

A source's pools are dealt to the lanes, pool k to lane k mod K. In an epoch each lane serves its own pools in the
epoch's order; lanes hold unequal numbers of sequences and are asked for equal ones, so the last sequences of
those that have more go to those that have fewer: each sequence is served once an epoch, and nearly all by
their own lane.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.spec import to_plain
from batchloom.plan.arrange import repacked_rows
from batchloom.plan.mixture import PlanStore
from batchloom.plan.pools import Pools
from batchloom.plan.rows import Rows, slice_rows
from batchloom.plan.spec import ORDER_VERSION, PlanSpec

Ints = NDArray[np.int64]

_KEPT_EPOCHS = 2
_KEPT_ANCHORS = 1024


class Cursor(NamedTuple):
    """A pool in the order of a lane: its epoch, its place there, the sequences of the lane before it."""

    epoch: int
    slot: int
    before: int


class Found(NamedTuple):
    """Where a sequence stands: a pool of an epoch, the row in it, and how many follow it there in the lane.

    ``pool`` -1 is what an edit left of older pools. ``cursor`` is None for what another lane lends.
    """

    pool: int
    epoch: int
    row: int
    run: int
    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch: per lane its pools in order, and (once counted) the sequences up to the end of each."""

    orders: tuple[Ints, ...]
    ends: tuple[Ints, ...]


class Known(NamedTuple):
    """What an order has found out of its pools: their counts and sum, and places in its lanes."""

    counts: Ints
    total: int
    anchors: tuple[tuple[Cursor, ...], ...]


@final
class SourceOrder:
    """One source under one spec, from a cursor on.

    Args:
        name: of the source, part of every key.
        store: its documents.
        spec: settings; of these ``lanes``, what :class:`Pools` reads, and ``seq_len``.
        rest: rows that come first: what was left of pools when an edit packed anew.
        begin: the first whole pool after them (one lane only); ``before`` is ``len(rest)``.
        spent: tokens that the sequences served before them held at most.

    Attributes:
        pools: the pools; lanes: how many there are.
        counts: sequences of each pool, -1 where they are not known, int64 [pools]; total: their sum, or -1.
        kept: pools of each lane whose rows are kept once they were entered; to be set by who knows of other sources.
    """

    def __init__(
        self,
        name: str,
        store: PlanStore,
        spec: PlanSpec,
        *,
        rest: Rows | None = None,
        begin: Cursor | None = None,
        spent: int = 0,
    ) -> None:
        self.name, self.spec, self.lanes = name, spec, spec.lanes
        self.store = store
        self.pools = Pools(store.lengths, spec, name)
        self.rest, self.begin, self.spent = rest, begin or Cursor(0, 0, 0), spent
        self.kept = 4 if self.lanes == 1 else 2
        self.counts = np.full(self.pools.count, -1, np.int64)
        self.total = -1
        self._latest: dict[int, tuple[int, Found]] = {}
        # By lane: whoever reads some lanes alone keeps pools of no other.
        self._recent: dict[int, OrderedDict[tuple[int, int], Rows]] = {}
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        # Pools whose place in a lane is known, by the sequences before them.
        self.anchors = [[self.begin] for _ in range(self.lanes)]

    @property
    def counted(self) -> bool:
        """Whether every pool's number of sequences is known."""
        return self.total >= 0

    @property
    def known(self) -> Known:
        """What was found out so far, for another order of the same source and spec."""
        # The total first: it is known once all counts are, and another thread may be counting.
        total = self.total
        return Known(self.counts.copy(), total, tuple(tuple(own) for own in self.anchors))

    def learn(self, known: Known) -> None:
        """Take over what another order of the same source and spec knows."""
        self.counts, self.total = known.counts, known.total
        self.anchors = [list(own) for own in known.anchors]

    def forget_rows(self) -> None:
        """Keep no rows of entered pools: they are made again when asked for."""
        self._recent.clear()

    def adopt(self, counts: Ints) -> None:
        """Take the number of sequences of every pool as counted before.

        Raises:
            PlanError: another number of pools, or a count that contradicts a known one.
        """
        known = self.counts >= 0
        if counts.shape != self.counts.shape or (counts[known] != self.counts[known]).any():
            raise PlanError(
                f"A table of {counts.size} pools does not belong to this plan of {self.pools.count}; "
                "delete the cached table, it will be made again."
            )
        self.counts = counts.astype(np.int64)
        self.total = self._checked_total()

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> Ints:
        """Number of sequences of every pool; counts those not yet known, telling (counted, pools)."""
        for pool in range(self.pools.count):
            if self.counts[pool] < 0:
                self.counts[pool] = self.pools.count_sequences(pool)
            if progress:
                progress(pool + 1, self.pools.count)
        self.total = self._checked_total()
        return self.counts.copy()

    def _checked_total(self) -> int:
        total = int(self.counts.sum())
        if not total:
            raise PlanError(
                f"No sequence can be made of {self.pools.documents} documents: all are empty, or longer than "
                f"seq_len {self.spec.seq_len} with overlong='drop'. Raise seq_len or use overlong='split'."
            )
        return total

    @property
    def sequences(self) -> int:
        """Sequences of one epoch; counts every pool when that has not been done."""
        if self.total < 0:
            self.count_all()
        return self.total

    def quotas(self, epochs: int) -> Ints:
        """Sequences of each lane until ``epochs`` of the run are through, int64 [lanes]; counts every pool."""
        total = epochs * self.sequences
        total -= self._skipped() if self.begin != (0, 0, 0) else 0
        return quotas(total, self.lanes)

    def surely_has(self, counts: Ints, epochs: int) -> bool:
        """Whether lanes have so many sequences until ``epochs`` are through; only as many pools are counted as tell.

        Args:
            counts: of each lane, int64 [lanes].
            epochs: of the run, those before ``begin`` counted.
        """
        return self._surely_has(_dealt(counts, np.arange(self.lanes), self.lanes), epochs)

    def _surely_has(self, sequences: int, epochs: int) -> bool:
        """Where nothing is left out, what is not served yet has as many sequences at least as its tokens fill."""
        tokens = epochs * self.store.tokens - self.spent
        if self.spec.overlong == "split" and tokens > (sequences - 1) * self.spec.seq_len:
            return True
        return self._counted_ahead(sequences, epochs) >= sequences

    def _counted_ahead(self, wanted: int, epochs: int) -> int:
        """Sequences until ``epochs`` are through in pools that are counted; counts more until these are so many."""
        begin = self.begin
        ahead = self.pools.order(begin.epoch)[begin.slot :]
        whole = max(epochs - begin.epoch - 1, 0)
        often = np.full(self.pools.count, whole, np.int64)
        if epochs > begin.epoch:
            often[ahead] += 1
        known = self.counts > 0
        found = begin.before + int((self.counts[known] * often[known]).sum())
        for pool in ahead.tolist():
            if found >= wanted or self.total >= 0:
                break
            if self.counts[pool] < 0:
                found += self._count(pool) * int(often[pool])
        if found < wanted and whole:
            found = begin.before + int((self.count_all() * often).sum())
        return found

    def cut(self, index: int) -> tuple[int, int, int]:
        """Where sequence ``index`` stands, as (epoch, slot, row); slot -1 is what an earlier cut left."""
        found = self.find(0, index)
        if found is None:
            raise AssertionError("without a bound an order has no end")
        if found.cursor is None:
            return found.epoch, -1, found.row
        return found.epoch, found.cursor.slot, found.row

    def stands(self, lane: int, index: int) -> Cursor:
        """The pool of a lane's next sequence, as far as it is worth telling."""
        found = self.find(lane, index)
        return found.cursor if found and found.cursor else self.begin

    def continued(self, spec: PlanSpec, cut: tuple[int, int, int], served: int) -> "SourceOrder":
        """The order that goes on from a cut under another spec.

        What is left of the pool comes first, packed anew, and then the next pool.

        Args:
            spec: the other spec.
            cut: where this order was left, as :meth:`cut` tells.
            served: sequences of this order that were served before.

        Raises:
            PlanError: there is no such pool or row.
        """
        epoch, slot, row = cut
        if slot < 0:
            left, (epoch, slot, _) = self.rest, self.begin
        elif not row:
            left = None
        else:
            order = self._epoch(epoch).orders[0]
            left, slot = (
                self.entered(int(order[slot]), epoch) if slot < len(order) else None,
                slot + 1,
            )
        if left is not None and row < len(left):
            left = slice_rows(left, row, len(left))
            rest = repacked_rows(left, self.name, spec, (epoch, slot))
        elif row:
            raise PlanError(
                f"Source {self.name!r} was not cut at row {row}: its pool has fewer rows."
            )
        else:
            rest = None
        if slot == self.pools.count:
            epoch, slot = epoch + 1, 0
        begin = Cursor(epoch, slot, len(rest) if rest else 0)
        spent = self.spent + served * self.spec.seq_len
        return SourceOrder(self.name, self.store, spec, rest=rest, begin=begin, spent=spent)

    @property
    def table_identity(self) -> dict[str, Any]:
        """What the counts of sequences depend on, for caching them: not epochs or batch size."""
        names = ["seq_len", "packing", "overlong", "seed", "shuffle", "pool_size"]
        names += ["align"] if self.spec.align > 1 else []
        spec = to_plain(self.spec)
        return {
            "order_version": ORDER_VERSION,
            "store": self.store.fingerprint,
            "source": self.name,
            "block": self.pools.blocks[0],
            **self.pools.layers_identity(),
            **{name: spec[name] for name in names},
        }

    def _skipped(self) -> int:
        """Sequences of this packing before ``begin`` that were served otherwise, less those of ``rest``."""
        epoch, slot, before = self.begin
        ends = self._epoch(epoch).ends[0]
        return epoch * self.total + (int(ends[slot - 1]) if slot else 0) - before

    def find(self, lane: int, index: int, epochs: int | None = None) -> Found | None:
        """Where sequence ``index`` of a lane stands; None when ``epochs`` are through before it.

        Without the counts of all pools this walks from the nearest pool it knows, counting the pools
        between; with them it is a binary search (over sums made once an epoch).
        """
        latest = self._latest.get(lane)
        if latest is not None:
            begin, found = latest
            ahead = index - begin
            # Most questions are about the pool of the one before.
            if 0 <= ahead < found.run and (epochs is None or found.epoch < epochs):
                return found._replace(row=found.row + ahead, run=found.run - ahead)
        if self.rest is not None and index < len(self.rest):
            return Found(-1, self.begin.epoch, index, len(self.rest) - index, None)
        counted = self.total >= 0
        found_now = (self._search if counted else self._walk)(lane, index, epochs)
        if found_now is not None:
            self._latest[lane] = (index, found_now)
        return found_now

    def _search(self, lane: int, index: int, epochs: int | None) -> Found | None:
        skipped = self._skipped() if self.begin != (0, 0, 0) else 0
        if self.lanes == 1:
            epoch, inside = divmod(index + skipped, self.total)
            earlier = epoch * self.total
        else:
            epoch = _epoch_of(index, lane, self.lanes, self.total)
            earlier = _quota(epoch * self.total, lane, self.lanes)
            inside = index - earlier
        if epochs is not None and epoch >= epochs:
            return None
        found = self._epoch(epoch)
        ends, order = found.ends[lane], found.orders[lane]
        if ends.size and inside < ends[-1]:
            slot = int(ends.searchsorted(inside, side="right"))
            before = int(ends[slot - 1]) if slot else 0
            end = int(ends[slot])
            if self.lanes > 1:
                end = min(end, earlier_end(epoch, lane, self.lanes, self.total) - earlier)
            cursor = Cursor(epoch, slot, earlier + before - skipped)
            return Found(int(order[slot]), epoch, inside - before, end - inside, cursor)
        return self._lent(found, epoch, lane, inside)

    def _lent(self, found: _Epoch, epoch: int, lane: int, inside: int) -> Found:
        """A sequence of a lane that has more than it serves, for one that has fewer."""
        asked, has = self._shares(found, epoch)
        spare, short = np.maximum(has - asked, 0), np.maximum(asked - has, 0)
        number = int(short[:lane].sum()) + inside - int(has[lane])
        given = np.cumsum(spare)
        lender = int(given.searchsorted(number, side="right"))
        inside = int(asked[lender]) + number - (int(given[lender]) - int(spare[lender]))
        ends = found.ends[lender]
        slot = int(ends.searchsorted(inside, side="right"))
        row = inside - (int(ends[slot - 1]) if slot else 0)
        run = min(int(ends[slot]) - inside, int(given[lender]) - number)
        left = int(short[: lane + 1].sum()) - number
        return Found(int(found.orders[lender][slot]), epoch, row, min(run, left), None)

    def indices(self, document: int, epoch: int) -> list[tuple[int, int]]:
        """(lane, index) of the sequences that hold a document in an epoch; counts every pool if need be."""
        if self.total < 0:
            self.count_all()
        pool = self.pools.pool_of(document)
        rows = self.entered(pool, epoch)
        held = np.flatnonzero(rows.documents == document)
        numbers = np.unique(rows.pointers.searchsorted(held, side="right") - 1)
        found, lane = self._epoch(epoch), pool % self.lanes
        slot = int(np.flatnonzero(found.orders[lane] == pool)[0])
        before = int(found.ends[lane][slot - 1]) if slot else 0
        if self.lanes == 1:
            shift = before + epoch * self.total - self._skipped()
            least = len(self.rest) if self.rest is not None else 0
            return [(0, int(n) + shift) for n in numbers if n + shift >= least]
        return [self._served_by(found, epoch, lane, before + int(n)) for n in numbers]

    def rest_indices(self, document: int) -> list[tuple[int, int]]:
        """(lane, index) of the sequences that hold a document among those that an edit packed anew."""
        if self.rest is None:
            return []
        held = np.flatnonzero(self.rest.documents == document)
        numbers = np.unique(self.rest.pointers.searchsorted(held, side="right") - 1)
        return [(0, int(n)) for n in numbers]

    def _shares(self, found: _Epoch, epoch: int) -> tuple[Ints, Ints]:
        """How many sequences of an epoch each lane is asked for, and how many it has."""
        asked = quotas((epoch + 1) * self.total, self.lanes) - quotas(
            epoch * self.total, self.lanes
        )
        has = np.array([ends[-1] if ends.size else 0 for ends in found.ends], np.int64)
        return asked, has

    def _served_by(self, found: _Epoch, epoch: int, lane: int, inside: int) -> tuple[int, int]:
        """The lane that serves a lane's sequence of an epoch, and its index there."""
        asked, has = self._shares(found, epoch)
        if inside >= asked[lane]:
            spare, short = np.maximum(has - asked, 0), np.maximum(asked - has, 0)
            number = int(spare[:lane].sum()) + inside - int(asked[lane])
            taken = np.cumsum(short)
            lane = int(taken.searchsorted(number, side="right"))
            inside = int(has[lane]) + number - (int(taken[lane]) - int(short[lane]))
        return lane, inside + _quota(epoch * self.total, lane, self.lanes)

    def _walk(self, lane: int, index: int, epochs: int | None) -> Found | None:
        anchors = self.anchors[lane]
        place = bisect_right(anchors, index, key=lambda anchor: anchor.before)
        cursor = anchors[place - 1]
        empty = 0
        while True:
            if self.total >= 0:
                return self._search(lane, index, epochs)
            order = self._epoch(cursor.epoch).orders[lane]
            if cursor.slot >= len(order):
                if self.lanes > 1:
                    # How many sequences other lanes lend follows from all counts.
                    self.count_all()
                    continue
                cursor = Cursor(cursor.epoch + 1, 0, cursor.before)
                continue
            if epochs is not None and cursor.epoch >= epochs:
                return None
            pool = int(order[cursor.slot])
            # Who asks for the first sequence of a pool is about to enter it: pack it once.
            begins = index == cursor.before
            count = len(self.entered(pool, cursor.epoch)) if begins else self._count(pool)
            if index < cursor.before + count:
                dealt = (cursor.before + count - 1) * self.lanes + lane + 1
                if self.lanes > 1 and not self._surely_has(dealt, cursor.epoch + 1):
                    self.count_all()
                    continue
                self.anchor(lane, cursor)
                inside = index - cursor.before
                return Found(pool, cursor.epoch, inside, count - inside, cursor)
            empty = 0 if count else empty + 1
            if empty >= self.pools.count:
                self._checked_total()
            cursor = Cursor(cursor.epoch, cursor.slot + 1, cursor.before + count)

    def anchor(self, lane: int, cursor: Cursor) -> None:
        """Remember where a pool begins; the origin and the latest ones are kept."""
        anchors = self.anchors[lane]
        place = bisect_right(anchors, cursor.before, key=lambda anchor: anchor.before)
        if not place or anchors[place - 1] != cursor:
            anchors.insert(place, cursor)
        if len(anchors) > _KEPT_ANCHORS:
            del anchors[1]

    def _count(self, pool: int) -> int:
        if self.counts[pool] < 0:
            self.counts[pool] = self.pools.count_sequences(pool)
            self._total_when_known()
        return int(self.counts[pool])

    def _total_when_known(self) -> None:
        if (self.counts >= 0).all():
            self.total = self._checked_total()

    def _epoch(self, epoch: int) -> _Epoch:
        known = self._epochs.pop(epoch, None)
        if known is None or (self.total >= 0 and not known.ends):
            order = self.pools.order(epoch)
            if self.lanes == 1:
                orders: tuple[Ints, ...] = (order,)
            else:
                orders = tuple(order[order % self.lanes == lane] for lane in range(self.lanes))
            ends = tuple(np.cumsum(self.counts[o]) for o in orders) if self.total >= 0 else ()
            known = _Epoch(orders, ends)
        self._epochs[epoch] = known
        while len(self._epochs) > _KEPT_EPOCHS:
            self._epochs.popitem(last=False)
        return known

    def rows(self, lane: int, start: int, stop: int, epochs: int | None = None) -> list[Rows]:
        """The rows of sequences ``start`` to ``stop - 1`` of a lane, in pieces; fewer where ``epochs`` end."""
        pieces = []
        while start < stop:
            found = self.find(lane, start, epochs)
            if found is None:
                break
            rows = self.entered(found.pool, found.epoch)
            end = min(start + found.run, stop)
            pieces.append(slice_rows(rows, found.row, found.row + end - start))
            start = end
        return pieces

    def entered(self, pool: int, epoch: int) -> Rows:
        """All rows of a pool in the order of an epoch; of pool -1 those that an edit left.

        Raises:
            PlanError: the pool packs into another number of sequences than the table says.
        """
        if pool < 0:
            if self.rest is None:
                raise AssertionError("there is a rest only after a cut")
            return self.rest
        recent = self._recent.setdefault(pool % self.lanes, OrderedDict())
        rows = recent.pop((epoch, pool), None)
        if rows is None:
            # A small source comes to the same pool again and again.
            before = next((one for one in recent if one[1] == pool), None)
            if before is not None:
                rows = self.pools.rows_again(recent[before], pool, before[0], epoch)
            else:
                rows = self.pools.rows(pool, epoch)
            if self.counts[pool] < 0:
                self.counts[pool] = len(rows)
                self._total_when_known()
            elif self.counts[pool] != len(rows):
                raise PlanError(
                    f"Pool {pool} packs into {len(rows)} sequences, the table says {self.counts[pool]}: it is "
                    "another plan's, or the store has changed. Delete the cached table, it will be made again."
                )
        recent[epoch, pool] = rows
        while len(recent) > self.kept:
            recent.popitem(last=False)
        return rows


def _quota(sequences: int, lane: int, lanes: int) -> int:
    """How many of so many sequences, dealt to the lanes one by one, fall to one lane."""
    return max(0, -(-(sequences - lane) // lanes))


def quotas(sequences: int, lanes: int) -> Ints:
    """How many of so many sequences, dealt to the lanes one by one, fall to each, int64 [lanes]."""
    return np.maximum(0, -(-(sequences - np.arange(lanes)) // lanes))


def _dealt(counts: Ints, of: Ints, lanes: int) -> int:
    """How many sequences have to be dealt one by one so that each lane has had so many."""
    return int(((counts - 1) * lanes + of + 1)[counts > 0].max(initial=0))


def earlier_end(epoch: int, lane: int, lanes: int, total: int) -> int:
    """Sequences of a lane up to the end of an epoch."""
    return _quota((epoch + 1) * total, lane, lanes)


def _epoch_of(index: int, lane: int, lanes: int, total: int) -> int:
    """The epoch of sequence ``index`` of a lane: the last that begins at or before it."""
    # Number index of a lane is, dealt one by one, the sequence index * lanes + lane of all.
    return (index * lanes + lane) // total
