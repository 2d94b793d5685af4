"""The plan: the whole order of a run as a value. Every answer is arithmetic on lengths."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.spec import to_plain
from batchloom.plan.pools import LeftOut, Lengths, Pools
from batchloom.plan.rows import Rows, join_rows, slice_rows
from batchloom.plan.spec import ORDER_VERSION, PlanSpec

SOURCE = "data"
_KEPT_POOLS = 4
_KEPT_EPOCHS = 2
_KEPT_ANCHORS = 1024
# What may change between a run and its continuation without changing the order.
_NOT_ORDER = ("epochs", "steps", "last")


class PlanStore(Protocol):
    """What a plan needs of a store: its lengths and its fingerprint."""

    @property
    def lengths(self) -> Lengths:
        """Lengths of the documents in tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the content of the store."""
        ...


@dataclass(frozen=True, slots=True)
class Cursor:
    """A pool in the order of the run: its epoch, its place there, the sequences before it."""

    epoch: int
    slot: int
    before: int


@final
class Plan:
    """The order of one store under one spec: position p of the run is one sequence.

    Step s holds positions [s * global_batch_size, (s + 1) * global_batch_size). Answers depend
    on the arguments of the constructor alone; what is kept inside (pools entered before,
    counts of sequences) only saves work. Safe to share between threads.

    Args:
        store: what to order: anything with ``lengths`` and a ``fingerprint``.
        spec: settings of the order.

    Raises:
        PlanError: the store has no documents, or one that is too long with overlong='error'.
    """

    def __init__(self, store: PlanStore, spec: PlanSpec) -> None:
        self.store, self.spec = store, spec
        self.pools = Pools(store.lengths, spec, SOURCE)
        if not self.pools.count:
            raise PlanError("The store has no documents in this subset; there is nothing to plan.")
        if spec.overlong == "error":
            self.pools.refuse_overlong()
        self._counts = np.full(self.pools.count, -1, np.int64)
        self._total = -1
        self._recent: OrderedDict[tuple[int, int], Rows] = OrderedDict()
        self._orders: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()
        # Pools whose place in the run is known, by the sequences before them.
        self._anchors = [Cursor(0, 0, 0)]
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type["Plan"], tuple[PlanStore, PlanSpec]]:
        return Plan, (self.store, self.spec)

    def twin(self) -> "Plan":
        """The same plan with what is known of it so far and a lock of its own, for after a fork."""
        plan = Plan(self.store, self.spec)
        plan._counts, plan._total = self._counts.copy(), self._total
        plan._anchors = list(self._anchors)
        return plan

    @property
    def identity(self) -> dict[str, Any]:
        """What the fingerprint is made of: every field that decides the order."""
        spec = {k: v for k, v in to_plain(self.spec).items() if k not in _NOT_ORDER}
        spec["block"] = self.pools.blocks[0]
        if self.spec.align == 1:
            # Orders from before it could be asked for keep their fingerprint.
            del spec["align"]
        source = {"store": self.store.fingerprint, "documents": self.pools.documents}
        return {
            "order_version": ORDER_VERSION,
            "spec": spec,
            "sources": {SOURCE: {**source, **self._layers()}},
        }

    def _layers(self) -> dict[str, list[list[int]]]:
        """Documents and block of each layer, where there are several: pools end with them."""
        layers = zip(self.pools.layers, self.pools.blocks, strict=True)
        return {"layers": [list(layer) for layer in layers]} if len(self.pools.layers) > 1 else {}

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name the order.

        Equal fingerprints give equal steps, up to where the shorter of two runs ends: past its
        end a run has empty sequences.
        """
        return fingerprint(self.identity)

    def left_out(self) -> LeftOut:
        """What ``overlong='drop'`` or ``'truncate'`` keeps out of every epoch; reads all lengths."""
        return self.pools.left_out()

    def longest(self) -> int:
        """Tokens of the longest document; reads all lengths."""
        return self.pools.longest()

    @property
    def table_identity(self) -> dict[str, Any]:
        """What the counts of sequences depend on, for caching them: not epochs or batch size."""
        names = ["seq_len", "packing", "overlong", "seed", "shuffle", "pool_size"]
        spec = to_plain(self.spec)
        names += ["align"] if self.spec.align > 1 else []
        return {
            "order_version": ORDER_VERSION,
            "store": self.store.fingerprint,
            "source": SOURCE,
            "block": self.pools.blocks[0],
            **self._layers(),
            **{name: spec[name] for name in names},
        }

    @property
    def has_counts(self) -> bool:
        """Whether every pool's number of sequences is known, so that no question waits."""
        return self._total >= 0

    def adopt_counts(self, counts: NDArray[np.int64]) -> None:
        """Take the number of sequences of every pool, int64 [pools], as counted before.

        Raises:
            PlanError: another number of pools, or a count that contradicts a known one.
        """
        with self._lock:
            known = self._counts >= 0
            if counts.shape != self._counts.shape or (counts[known] != self._counts[known]).any():
                raise PlanError(
                    f"A table of {counts.size} pools does not belong to this plan of {self.pools.count}; "
                    "delete the cached table, it will be made again."
                )
            self._counts = counts.astype(np.int64)
            self._total = self._checked_total()

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> NDArray[np.int64]:
        """Number of sequences of every pool, int64 [pools]; counts those not yet known.

        Args:
            progress: called with (pools counted, pools) after each pool.
        """
        for pool in range(self.pools.count):
            if self._counts[pool] < 0:
                count = self.pools.count_sequences(pool)
                with self._lock:
                    self._counts[pool] = count
            if progress:
                progress(pool + 1, self.pools.count)
        with self._lock:
            self._total = self._checked_total()
            return self._counts.copy()

    def _checked_total(self) -> int:
        total = int(self._counts.sum())
        if not total:
            raise PlanError(
                f"No sequence can be made of {self.pools.documents} documents: all are empty, or longer than "
                f"seq_len {self.spec.seq_len} with overlong='drop'. Raise seq_len or use overlong='split'."
            )
        return total

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one epoch; counts every pool when that has not been done."""
        if self._total < 0:
            self.count_all()
        return self._total

    @property
    def positions(self) -> int:
        """Positions of the whole run that carry data (with ``steps``: steps x batch size)."""
        if self.spec.steps is not None:
            return self.spec.steps * self.spec.global_batch_size
        return (self.spec.epochs or 1) * self.sequences_per_epoch

    @property
    def steps(self) -> int:
        """Exact number of steps of the run."""
        if self.spec.steps is not None:
            return self.spec.steps
        size = self.spec.global_batch_size
        return self.positions // size if self.spec.last == "drop" else -(-self.positions // size)

    def has_step(self, step: int) -> bool:
        """Whether the run has this step; answers without counting pools far ahead."""
        if step < 0:
            return False
        if self.spec.steps is not None:
            return step < self.spec.steps
        size = self.spec.global_batch_size
        needed = (step + 1) * size - 1 if self.spec.last == "drop" else step * size
        return self.locate(needed) is not None

    def locate(self, position: int) -> Cursor | None:
        """The pool that holds a position; None when the run ends before it.

        Without the counts of all pools this walks from the nearest pool it knows, counting
        the pools between; with them it is a binary search (over sums made once an epoch).
        """
        epochs = None if self.spec.steps is not None else (self.spec.epochs or 1)
        if self.spec.steps is not None and position >= self.positions:
            return None
        with self._lock:
            if self._total >= 0:
                return self._search(position, epochs)
            return self._walk(position, epochs)

    def _search(self, position: int, epochs: int | None) -> Cursor | None:
        epoch, inside = divmod(position, self._total)
        if epochs is not None and epoch >= epochs:
            return None
        ends = self._epoch(epoch)[1]
        slot = int(ends.searchsorted(inside, side="right"))
        before = int(ends[slot - 1]) if slot else 0
        return Cursor(epoch, slot, epoch * self._total + before)

    def _walk(self, position: int, epochs: int | None) -> Cursor | None:
        place = bisect_right(self._anchors, position, key=lambda anchor: anchor.before)
        cursor = self._anchors[place - 1]
        empty = 0
        while True:
            if self._total >= 0:
                return self._search(position, epochs)
            if cursor.slot == self.pools.count:
                cursor = Cursor(cursor.epoch + 1, 0, cursor.before)
            if epochs is not None and cursor.epoch >= epochs:
                return None
            pool = int(self._order(cursor.epoch)[cursor.slot])
            # Who asks for the first sequence of a pool is about to enter it: pack it once.
            begins = position == cursor.before
            count = len(self._entered(pool, cursor.epoch)) if begins else self._count(pool)
            if position < cursor.before + count:
                self._anchor(cursor)
                return cursor
            empty = 0 if count else empty + 1
            if empty >= self.pools.count:
                self._checked_total()
            cursor = Cursor(cursor.epoch, cursor.slot + 1, cursor.before + count)

    def _anchor(self, cursor: Cursor) -> None:
        """Remember where a pool begins; the origin and the latest ones are kept."""
        place = bisect_right(self._anchors, cursor.before, key=lambda anchor: anchor.before)
        if self._anchors[place - 1] != cursor:
            self._anchors.insert(place, cursor)
        if len(self._anchors) > _KEPT_ANCHORS:
            del self._anchors[1]

    def _count(self, pool: int) -> int:
        if self._counts[pool] < 0:
            self._counts[pool] = self.pools.count_sequences(pool)
            self._total_when_known()
        return int(self._counts[pool])

    def _total_when_known(self) -> None:
        if (self._counts >= 0).all():
            self._total = self._checked_total()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return self._epoch(epoch)[0]

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pools in an epoch's order, and the sequences up to the end of each (once known)."""
        order, ends = self._orders.pop(epoch, (None, None))
        if order is None:
            order = self.pools.order(epoch)
        if ends is None or (self._total >= 0 and not ends.size):
            ends = np.cumsum(self._counts[order]) if self._total >= 0 else np.empty(0, np.int64)
        self._orders[epoch] = (order, ends)
        while len(self._orders) > _KEPT_EPOCHS:
            self._orders.popitem(last=False)
        return order, ends

    def rows(self, start: int, stop: int) -> Rows:
        """The rows of positions ``start`` to ``stop - 1``; rows past the end of the run are empty.

        Raises:
            PlanError: a negative or reversed range, or a store that gives no sequence at all.
        """
        if not 0 <= start <= stop:
            raise PlanError(f"Positions {start} to {stop} are no range of this plan.")
        pieces = []
        position = start
        with self._lock:
            while position < stop:
                cursor = self.locate(position)
                if cursor is None:
                    break
                pool = self._entered(int(self._order(cursor.epoch)[cursor.slot]), cursor.epoch)
                end = min(cursor.before + len(pool), stop)
                if self.spec.steps is not None:
                    end = min(end, self.positions)
                pieces.append(slice_rows(pool, position - cursor.before, end - cursor.before))
                position = end
        return join_rows(pieces, stop - start)

    def _entered(self, pool: int, epoch: int) -> Rows:
        rows = self._recent.pop((epoch, pool), None)
        if rows is None:
            rows = self.pools.rows(pool, epoch)
            if self._counts[pool] < 0:
                self._counts[pool] = len(rows)
                self._total_when_known()
            elif self._counts[pool] != len(rows):
                raise PlanError(
                    f"Pool {pool} packs into {len(rows)} sequences, the table says {self._counts[pool]}: it is "
                    "another plan's, or the store has changed. Delete the cached table, it will be made again."
                )
        self._recent[epoch, pool] = rows
        while len(self._recent) > _KEPT_POOLS:
            self._recent.popitem(last=False)
        return rows

    def state(self, position: int) -> dict[str, Any]:
        """One position as plain JSON values, with what it takes to go on there at once.

        Keys: ``order_version``, ``fingerprint``, ``identity`` (its fields, so that a refusal
        can name the one that differs), ``edits``, ``position``, ``end`` (the positions of the run
        that carry data, where ``position`` lies past them, else None), per source ``epoch``,
        ``slot`` (the pool's place in the epoch's order) and ``before`` (sequences before that
        pool), and ``check``, the fingerprint of all the others.

        Raises:
            PlanError: a negative position.
        """
        if position < 0:
            raise PlanError(f"Position {position} does not exist; positions count from 0.")
        cursor = self.locate(position)
        past = cursor is None and self.spec.steps is None
        # At the end of a run, the pool of its last sequence: a longer run goes on from there.
        known = cursor or self.locate(min(position, self.positions) - 1) or Cursor(0, 0, 0)
        plain: dict[str, Any] = {
            "order_version": ORDER_VERSION,
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "edits": [],
            "position": position,
            "end": self.positions if past else None,
            "sources": {SOURCE: {"epoch": known.epoch, "slot": known.slot, "before": known.before}},
        }
        return {**plain, "check": fingerprint(plain)}

    def resume(self, state: dict[str, Any]) -> int:
        """Check a state against this plan and return the position to go on with.

        That is the state's own, except where its run ended inside its last step and this plan
        runs on: then it is the first of that step, so that nothing of the next epoch is lost.

        Raises:
            StateError: not a state, changed by hand, of another order version, or of another
                plan; names each field that differs.
        """
        cursor = self._checked(state)
        position, end = int(state["position"]), state["end"]
        with self._lock:
            self._anchor(cursor)
        if end is not None and position > end and self.locate(end) is not None:
            size = self.spec.global_batch_size
            return int(end) // size * size
        return position

    def _checked(self, state: dict[str, Any]) -> Cursor:
        """The cursor of a state that belongs to this plan."""
        try:
            rest = {name: value for name, value in state.items() if name != "check"}
            theirs, check, cursor = state["identity"], state["check"], state["sources"][SOURCE]
            version, edits = state["order_version"], state["edits"]
            found = Cursor(cursor["epoch"], cursor["slot"], cursor["before"])
            same = check == fingerprint(rest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateError(
                f"This is not a loader's state ({error!r}). Give what state_dict() returned."
            ) from error
        if version != ORDER_VERSION:
            raise StateError(
                f"The state has order_version {version}, this batchloom makes {ORDER_VERSION}; go on with the "
                "version that wrote it, or start without it."
            )
        if state["fingerprint"] != self.fingerprint:
            differ = _differences(theirs, self.identity) or [
                f"fingerprint was {state['fingerprint']!r}"
            ]
            raise StateError(
                f"The state belongs to another plan: {'; '.join(differ)}. Give the settings and the "
                "store the state was made with, or start without it."
            )
        if not same or edits:
            raise StateError(
                "The state was changed after it was saved: its check does not fit its fields. Use the one that "
                "was saved."
            )
        return found


def _differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            line
            for key in sorted({*theirs, *ours})
            for line in _differences(
                theirs.get(key), ours.get(key), f"{path}.{key}" if path else key
            )
        ]
    return [] if theirs == ours else [f"{path} was {theirs!r} and is {ours!r}"]
