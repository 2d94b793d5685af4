"""Forecast of a plan: steps, tokens, padding and shares, from lengths alone."""

import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, is_positive_number, quote_value
from batchloom.plan import Plan, check_world, compute_min_sequences, count_sequences
from batchloom.plan.order import AssumedStore, SourceCut, SourceOrder, SourceOrders
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows, align_lengths
from batchloom.store import Store

Ints = NDArray[np.int64]

# Pools of more sequences are not expanded: documents far longer than a sequence would take gigabytes.
_LARGE_POOL = 1 << 22

# Limit on packed pools over all sources; a pool takes a few milliseconds.
_SAMPLED_POOLS = 64
# Bytes of a token id if the vocabulary size is unknown.
_DEFAULT_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class EpochStatistics:
    """Statistics of one epoch of a source, from all of its pools or from a sample.

    Attributes:
        exact: whether every pool was packed.
        packed_pools: numbers of the packed pools, int64 [packed pools].
        pool_sequences: number of sequences of each packed pool, int64 [packed pools].
        sequences: number of sequences.
        tokens: tokens of an epoch, without those left out.
        least: lower bound on the number of sequences.
        split: served documents that are cut.
        dropped, dropped_tokens: documents left out as too long, and their tokens.
        pool_tokens: tokens of each pool, int64 [pools]; None for a sample, or if pools are too large to expand.
    """

    exact: bool
    packed_pools: Ints
    pool_sequences: Ints
    sequences: float
    tokens: float
    least: float
    split: float
    dropped: float
    dropped_tokens: float
    pool_tokens: Ints | None


@dataclass(frozen=True, slots=True)
class MixingMeasure:
    """Mixing of neighboring documents of the store, measured in sampled pools.

    Attributes:
        block: neighboring documents that go to the same pool.
        pool: documents that are mixed with one another.
        apart: mean distance in positions between a document and the next one of the store.
        documents: documents in a step.
        blocks: distinct blocks these documents come from.
    """

    block: int
    pool: int
    apart: float
    documents: float
    blocks: float


def measure_pools(order: SourceOrder, most: int) -> EpochStatistics:
    """Pack the pools of a source, or ``most`` of them evenly spaced.

    In a sample, each pool that was not packed counts as the mean of the packed ones.
    """
    pools = order.pools
    spec = order.spec
    sampled_pools = np.linspace(0, pools.count - 1, min(most, pools.count)).astype(np.int64)
    sequences, tokens = np.zeros((2, len(sampled_pools)), np.int64)
    documents = split = dropped = dropped_tokens = 0
    packed: list[NDArray[np.uint32]] = []
    for index, pool in enumerate(sampled_pools.tolist()):
        members = pools.members(pool)
        fitted = pools.fit_members(members)
        aligned_lengths = align_lengths(fitted, spec.align)
        sequence_count = int(order.counts.by_pool[pool])
        sequences[index] = (
            sequence_count if sequence_count >= 0 else count_sequences(aligned_lengths, spec.seq_len, spec.packing)
        )
        tokens[index] = fitted.sum()
        documents += len(members)
        split += _count_cut_documents(aligned_lengths, spec.seq_len, spec.packing)
        if spec.overlong != "split":
            raw = order.store.lengths.take(members).astype(np.int64)
            dropped += int(((raw > 0) & (fitted == 0)).sum())
            dropped_tokens += int(raw.sum() - fitted.sum())
        # Half the memory of int64: a sample may have half a million lengths.
        packed.append(aligned_lengths.astype(np.uint32))
    exact = len(sampled_pools) == pools.count
    scale = pools.documents / max(documents, 1)
    if spec.overlong == "split" and tokens.any():
        # Every token is served, so scaling by tokens is more accurate than scaling by documents.
        scale = order.store.tokens / int(tokens.sum())
    least = float(compute_min_sequences(np.concatenate(packed), spec.seq_len)) if packed else 0.0
    return EpochStatistics(
        exact=exact,
        packed_pools=sampled_pools,
        pool_sequences=sequences,
        sequences=float(sequences.sum() * scale),
        tokens=float(tokens.sum() * scale),
        least=least * scale,
        split=split * scale,
        dropped=dropped * scale,
        dropped_tokens=dropped_tokens * scale,
        pool_tokens=tokens if exact and sequences.max(initial=0) <= _LARGE_POOL else None,
    )


def _adopt_sequence_counts(order: SourceOrder, statistics: EpochStatistics) -> None:
    """Adopt the sequence counts of the pools.

    With counts of a sample, the source answers every question about positions approximately, and cannot serve
    sequences.
    """
    if order.counts.is_complete:
        return
    counts = order.counts.by_pool.copy()
    if statistics.exact:
        counts[statistics.packed_pools] = statistics.pool_sequences
    else:
        # The mean is not an integer, so the counts are rounded such that they sum to the total.
        mean = statistics.sequences / len(counts)
        ends = np.rint(np.arange(1, len(counts) + 1) * mean).astype(np.int64)
        counts = np.where(counts < 0, np.diff(ends, prepend=0), counts)
        if not counts.any():
            # All documents of the sample were left out, which says nothing of the others.
            counts[0] = 1
    order.counts.adopt(counts)


def _count_cut_documents(lengths: Ints, seq_len: int, packing: str) -> int:
    """Count the documents with tokens in several sequences."""
    if packing not in CUTTING_STRATEGIES:
        return int((lengths > seq_len).sum())
    ends = np.cumsum(lengths)
    return int(((ends - lengths) // seq_len < (ends - 1) // seq_len)[lengths > 0].sum())


def _measure_mixing(order: SourceOrder, step_rows: float, share: float) -> MixingMeasure | None:
    """Measure in one pool the distance of neighbors and the composition of a step.

    ``step_rows`` is its number of sequences per step, ``share`` its share of the sequences while it is served.
    """
    pools = order.pools
    spec = order.spec
    block = pools.blocks[0]
    pool = pools.count // 2
    if order.counts.by_pool[pool] > _LARGE_POOL:
        return None
    rows = pools.rows(pool, 0)
    size = min(max(round(step_rows), 1), max(len(rows), 1))
    first = (len(rows) - size) // 2
    a = int(rows.pointers[first])
    b = int(rows.pointers[first + size])
    step_documents = np.unique(rows.documents[a:b])
    # If a step takes more sequences than a pool has, the others come from similar pools.
    more = step_rows / size
    # Single documents are anywhere in an epoch, so the mean distance of two is a third of it.
    alone = spec.shuffle and block == 1
    apart = order.counts.sequences / 3 if alone else _mean_row_distance(rows, block if spec.shuffle else 0)
    return MixingMeasure(
        block=block if spec.shuffle else pools.documents,
        pool=min(spec.pool_size, pools.documents),
        apart=apart / share,
        documents=len(step_documents) * more,
        blocks=len(np.unique(step_documents // block)) * more,
    )


def _mean_row_distance(rows: Rows, block: int) -> float:
    """Return the mean distance in rows between a document and the next of its block.

    Both must be in the pool. Block 0 means the complete store.
    """
    numbers = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    order = np.argsort(rows.documents, kind="stable")
    documents = rows.documents[order]
    at = numbers[order]
    near = documents[1:] == documents[:-1] + 1
    if block:
        near &= documents[1:] // block == documents[:-1] // block
    gaps = np.abs(at[1:] - at[:-1])[near]
    return float(gaps.mean()) if gaps.size else 0.0


@dataclass(frozen=True, slots=True)
class SourceForecast:
    """Forecast of one source in a run.

    Attributes:
        name: name in the plan; ``data`` for a single store.
        assumed: whether the store does not exist.
        documents, tokens: size of the source.
        sequences_per_epoch: number of sequences an epoch packs into.
        sequences, epochs, tokens_served: amounts served in the run.
        split: number of documents that are cut because they exceed a sequence (or by ``wrap``).
        dropped, lost: documents and tokens per epoch that ``overlong`` leaves out.
        weight: requested share at the start, in the unit of the mixture; None for a single store.
        effective: share served at the start, in the same unit.
        error: relative deviation of ``effective`` from ``weight``.
        share: share of all tokens served in the run.
        through: step at which the first epoch is complete; None if the run ends before.
        exhausted: first step without a share because all epochs are served (the number of steps
            before it); None if the source is not exhausted.
        bytes: bytes of token ids read in the run, by all ranks together.
        mixing: distance between neighbors of the store while the source is served; None if it serves nothing, or its
            pools have more than 4 million sequences.
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
    """Shares of the sequences that mixture sources have from a step on.

    Attributes:
        step: first step they hold for completely (the number of steps before it).
        shares: share of each source that has one.
    """

    step: int
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class ShareWindow:
    """Sequences of the sources of a mixture in a range of steps.

    Attributes:
        first, stop: range of steps, without ``stop``.
        sequences: number of sequences of each source in the range.
        expected: number of sequences by the effective shares of the range.
        deviations: sequences of each source since the last change of shares, less those by its share, at the end of
            the range. The schedule keeps them within 1.
    """

    first: int
    stop: int
    sequences: dict[str, int]
    expected: dict[str, float]
    deviations: dict[str, float]


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """Forecast of a plan.

    Attributes:
        fingerprint: fingerprint of the plan.
        exact: whether steps and sequences were counted; otherwise they are estimates from sampled pools.
        exact_tokens: whether the tokens were counted, too; otherwise they assume mean sequences.
        assumed: whether any source is only assumed.
        steps: steps of the run.
        global_batch_size, seq_len: values at the start of the run.
        sequences: number of sequences served, without those that fill the last step.
        empty: number of sequences without loss that fill the last step.
        skipped: number of sequences that edits leave out.
        tokens: number of tokens served.
        padding: share of the token slots of the run that hold no token, 0 to 1.
        least_padding: lower bound of the padding among served sequences over all packings of uncut documents, 0 to 1.
        cut_padding: padding of the first window if each step is cut to its longest row, 0 to 1; None if rows are not
            grouped by length.
        bytes: bytes of token ids read, by all ranks together.
        rank_bytes: bytes of token ids read by one rank of ``world_size``.
        world_size: number of data-parallel ranks.
        hours: duration at the given tokens per second, padding included; None if none were given.
        sources: sources that have a weight anywhere in the run.
        shares: of a mixture, the shares at the start and after each change by stages, edits and exhausted sources.
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


def forecast_plan(
    plan: Plan,
    *,
    tokens_per_second: float | None = None,
    world_size: int = 1,
    most_pools: int = _SAMPLED_POOLS,
) -> PlanForecast:
    """Forecast a complete run; samples the uncounted pools if there are many.

    Args:
        plan: the plan. It does not adopt the estimates.
        tokens_per_second: token slots trained per second, of all ranks together.
        world_size: number of data-parallel ranks.
        most_pools: largest number of pools that are packed, over all sources.

    Raises:
        SettingsError: a number is invalid.
        PlanError: a source gives no sequence, or the world size does not divide a step.
    """
    if tokens_per_second is not None and not is_positive_number(tokens_per_second):
        raise SettingsError([f"tokens_per_second: {quote_value(tokens_per_second)} is not a number above 0"])
    if (as_int(world_size) or 0) < 1:
        raise SettingsError([f"world_size: {quote_value(world_size)} is not a whole number of at least 1"])
    for segment in plan.segments:
        check_world(segment.size, 0, world_size)
    # Rows are packed before a plan adopts estimates, with which it could not serve them.
    cut_padding = _compute_cut_padding(copy.copy(plan)) if plan.spec.group_by_length else None
    plan_copy = _copy_plan(plan)
    keeps_lanes = plan_copy.spec.lanes == plan.spec.lanes
    is_counted = not plan_copy.segments[-1].era and plan_copy.orders.is_counted
    measures = _measure_sources(plan_copy.orders, most_pools)
    run = _RunSchedule(plan_copy, measures)
    sources = tuple(_forecast_source(run, number) for number in plan_copy.orders.weighted_sources)
    token_slots = run.token_slots
    tokens = sum(source.tokens_served for source in sources)
    size = sum(source.bytes for source in sources)
    min_token_slots = run.count_min_token_slots()
    return PlanForecast(
        fingerprint=plan.fingerprint,
        exact=keeps_lanes and (is_counted or all(m.exact for m in measures.values())),
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
        least_padding=max(1 - tokens / min_token_slots, 0.0) if min_token_slots else 0.0,
        cut_padding=cut_padding,
        bytes=size,
        rank_bytes=-(-size // world_size),
        world_size=world_size,
        hours=token_slots / tokens_per_second / 3600 if tokens_per_second else None,
        sources=sources,
        shares=_list_effective_shares(run) if plan_copy.mixture is not None else (),
    )


def forecast_shares(plan: Plan, first: int, stop: int, *, windows: int) -> tuple[ShareWindow, ...]:
    """Return the sequences of each source in consecutive ranges of steps.

    If the pools of a source are not counted, its exhaustion is estimated as in :func:`forecast_plan`.

    Args:
        plan: the plan. It does not adopt the estimates.
        first: first step.
        stop: last step + 1.
        windows: largest number of ranges, of about equal size.
    """
    plan = _copy_plan(plan)
    _measure_sources(plan.orders, _SAMPLED_POOLS)
    bounds = np.unique(np.linspace(first, stop, windows + 1).astype(np.int64)).tolist()
    if len(bounds) < 2:
        return ()
    return tuple(_count_window(plan, begin, end) for begin, end in pairwise(bounds))


def _copy_plan(plan: Plan) -> Plan:
    """Return a copy that can adopt estimates.

    It has no lanes if an edit packs sources again: where it cuts them is estimated to a slot, and those of lanes are
    large.
    """
    if plan.spec.lanes > 1 and plan.segments[-1].era:
        return Plan(plan.data, replace(plan.spec, lanes=1), plan.edits)
    return copy.copy(plan)


def _count_window(plan: Plan, first: int, stop: int) -> ShareWindow:
    names = plan.names
    counts, expected, deviations = np.zeros((3, len(names)))
    for begin, end in _list_position_ranges(plan, first, stop):
        for segment, segment_end in plan.serve_until(end).segments:
            start = max(begin, segment.position)
            until = min(end, segment_end)
            if start >= until:
                continue
            shares = np.zeros(len(names))
            shares[segment.sources] = np.array(segment.schedule.counts) / segment.schedule.period
            served = segment.served(until) - segment.bases
            counts += segment.served(until) - segment.served(start)
            expected += shares * (until - start)
            deviations = served - shares * (until - segment.position)
    columns = zip(names, counts.astype(np.int64).tolist(), expected.tolist(), deviations.tolist(), strict=True)
    rows = [row for row in columns if row[1] or row[2]]
    return ShareWindow(
        first,
        stop,
        {name: count for name, count, _, _ in rows},
        {name: number for name, _, number, _ in rows},
        {name: deviation for name, _, _, deviation in rows},
    )


def _list_position_ranges(plan: Plan, first: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of positions of steps; edits that skip steps leave gaps."""
    ends = [*(segment.step for segment in plan.segments[1:]), stop]
    return [
        (segment.locate_step(max(first, segment.step)), segment.locate_step(min(stop, end)))
        for segment, end in zip(plan.segments, ends, strict=True)
        if max(first, segment.step) < min(stop, end)
    ]


def _compute_cut_padding(plan: Plan) -> float:
    """Return padding of the first window if steps are cut to their longest row."""
    lengths = plan.rows(*plan.run.window(0)).lengths
    size = plan.spec.global_batch_size
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), size))
    return 1 - int(lengths.sum()) / (int(longest.sum()) * size)


def _measure_sources(orders: SourceOrders, most_pools: int) -> dict[tuple[int, int], EpochStatistics]:
    """Measure every source in every packing that edits make of it.

    Measures of earlier packings determine the start of later ones.
    """
    eras = len(orders.weighted_sources_by_era)
    pools = sum(orders.order(number).pools.count for number in orders.weighted_sources) * eras
    most = max(most_pools // (len(orders.weighted_sources) * eras), 2)
    statistics: dict[tuple[int, int], EpochStatistics] = {}
    for era, numbers in enumerate(orders.weighted_sources_by_era):
        estimated = {number for (_, number), source_statistics in statistics.items() if not source_statistics.exact}
        for number in estimated:
            served = orders.count_served(number, era - 1)
            if served:
                orders.source_cuts[era, number] = _estimate_cut(orders.order(number, era - 1), served)
            else:
                # It keeps its position. A cut of a resumed run belongs to counts that were replaced by estimates.
                orders.source_cuts.pop((era, number), None)
        for number in numbers:
            order = orders.order(number, era)
            statistics[era, number] = measure_pools(order, pools if pools <= most_pools else most)
            _adopt_sequence_counts(order, statistics[era, number])
    return statistics


def _estimate_cut(order: SourceOrder, served: int) -> SourceCut:
    """Estimate the position of a source, in complete pools left of its epoch.

    The number of pools left follows from the number of sequences left, since pools that were only estimated have no
    known rows.
    """
    epoch = order.find_epoch(served)
    remaining_sequences = order.count_before(epoch + 1) - served
    remaining_pools = round(remaining_sequences / order.counts.sequences * order.pools.count)
    return SourceCut(epoch, max(order.pools.count - remaining_pools, 0), 0)


@final
class _RunSchedule:
    """Segments of a run under one schedule each, and the sequences each source serves."""

    def __init__(self, plan: Plan, measures: dict[tuple[int, int], EpochStatistics]) -> None:
        self.plan = plan
        self.orders = plan.orders
        self.measures = measures
        orders = self.orders
        steps = plan.steps
        last = plan.positions_of(steps - 1)[1] if steps else 0
        # With last='drop' the remainder is not served, and exhausted sources can end a run inside a step.
        self.served = plan.serve_until(min(plan.positions, last))
        self.end = self.served.segments[-1][1] if self.served.segments else 0
        self.segments: list[tuple[int, int, int, np.ndarray]] = [
            (segment.position, end, segment.era, segment.served(end) - segment.bases)
            for segment, end in self.served.segments
        ]
        self.exact_tokens = (
            not plan.segments[-1].era
            and plan.spec.lanes == 1
            and not any(segment.bans for segment in plan.segments)
            and all(m.pool_tokens is not None for m in measures.values())
        )
        self.empty = max(last - self.end, 0)
        ranges = _list_position_ranges(plan, 0, steps)
        self.skipped = last - sum(stop - start for start, stop in ranges)
        # Tokens that fit into the sequences of all steps.
        self.token_slots = sum((stop - start) * plan.spec_at(plan.step_at(start)[0]).seq_len for start, stop in ranges)
        self.tokens = {number: self._count_tokens(number) for number in orders.weighted_sources}

    def count_min_token_slots(self) -> float:
        """Return a lower bound on the token slots that the served documents need."""
        served = min_token_slots = 0.0
        for number in self.orders.weighted_sources:
            for era, count in self.count_sequences(number).items():
                order = self.orders.order(number, era)
                measure = self.measures[era, number]
                served += count * order.spec.seq_len
                min_token_slots += count * order.spec.seq_len * measure.least / order.counts.sequences
        empty = self.empty * self.plan.spec_at(self.plan.step_at(self.end)[0]).seq_len
        return (self.token_slots - empty) * min_token_slots / served if served else 0.0

    def compute_share(self, number: int) -> float:
        """Return a source's share of the sequences while it is served."""
        segment_counts = [
            (stop - start, int(counts[number])) for start, stop, _, counts in self.segments if counts[number]
        ]
        return sum(served for _, served in segment_counts) / max(sum(size for size, _ in segment_counts), 1)

    def count_sequences(self, number: int) -> dict[int, int]:
        """Count the sequences of a source per era; eras without any are omitted."""
        sequences_by_era: dict[int, int] = {}
        for _, _, era, served in self.segments:
            if served[number]:
                sequences_by_era[era] = sequences_by_era.get(era, 0) + int(served[number])
        return sequences_by_era

    def _count_tokens(self, number: int) -> int:
        served_tokens = 0.0
        for era, count in self.count_sequences(number).items():
            order = self.orders.order(number, era)
            measure = self.measures[era, number]
            if self.exact_tokens and measure.pool_tokens is not None:
                served_tokens += _count_served_tokens(order, measure.pool_tokens, count)
            else:
                served_tokens += count * measure.tokens / order.counts.sequences
        # Edits skip sequences of all sources in proportion.
        served_share = 1 - self.skipped / self.end if self.end else 1.0
        return round(served_tokens * served_share) if self.skipped else round(served_tokens)

    def find_full_pass_step(self, number: int) -> int | None:
        """Return the step at which the first epoch of a source is complete."""
        done = 0.0
        for position, until, era, served in self.segments:
            if not served[number]:
                continue
            part = int(served[number]) / self.orders.order(number, era).counts.sequences
            if done < 1 <= done + part:
                at = position + (until - position) * (1 - done) / part
                return self.plan.step_at(max(int(np.ceil(at)) - 1, 0))[0]
            done += part
        return None


def _count_served_tokens(order: SourceOrder, pool_tokens: np.ndarray, count: int) -> int:
    """Count the tokens of the first ``count`` sequences of a counted source."""
    epochs, remainder = divmod(count, order.counts.sequences)
    pool_order = order.pools.order(epochs)
    ends = np.cumsum(order.counts.by_pool[pool_order])
    slot = int(ends.searchsorted(remainder, side="right"))
    served_tokens = epochs * int(pool_tokens.sum()) + int(pool_tokens[pool_order[:slot]].sum())
    partial_sequences = remainder - (int(ends[slot - 1]) if slot else 0)
    if partial_sequences:
        rows = order.pools.rows(int(pool_order[slot]), epochs)
        served_tokens += int(rows.lengths[: int(rows.pointers[partial_sequences])].sum())
    return served_tokens


def _forecast_source(run: _RunSchedule, number: int) -> SourceForecast:
    plan = run.plan
    orders = run.orders
    name = run.plan.names[number]
    first = next(era for era, numbers in enumerate(orders.weighted_sources_by_era) if number in numbers)
    order = orders.order(number, first)
    measure = run.measures[first, number]
    store = plan.stores[name]
    served = sum(run.count_sequences(number).values())
    tokens = run.tokens[number]
    part = run.compute_share(number)
    weight, effective = _compute_initial_shares(run, number)
    exhausted_position = run.served.exhausted.get(number)
    size = store.dtype.itemsize if isinstance(store, Store) else _DEFAULT_TOKEN_BYTES
    return SourceForecast(
        name=name,
        assumed=isinstance(store, AssumedStore),
        documents=order.pools.served_documents,
        tokens=store.tokens,
        sequences_per_epoch=order.counts.sequences,
        sequences=served,
        epochs=sum(
            count / orders.order(number, era).counts.sequences for era, count in run.count_sequences(number).items()
        ),
        tokens_served=tokens,
        split=round(measure.split),
        dropped=round(measure.dropped),
        lost=round(measure.dropped_tokens),
        weight=weight,
        effective=effective,
        error=effective / weight - 1 if weight and effective is not None else None,
        share=tokens / max(sum(run.tokens.values()), 1),
        through=run.find_full_pass_step(number),
        exhausted=None
        if exhausted_position is None or exhausted_position >= run.end
        else plan.steps_until(exhausted_position),
        bytes=tokens * size,
        mixing=_measure_mixing(order, plan.spec.global_batch_size * part, part) if part else None,
    )


def _list_effective_shares(run: _RunSchedule) -> tuple[EffectiveShares, ...]:
    """List the shares of a mixture's sources at each change."""
    plan = run.plan
    return tuple(
        EffectiveShares(
            plan.steps_until(segment.position),
            {
                plan.names[number]: count / segment.schedule.period
                for number, count in zip(segment.sources.tolist(), segment.schedule.counts, strict=True)
            },
        )
        for segment, _ in run.served.segments
    )


def _compute_initial_shares(run: _RunSchedule, number: int) -> tuple[float | None, float | None]:
    """Return weight and effective share at the start, in the unit of the mixture."""
    plan = run.plan
    orders = run.orders
    if plan.mixture is None:
        return None, None
    weights = orders.shares.compute(plan.segments[0].weights)
    if not run.served.segments:
        return weights.get(plan.names[number], 0.0), None
    segment, _ = run.served.segments[0]
    sequences_per_period = dict(zip(segment.sources.tolist(), segment.schedule.counts, strict=True))
    amounts = {}
    for source_number, count in sequences_per_period.items():
        order = orders.order(source_number, segment.era)
        measure = run.measures[segment.era, source_number]
        amounts_per_sequence = {
            "tokens": measure.tokens / order.counts.sequences,
            "documents": order.pools.served_documents / order.counts.sequences,
            "epochs": 1 / order.counts.sequences,
        }
        amounts[source_number] = count * amounts_per_sequence[plan.mixture.unit]
    total = sum(amounts.values())
    return weights.get(plan.names[number], 0.0), amounts.get(number, 0.0) / total
