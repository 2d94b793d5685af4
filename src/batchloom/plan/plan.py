"""The plan: the whole order of a run as a value. Every answer is arithmetic on lengths."""

import threading
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
        self._orders: tuple[int, NDArray[np.int64]] | None = None
        self._anchors = [Cursor(0, 0, 0)]
        self._lock = threading.RLock()

    @property
    def identity(self) -> dict[str, Any]:
        """What the fingerprint is made of: every field that decides the order."""
        spec = {k: v for k, v in to_plain(self.spec).items() if k not in _NOT_ORDER}
        spec["block"] = self.pools.block
        return {
            "order_version": ORDER_VERSION,
            "spec": spec,
            "sources": {
                SOURCE: {"store": self.store.fingerprint, "documents": self.pools.documents}
            },
        }

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name the order; equal fingerprints give equal batches."""
        return fingerprint(self.identity)

    def left_out(self) -> LeftOut:
        """What ``overlong='drop'`` or ``'truncate'`` keeps out of every epoch; reads all lengths."""
        return self.pools.left_out()

    @property
    def table_identity(self) -> dict[str, Any]:
        """What the counts of sequences depend on, for caching them: not epochs or batch size."""
        names = ("seq_len", "packing", "overlong", "seed", "shuffle", "pool_size")
        spec = to_plain(self.spec)
        return {
            "order_version": ORDER_VERSION,
            "store": self.store.fingerprint,
            "source": SOURCE,
            "block": self.pools.block,
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
        the pools between; with them it is a binary search.
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
        ends = np.cumsum(self._counts[self._order(epoch)])
        slot = int(np.searchsorted(ends, inside, side="right"))
        before = int(ends[slot - 1]) if slot else 0
        return Cursor(epoch, slot, epoch * self._total + before)

    def _walk(self, position: int, epochs: int | None) -> Cursor | None:
        cursor = max((a for a in self._anchors if a.before <= position), key=lambda a: a.before)
        empty = 0
        while True:
            if cursor.slot == self.pools.count:
                cursor = Cursor(cursor.epoch + 1, 0, cursor.before)
            if epochs is not None and cursor.epoch >= epochs:
                return None
            pool = int(self._order(cursor.epoch)[cursor.slot])
            # Who asks for the first sequence of a pool is about to enter it: pack it once.
            begins = position == cursor.before
            count = len(self._entered(pool, cursor.epoch)) if begins else self._count(pool)
            if position < cursor.before + count:
                self._anchors = [self._anchors[0], *self._anchors[1:][-1:], cursor]
                return cursor
            empty = 0 if count else empty + 1
            if empty >= self.pools.count:
                self._checked_total()
            cursor = Cursor(cursor.epoch, cursor.slot + 1, cursor.before + count)

    def _count(self, pool: int) -> int:
        if self._counts[pool] < 0:
            self._counts[pool] = self.pools.count_sequences(pool)
            self._total_when_known()
        return int(self._counts[pool])

    def _total_when_known(self) -> None:
        if (self._counts >= 0).all():
            self._total = self._checked_total()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._orders is None or self._orders[0] != epoch:
            self._orders = (epoch, self.pools.order(epoch))
        return self._orders[1]

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
        self._recent[epoch, pool] = rows
        while len(self._recent) > _KEPT_POOLS:
            self._recent.popitem(last=False)
        return rows

    def state(self, position: int) -> dict[str, Any]:
        """One position as plain JSON values, with what it takes to go on there at once.

        Keys: ``order_version``, ``fingerprint``, ``identity`` (its fields, so that a refusal
        can name the one that differs), ``edits``, ``position``, and per source ``epoch``,
        ``pool`` (its place in the epoch's order) and ``before`` (sequences before that pool).
        """
        cursor = self.locate(position)
        sources = {}
        if cursor is not None:
            sources[SOURCE] = {"epoch": cursor.epoch, "pool": cursor.slot, "before": cursor.before}
        return {
            "order_version": ORDER_VERSION,
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "edits": [],
            "position": position,
            "sources": sources,
        }

    def resume(self, state: dict[str, Any]) -> int:
        """Check a state against this plan and return its position.

        Raises:
            StateError: not a state, of another order version, or of another plan; names each
                field that differs.
        """
        try:
            position, sources = state["position"], state["sources"]
            theirs, name = state["identity"], state["fingerprint"]
            cursors = [Cursor(c["epoch"], c["pool"], c["before"]) for c in sources.values()]
        except (KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"This is not a loader's state: {error!r} is missing or malformed."
            ) from error
        if name != self.fingerprint:
            differ = _differences(theirs, self.identity) or [f"fingerprint was {name!r}"]
            raise StateError(
                f"The state belongs to another plan: {'; '.join(differ)}. Give the settings and the "
                "store the state was made with, or start without it."
            )
        numbers = [position, *(n for c in cursors for n in (c.epoch, c.slot, c.before))]
        if not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise StateError(f"The state's position {position!r} or cursors are not whole numbers.")
        if any(c.slot >= self.pools.count or c.before > position for c in cursors):
            raise StateError(
                "The state's cursor lies outside the plan; the state was changed by hand."
            )
        with self._lock:
            self._anchors = [self._anchors[0], *cursors[:1]]
        return int(position)


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
