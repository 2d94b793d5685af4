"""A dry run: what a plan comes to, from lengths alone."""

import copy
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.plan_questions import (
    MixingMeasure,
    SourceEpochStatistics,
    measure_mixing,
    measure_pools,
)
from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Mixture, Plan, check_world
from batchloom.plan.mixture import is_positive_weight
from batchloom.plan.order import AssumedStore, SourceCut, SourceOrder, SourceOrders, compute_quotas
from batchloom.store import Store

Ints = NDArray[np.int64]

# Pools packed in all: a few milliseconds each.
_SAMPLED_POOLS = 64
# Ids of a vocabulary that nobody knows take four bytes.
_DEFAULT_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class SourceForecast:
    """What becomes of one source in a run.

    Attributes:
        name: in the plan; of a lone store ``data``.
        assumed: whether there is no such store.
        documents, tokens: of the source.
        sequences_per_epoch: how many an epoch packs into.
        sequences, epochs, tokens_served: in the run.
        split: documents longer than a sequence (or cut by ``wrap``), which are cut.
        dropped, lost: documents and tokens of an epoch that ``overlong`` leaves out.
        weight: share that was asked for at the beginning, in the unit of the mixture; None of a lone store.
        effective: share that is served at the beginning, in the same unit.
        error: by how much of itself it differs from the weight.
        share: of all tokens that are served in the run.
        through: step at which it has been passed through once; None where the run ends before.
        exhausted: the first step of which it has no share any more, since it has had its epochs: how many steps lie
            before; None where it goes on.
        bytes: of token ids that are read in the run, by all ranks together.
        mixing: how far apart neighbours of the store come, while it is served; None where it serves nothing.
    """

    name: str
    assumed: bool
    documents: int
    tokens: int
    sequences_per_epoch: int
    sequences: int
    epochs: float
    tokens_served: int
    split: int
    dropped: int
    lost: int
    weight: float | None
    effective: float | None
    error: float | None
    share: float
    through: int | None
    exhausted: int | None
    bytes: int
    mixing: MixingMeasure | None


@dataclass(frozen=True, slots=True)
class EffectiveShares:
    """The shares of the sequences that sources of a mixture have, from a step on.

    Attributes:
        step: the first that they hold for as a whole, which is how many steps lie before.
        shares: of each source that has one.
    """

    step: int
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """What a plan comes to.

    Attributes:
        fingerprint: of the plan.
        exact: whether steps and sequences were counted; else they are estimates from sampled pools.
        exact_tokens: whether the tokens were, too; else they are those of a mean sequence.
        assumed: whether any source is only assumed.
        steps: of the run.
        global_batch_size, seq_len: at its beginning.
        sequences: that are served, without those that fill the last step.
        empty: sequences without loss that fill the last step.
        skipped: sequences that edits leave out.
        tokens: that are served.
        padding: share of all places of the run that hold no token, 0 to 1.
        least_padding: share that no packing of whole documents could do with less of, of what is served, 0 to 1.
        cut_padding: share of the places of its first window that hold no token where each step is cut to its longest
            row, 0 to 1; None of rows that are not grouped by length.
        bytes: of token ids read, by all ranks together.
        rank_bytes: of them by one rank of ``world_size``.
        world_size: number of data-parallel ranks.
        hours: at the given tokens a second, padding included; None where none were given.
        sources: those that have a weight anywhere in the run.
        shares: of a mixture those of the beginning, and what stages, edits and exhausted sources make of them.
    """

    fingerprint: str
    exact: bool
    exact_tokens: bool
    assumed: bool
    steps: int
    global_batch_size: int
    seq_len: int
    sequences: int
    empty: int
    skipped: int
    tokens: int
    padding: float
    least_padding: float
    cut_padding: float | None
    bytes: int
    rank_bytes: int
    world_size: int
    hours: float | None
    sources: tuple[SourceForecast, ...]
    shares: tuple[EffectiveShares, ...]


def forecast_plan(plan: Plan, *, tokens_per_second: float | None = None, world_size: int = 1) -> PlanForecast:
    """Look ahead at a whole run. Pools that are not counted yet are sampled where there are many.

    Args:
        plan: the order. What is estimated is not told to it.
        tokens_per_second: places of sequences trained a second, of all ranks together.
        world_size: number of data-parallel ranks.

    Raises:
        SettingsError: numbers that are none.
        PlanError: a source that gives no sequence; or a world size that does not divide a step.
    """
    if tokens_per_second is not None and not is_positive_weight(tokens_per_second):
        raise SettingsError([f"tokens_per_second: {quote_value(tokens_per_second)} is not a number above 0"])
    if (as_int(world_size) or 0) < 1:
        raise SettingsError([f"world_size: {quote_value(world_size)} is no whole number of at least 1"])
    for step_range in plan.orders.course.step_ranges:
        check_world(step_range.size, 0, world_size)
    plan_copy = copy.copy(plan)
    is_counted = not plan_copy.orders.course.seq_len_changes and plan_copy.orders.is_counted
    measures = _measure_sources(plan_copy.orders)
    run = _RunSchedule(plan_copy, measures)
    sources = tuple(_forecast_source(run, number) for number in plan_copy.orders.weighted_sources)
    token_slots = run.count_token_slots()
    tokens = sum(source.tokens_served for source in sources)
    size = sum(source.bytes for source in sources)
    least = run.count_min_positions()
    return PlanForecast(
        fingerprint=plan.fingerprint,
        exact=is_counted or all(m.exact for m in measures.values()),
        exact_tokens=run.exact_tokens,
        assumed=any(source.assumed for source in sources),
        steps=plan_copy.steps,
        global_batch_size=plan_copy.spec.global_batch_size,
        seq_len=plan_copy.spec.seq_len,
        sequences=sum(source.sequences for source in sources) - run.skipped,
        empty=run.empty,
        skipped=run.skipped,
        tokens=tokens,
        padding=1 - tokens / token_slots if token_slots else 0.0,
        least_padding=max(1 - tokens / least, 0.0) if least else 0.0,
        cut_padding=_estimate_cut_padding(plan_copy) if plan_copy.spec.group_by_length else None,
        bytes=size,
        rank_bytes=-(-size // world_size),
        world_size=world_size,
        hours=token_slots / tokens_per_second / 3600 if tokens_per_second else None,
        sources=sources,
        shares=_list_effective_shares(run) if isinstance(plan_copy.orders.data, Mixture) else (),
    )


def _estimate_cut_padding(plan: Plan) -> float:
    """Padding of the first window where each step is cut to its longest row."""
    lengths = plan.rows(*plan.run.window(0)).lengths
    size = plan.spec.global_batch_size
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), size))
    return 1 - int(lengths.sum()) / (int(longest.sum()) * size)


def _measure_sources(orders: SourceOrders) -> dict[tuple[int, int], SourceEpochStatistics]:
    """A measure of every source, in every packing an edit makes of it; those before are what it follows from."""
    eras = len(orders.course.seq_len_changes) + 1
    pools = sum(orders.order(number).pools.count for number in orders.weighted_sources) * eras
    most = max(_SAMPLED_POOLS // (len(orders.weighted_sources) * eras), 2)
    statistics: dict[tuple[int, int], SourceEpochStatistics] = {}
    for era, numbers in enumerate(orders.weighted_sources_by_era):
        estimated = {number for (_, number), source_statistics in statistics.items() if not source_statistics.exact}
        for number in estimated:
            served = orders.count_served(number, era - 1)
            # Who served nothing stands where it stood, and nothing is counted of it.
            if served.any():
                orders.source_cuts[era, number] = _estimate_pool_cut(orders.order(number, era - 1), served)
        for number in numbers:
            order = orders.order(number, era)
            statistics[era, number] = measure_pools(order, pools if pools <= _SAMPLED_POOLS else most)
    return statistics


def _estimate_pool_cut(order: SourceOrder, served: Ints) -> SourceCut:
    """Where a source stands about, if only whole pools are left of its epoch: as many as it has left sequences.

    Rows of pools that were only estimated cannot be told.
    """
    index, lane = divmod(int(served.sum()), order.lanes)
    epoch = order.find_epoch(lane, index)
    remaining_sequences = int(order.quotas(epoch + 1).sum() - served.sum())
    lane_sizes = [len(pools) for pools in order.epoch(epoch).orders]
    remaining_pools = round(remaining_sequences / order.sequences * order.pools.count)
    slots = [
        size - int(quota) for size, quota in zip(lane_sizes, compute_quotas(remaining_pools, order.lanes), strict=True)
    ]
    return tuple((epoch, max(slot, 0), 0) for slot in slots)


def _find_first_packing(orders: SourceOrders, number: int) -> int:
    """The first packing that a source has a weight in."""
    return next(era for era, numbers in enumerate(orders.weighted_sources_by_era) if number in numbers)


@final
class _RunSchedule:
    """The stretches of a run under one schedule, and what each source serves in them."""

    def __init__(self, plan: Plan, measures: dict[tuple[int, int], SourceEpochStatistics]) -> None:
        self.plan, self.orders, self.measures = plan, plan.orders, measures
        orders = self.orders
        steps = plan.steps
        last = plan.positions_of(steps - 1)[1] if steps else 0
        orders.timeline.segment_at(max(last - 1, 0))
        # With last='drop' some of what is left is not served; and sources may end a run inside a step.
        end = min(plan.positions, last)
        self.end = end if orders.timeline.end is None else min(end, orders.timeline.end)
        self.segments: list[tuple[int, int, int, np.ndarray]] = []
        for segment in orders.timeline.segments():
            if segment.position >= self.end:
                break
            until = min(orders.timeline.until(segment) or self.end, self.end)
            served = (segment.served(until) - segment.bases).sum(axis=1)
            self.segments.append((segment.position, until, segment.era, served))
        self.exact_tokens = (
            len(orders.course.seq_len_changes) == 0
            and plan.spec.lanes == 1
            and not orders.course.bans
            and all(m.pool_tokens is not None for m in measures.values())
        )
        self.empty = max(last - self.end, 0)
        step_ranges = orders.course.step_ranges
        step_sequences = 0
        for index, step_range in enumerate(step_ranges):
            until = step_ranges[index + 1].step if index + 1 < len(step_ranges) else steps
            step_sequences += max(min(until, steps) - step_range.step, 0) * step_range.size
        self.skipped = last - step_sequences
        self.tokens = {number: self._count_tokens(number) for number in orders.weighted_sources}

    def count_token_slots(self) -> int:
        """Tokens that the sequences of all steps have room for."""
        steps, token_slots = self.plan.steps, 0
        step_ranges = self.orders.course.step_ranges
        for index, step_range in enumerate(step_ranges):
            until = step_ranges[index + 1].step if index + 1 < len(step_ranges) else steps
            token_slots += max(min(until, steps) - step_range.step, 0) * step_range.size * step_range.seq_len
        return token_slots

    def count_min_positions(self) -> float:
        """Places of the run that no packing of the documents that are served could do without."""
        served = least = 0.0
        for number in self.orders.weighted_sources:
            for era, count in self.count_sequences(number).items():
                order, measure = self.orders.order(number, era), self.measures[era, number]
                served += count * order.spec.seq_len
                least += count * order.spec.seq_len * measure.least / order.sequences
        empty = self.empty * self.orders.course.range_at(self.end).seq_len
        return (self.count_token_slots() - empty) * least / served if served else 0.0

    def compute_share(self, number: int) -> float:
        """Share of the sequences that a source has while it is served."""
        segment_counts = [
            (stop - start, int(counts[number])) for start, stop, _, counts in self.segments if counts[number]
        ]
        return sum(served for _, served in segment_counts) / max(sum(size for size, _ in segment_counts), 1)

    def count_sequences(self, number: int) -> dict[int, int]:
        """Sequences of a source by era, of those it has some in."""
        sequences_by_era: dict[int, int] = {}
        for _, _, era, served in self.segments:
            if served[number]:
                sequences_by_era[era] = sequences_by_era.get(era, 0) + int(served[number])
        return sequences_by_era

    def count_epochs(self, number: int) -> float:
        """Passes over a source."""
        return sum(
            count / self.orders.order(number, era).sequences for era, count in self.count_sequences(number).items()
        )

    def _count_tokens(self, number: int) -> int:
        """Tokens of a source."""
        served_tokens = 0.0
        for era, count in self.count_sequences(number).items():
            order, measure = self.orders.order(number, era), self.measures[era, number]
            if self.exact_tokens and measure.pool_tokens is not None:
                served_tokens += _count_served_tokens(order, measure.pool_tokens, count)
            else:
                served_tokens += count * measure.tokens / order.sequences
        # What edits leave out is of all sources alike.
        served_share = 1 - self.skipped / self.end if self.end else 1.0
        return round(served_tokens * served_share) if self.skipped else round(served_tokens)

    def find_full_pass_step(self, number: int) -> int | None:
        """The step at which a source has been passed through once."""
        done = 0.0
        for position, until, era, served in self.segments:
            if not served[number]:
                continue
            part = int(served[number]) / self.orders.order(number, era).sequences
            if done < 1 <= done + part:
                at = position + (until - position) * (1 - done) / part
                return self.orders.course.step_at(max(int(np.ceil(at)) - 1, 0))[0]
            done += part
        return None


def _count_served_tokens(order: SourceOrder, pool_tokens: np.ndarray, count: int) -> int:
    """Tokens of the first sequences of a source that was counted."""
    epochs, remainder = divmod(count, order.sequences)
    pool_order = order.pools.order(epochs)
    ends = np.cumsum(order.counts[pool_order])
    slot = int(ends.searchsorted(remainder, side="right"))
    served_tokens = epochs * int(pool_tokens.sum()) + int(pool_tokens[pool_order[:slot]].sum())
    partial_sequences = remainder - (int(ends[slot - 1]) if slot else 0)
    if partial_sequences:
        rows = order.pools.rows(int(pool_order[slot]), epochs)
        served_tokens += int(rows.lengths[: int(rows.pointers[partial_sequences])].sum())
    return served_tokens


def _forecast_source(run: _RunSchedule, number: int) -> SourceForecast:
    plan, orders, first = run.plan, run.orders, _find_first_packing(run.orders, number)
    name, order, measure = (
        plan.names[number],
        orders.order(number, first),
        run.measures[first, number],
    )
    store = plan.stores[name]
    served, tokens = sum(run.count_sequences(number).values()), run.tokens[number]
    everything = sum(run.tokens.values())
    part = run.compute_share(number)
    weight, effective = _compute_initial_shares(run, number)
    exhausted_position = orders.timeline.exhausted.get(number)
    size = store.dtype.itemsize if isinstance(store, Store) else _DEFAULT_TOKEN_BYTES
    return SourceForecast(
        name=name,
        assumed=isinstance(store, AssumedStore),
        documents=order.pools.served_documents,
        tokens=store.tokens,
        sequences_per_epoch=order.sequences,
        sequences=served,
        epochs=run.count_epochs(number),
        tokens_served=tokens,
        split=round(measure.split),
        dropped=round(measure.dropped),
        lost=round(measure.dropped_tokens),
        weight=weight,
        effective=effective,
        error=effective / weight - 1 if weight and effective is not None else None,
        share=tokens / max(everything, 1),
        through=run.find_full_pass_step(number),
        exhausted=None
        if exhausted_position is None or exhausted_position >= run.end
        else orders.course.steps_until(exhausted_position),
        bytes=tokens * size,
        mixing=measure_mixing(order, plan.spec.global_batch_size * part, part) if part else None,
    )


def _list_effective_shares(run: _RunSchedule) -> tuple[EffectiveShares, ...]:
    """The shares of a mixture's sources, and where they change."""
    plan, orders = run.plan, run.orders
    segments = [
        timeline_segment for timeline_segment in orders.timeline.segments() if timeline_segment.position < run.end
    ]
    return tuple(
        EffectiveShares(
            orders.course.steps_until(segment.position),
            {
                plan.names[number]: count / segment.schedule.period
                for number, count in zip(segment.sources.tolist(), segment.schedule.counts, strict=True)
            },
        )
        for segment in segments
    )


def _compute_initial_shares(run: _RunSchedule, number: int) -> tuple[float | None, float | None]:
    """Weight and effective share of a source at the beginning, in the unit of the mixture."""
    plan, orders = run.plan, run.orders
    if not isinstance(orders.data, Mixture):
        return None, None
    weights = orders.shares(orders.course.changes[0].weights)
    segment = orders.timeline.segments()[0]
    slots = dict(zip(segment.sources.tolist(), segment.schedule.counts, strict=True))
    amounts = {}
    for source_number, count in slots.items():
        order, measure = orders.order(source_number), run.measures[0, source_number]
        amounts_per_sequence = {
            "tokens": measure.tokens / order.sequences,
            "documents": order.pools.served_documents / order.sequences,
            "epochs": 1 / order.sequences,
        }
        amounts[source_number] = count * amounts_per_sequence[orders.data.unit]
    total = sum(amounts.values())
    return weights.get(plan.names[number], 0.0), amounts.get(number, 0.0) / total
