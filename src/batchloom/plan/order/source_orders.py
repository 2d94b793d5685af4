"""Sources of a plan, their orders, and the timeline that serves them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar, final

from batchloom.core.errors import PlanError
from batchloom.plan.mixture import Mixture, PlanStore, Weights, list_weighted_sources
from batchloom.plan.order.edits import Edit, check_run
from batchloom.plan.order.segments import RunLayout, Segment, build_run_layout
from batchloom.plan.order.source_order import REMAINDER, Cursor, SourceCut, SourceOrder
from batchloom.plan.order.source_shares import SOURCE, SourceShares
from batchloom.plan.order.timeline import Timeline
from batchloom.plan.packing.plan_spec import PlanSpec, describe_window_conflict
from batchloom.plan.packing.pools import ExcludedDocuments, Pools
from batchloom.plan.packing.rows import repack_rows

T = TypeVar("T")
# (era, number of the source)
_Key = tuple[int, int]


def compute_source_cut(order: SourceOrder, served: int) -> SourceCut:
    """Return the next sequence of a source that has served some as a cut."""
    if not served:
        # Nothing of the source was served, and it may not have any sequence so far.
        begin = order.begin
        return SourceCut(begin.epoch, REMAINDER if begin.before else begin.slot, 0)
    location = order.find(served)
    if location is None:
        raise AssertionError("an order without a bound has no end")
    cursor = location.cursor
    return SourceCut(cursor.epoch, cursor.slot, location.row, cursor.before if order.spec.lanes > 1 else 0)


def continue_after_cut(order: SourceOrder, spec: PlanSpec, cut: SourceCut, served: int) -> SourceOrder:
    """Return the order that continues from a cut under another spec.

    The rest of the slot is packed again and comes first, then the next slot. ``served`` are the sequences that the
    source has served. A cut at a missing row raises PlanError.
    """
    epoch = cut.epoch
    slot = cut.slot
    rows = None
    if slot == REMAINDER or cut.row:
        rows = order.slot_rows(cut)
        if rows is None:
            raise PlanError(
                f"Source {order.name!r} was not cut at row {cut.row}: its pool has fewer rows. Use the state as it was "
                "saved."
            )
        epoch, slot = (order.begin.epoch, order.begin.slot) if slot == REMAINDER else (epoch, slot + 1)
    remainder = None if rows is None else repack_rows(rows, order.name, spec, (epoch, slot))
    return SourceOrder(
        order.name,
        order.store,
        spec,
        remainder=remainder,
        begin=Cursor(epoch, slot, 0 if remainder is None else len(remainder)),
        served_tokens=order.served_tokens + served * order.spec.seq_len,
    )


def _continues(edits: tuple[Edit, ...], previous_edits: tuple[Edit, ...]) -> bool:
    """Return whether edits continue earlier ones."""
    return edits[: len(previous_edits)] == previous_edits


def _select_eras(values: dict[_Key, T], *, every_era: bool) -> dict[_Key, T]:
    """Return the values of all eras, or of the first."""
    # Iterate over a copy, because another thread may add a value meanwhile.
    return {key: value for key, value in list(values.items()) if every_era or not key[0]}


def _count_first_sources(data: PlanStore | Mixture, names: Sequence[str]) -> int:
    """Count the sources with a weight before any edit."""
    if not isinstance(data, Mixture):
        return 1
    weighted_sources = list_weighted_sources(data.weights, names)
    for stage in data.stages:
        weighted_sources |= list_weighted_sources(stage.weights, names)
    return len(weighted_sources)


def _list_weighted_sources(layout: RunLayout, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the sources that have a weight in each era."""
    eras = []
    schedules = layout.list_schedules()
    for era in range(layout.segments[-1].era + 1):
        all_weights = [segment.weights for segment in schedules if segment.era == era]
        source_names = set().union(*(list_weighted_sources(weights, names) for weights in all_weights))
        eras.append(tuple(number for number, name in enumerate(names) if name in source_names))
    return tuple(eras)


def _refuse_split_windows(layout: RunLayout, steps: int) -> None:
    """Refuse stages that begin inside a length-group window."""
    for segment in layout.segments if steps else ():
        if segment.step % steps:
            raise PlanError(
                f"A stage of the mixture begins at step {segment.step:,}, which is "
                f"{describe_window_conflict(segment.step, steps)}"
            )


@final
class SourceOrders:
    """Orders of the sources of one plan, and the timeline that serves them.

    An era is the part of a run between two edits of ``seq_len``: each era repacks its sources. Pools are counted
    and orders are created when they are first needed.

    Attributes:
        spec: the settings of the order, with the pool size chosen.
        stores: stores by source name.
        names: source names, in the order of their numbers in rows. A single store is called ``data``.
        run_layout: segments between stages and edits.
        weighted_sources_by_era: numbers of the sources that have a weight in each era.
        weighted_sources: numbers of the sources that have a weight somewhere in the run.
        shares: settings, measures and shares of the sources.
        timeline: source and index of each position.
        source_cuts: cuts of sources at edits of ``seq_len``, by era and source number.
        lock: lock of all lazily computed values. Callers outside ``plan`` need it only to exclude other threads.
    """

    def __init__(
        self,
        data: PlanStore | Mixture,
        spec: PlanSpec,
        edits: Sequence[Edit] = (),
        previous_orders: "SourceOrders | None" = None,
    ) -> None:
        self.data = data
        self.edits = tuple(edits)
        mixture = data if isinstance(data, Mixture) else None
        self.stores: Mapping[str, PlanStore] = (
            dict(sorted(data.stores.items())) if isinstance(data, Mixture) else {SOURCE: data}
        )
        self.names = tuple(self.stores)
        self.spec = spec.with_pools_for(_count_first_sources(data, self.names))
        check_run(data, self.stores, spec, self.edits)
        self.lock = threading.RLock()
        weights: Weights = mixture.weights if mixture else {SOURCE: 1.0}
        first = Segment(0, 0, spec.global_batch_size, spec.seq_len, weights)
        self.run_layout = build_run_layout(first, mixture.stages if mixture else (), self.edits)
        _refuse_split_windows(self.run_layout, spec.group_by_length)
        self._eras = self.run_layout.list_eras()
        self.weighted_sources_by_era = _list_weighted_sources(self.run_layout, self.names)
        self.weighted_sources = tuple(sorted(set(chain.from_iterable(self.weighted_sources_by_era))))
        seq_lens = [segments[0].seq_len for segments in self._eras]
        self.shares = SourceShares(data, self.stores, self.spec, seq_lens)
        self._orders: dict[_Key, SourceOrder] = {}
        # Orders of an equal plan, whose counts are reused. An entry is dropped once the order exists here.
        self._known_orders: dict[_Key, SourceOrder] = {}
        self.source_cuts: dict[_Key, SourceCut] = {}
        if previous_orders is not None:
            self._copy_caches(previous_orders)
        self._check_lengths()
        self.timeline = Timeline(
            self.run_layout,
            self.shares.count_slots,
            self._limit,
            sources=len(self.names),
            lanes=spec.lanes,
            stop=mixture is not None and mixture.exhausted == "stop",
        )
        # Refuse later weights that cannot be met; the timeline checked the first ones.
        for segment in self.run_layout.list_schedules()[1:]:
            self.shares.count_slots(segment.weights, frozenset(), segment.era)
        if previous_orders is not None:
            self._copy_timeline(previous_orders)

    def _copy_caches(self, previous_orders: "SourceOrders") -> None:
        """Reuse orders, measures and cuts.

        Those of eras after the first depend on the edits.
        """
        every_era = _continues(self.edits, previous_orders.edits)
        self._known_orders |= _select_eras(previous_orders.known_orders, every_era=every_era)
        self.shares.statistics |= _select_eras(previous_orders.shares.statistics, every_era=every_era)
        self.source_cuts |= _select_eras(previous_orders.source_cuts, every_era=every_era)

    @property
    def known_orders(self) -> dict[_Key, SourceOrder]:
        """Orders by era and number of the source whose counts are known."""
        return {**self._known_orders, **self._orders}

    def _copy_timeline(self, previous_orders: "SourceOrders") -> None:
        """Reuse the timeline before the first new edit, where nothing has changed."""
        if not _continues(self.edits, previous_orders.edits):
            return
        new_edits = self.edits[len(previous_orders.edits) :]
        until = previous_orders.timeline.sure
        if new_edits:
            until = min(until, previous_orders.run_layout.first_position(new_edits[0].step) - 1)
        exhausted = {
            n: position for n, position in list(previous_orders.timeline.exhausted.items()) if position <= until
        }
        self.timeline.adopt(exhausted, max(until, 0))

    def _check_lengths(self) -> None:
        """Refuse overlong documents and empty sources that would stop the run later."""
        # A plan of one store without edits fails at its first step if it has no sequence, so it needs no check
        # here. That leaves ``left_out`` usable on it.
        is_mixture = isinstance(self.data, Mixture)
        for era, numbers in enumerate(self.weighted_sources_by_era):
            for number in numbers:
                # Sources with statistics have been checked before.
                if (era, number) in self.shares.statistics:
                    continue
                spec = self.shares.get_spec(number, era)
                store = self.stores[self.names[number]]
                if spec.overlong == "error":
                    Pools(store.lengths, spec, self.names[number]).refuse_overlong()
                may_be_empty = (is_mixture or era) and (spec.overlong == "drop" or not store.tokens)
                if spec.overlong == "error" or may_be_empty:
                    self.shares.measure(number, era)

    @property
    def store(self) -> PlanStore:
        """Store of a plan of one store."""
        if isinstance(self.data, Mixture):
            raise PlanError("A mixture has several stores; use plan.stores.")
        return self.data

    @property
    def pools(self) -> Pools:
        """Pools of a plan of one store."""
        _ = self.store  # raises for a mixture
        return self.order(0).pools

    def order(self, number: int, era: int = 0) -> SourceOrder:
        """Return the order of a source in an era."""
        with self.lock:
            order = self._orders.get((era, number))
            if order is None:
                order = self._make_order(number, era)
                self._orders[era, number] = order
            return order

    def _make_order(self, number: int, era: int) -> SourceOrder:
        name = self.names[number]
        spec = self.shares.get_spec(number, era)
        if era == 0:
            order = SourceOrder(name, self.stores[name], spec)
        else:
            previous_order = self.order(number, era - 1)
            source_cut = self.get_source_cut(number, era)
            order = continue_after_cut(previous_order, spec, source_cut, self.count_served(number, era - 1))
        known_order = self._known_orders.pop((era, number), None)
        if known_order is not None:
            order.copy_counts(known_order)
        if len(self.names) > 1:
            order.pool_rows.limit = 2
        return order

    def latest(self) -> list[SourceOrder]:
        """Return the order in the last era of each source with a weight in the run.

        The start of an era depends on the counts of the previous one. Without these counts, return the previous
        era's orders.
        """
        orders: dict[int, SourceOrder] = {}
        for era, numbers in enumerate(self.weighted_sources_by_era):
            has_all_cuts = all((era, number) in self.source_cuts for number in numbers)
            if era and not has_all_cuts and not all(order.counts.is_complete for order in orders.values()):
                break
            orders |= {number: self.order(number, era) for number in numbers}
        return list(orders.values())

    def get_source_cut(self, number: int, era: int) -> SourceCut:
        """Return the cut of a source at the start of an era."""
        if (era, number) not in self.source_cuts:
            served = self.count_served(number, era - 1)
            self.source_cuts[era, number] = compute_source_cut(self.order(number, era - 1), served)
        return self.source_cuts[era, number]

    def count_served(self, number: int, era: int) -> int:
        """Count the sequences that a source serves in an era, which is not the last."""
        position = self._eras[era + 1][0].start
        if position:
            # Stop before the cut, because whether a source is exhausted after it depends on the cut.
            self.timeline.segment_at(position - 1)
        if self.timeline.end is not None:
            position = min(position, self.timeline.end)
        segments = [segment for segment in self.timeline.segments() if segment.era == era]
        return int(segments[-1].served(position)[number]) if segments else 0

    def forget_rows(self, era: int) -> None:
        """Drop the cached rows of eras before ``era``."""
        for (earlier, _), order in self._orders.items():
            if earlier < era:
                order.pool_rows.clear()

    def _limit(self, number: int, era: int, count: int) -> int | None:
        """Return the sequences of a source in an era; None if it has this many."""
        epochs = self.shares.get_epoch_limit(number)
        if epochs is None:
            return None
        order = self.order(number, era)
        if order.surely_has(count, epochs):
            return None
        limit = order.count_before(epochs)
        return limit if count > limit else None

    def left_out(self) -> ExcludedDocuments:
        """Count the documents and tokens that every epoch excludes, over all sources.

        This reads all lengths.
        """
        counts = [order.pools.left_out() for order in self.latest()]
        return ExcludedDocuments(
            sum(excluded.documents for excluded in counts), sum(excluded.tokens for excluded in counts)
        )

    @property
    def is_counted(self) -> bool:
        """True if the number of sequences of every pool is known."""
        return all(order.counts.is_complete for order in self.latest())

    def count_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count the sequences of every pool that has not been counted."""
        orders = self.latest()
        pools = sum(order.pools.count for order in orders)
        done = 0
        for order in orders:

            def report_progress(pools_counted: int, _pools: int, done: int = done) -> None:
                if progress:
                    progress(done + pools_counted, pools)

            order.counts.count_all(report_progress)
            done += order.pools.count
        if not self.is_counted:
            # The start of a later era is known now, so its pools can be counted.
            self.count_all(progress)

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one epoch of a plan of one store; counts all pools first."""
        _ = self.store  # raises for a mixture
        return self.order(0, len(self._eras) - 1).counts.sequences
