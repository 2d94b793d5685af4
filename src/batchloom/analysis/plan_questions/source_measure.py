"""Statistics of a source without serving it, from all pools or a sample."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import compute_min_sequences, count_sequences
from batchloom.plan.order import SourceOrder
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows, align_lengths

Ints = NDArray[np.int64]

# Pools of more sequences are not expanded: documents far longer than a sequence would take gigabytes.
_LARGE_POOL = 1 << 22


@dataclass(frozen=True, slots=True)
class SourceEpochStatistics:
    """Statistics of one epoch of a source, from all of its pools or from a sample.

    Attributes:
        exact: whether every pool was packed.
        tokens: tokens of an epoch, without those left out.
        least: lower bound on the number of sequences.
        split: number of served documents that are cut.
        dropped: number of documents left out as too long.
        dropped_tokens: number of tokens left out.
        pool_tokens: tokens of each pool, int64 [pools]; None for a sample, or if pools are too large to expand.
    """

    exact: bool
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


def measure_pools(order: SourceOrder, most: int) -> SourceEpochStatistics:
    """Pack the pools of a source, or ``most`` of them evenly spaced; adopt the counts.

    In a sample, each pool that was not packed counts as the mean of the packed ones. The source then
    answers every question about positions approximately, and cannot serve sequences.
    """
    pools, spec = order.pools, order.spec
    sampled_pools = np.unique(np.linspace(0, pools.count - 1, min(most, pools.count)).astype(np.int64))
    sequences, tokens = (
        np.zeros(len(sampled_pools), np.int64),
        np.zeros(len(sampled_pools), np.int64),
    )
    documents = split = dropped = dropped_tokens = 0
    packed: list[Ints] = []
    for index, pool in enumerate(sampled_pools.tolist()):
        members = pools.members(pool)
        fitted = pools.fit_pool(pool)
        aligned_lengths = align_lengths(fitted, spec.align)
        sequence_count = int(order.counts[pool])
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
        packed.append(aligned_lengths)
    exact = len(sampled_pools) == pools.count
    scale = pools.documents / max(documents, 1)
    if spec.overlong == "split" and tokens.any():
        # Every token is served, so scaling by tokens is more accurate than scaling by documents.
        scale = order.store.tokens / int(tokens.sum())
    total = float(tokens.sum() * scale)
    least = float(compute_min_sequences(np.concatenate(packed), spec.seq_len)) if packed else 0.0
    _adopt_sequence_counts(order, sampled_pools, sequences, None if exact else float(sequences.sum() * scale))
    return SourceEpochStatistics(
        exact=exact,
        tokens=total,
        least=least * scale,
        split=split * scale,
        dropped=dropped * scale,
        dropped_tokens=dropped_tokens * scale,
        pool_tokens=tokens if exact and sequences.max(initial=0) <= _LARGE_POOL else None,
    )


def _adopt_sequence_counts(order: SourceOrder, sampled_pools: Ints, sequences: Ints, total: float | None) -> None:
    """Adopt the sequence counts of the pools.

    ``total`` is the estimated sum if not all pools were packed; otherwise None.
    """
    if order.is_counted:
        return
    counts = order.counts.copy()
    if total is None:
        counts[sampled_pools] = sequences
    else:
        # The mean is not an integer, so the counts are rounded such that they sum to the total.
        ends = np.rint(np.arange(1, len(counts) + 1) * (total / len(counts))).astype(np.int64)
        counts = np.where(counts < 0, np.diff(ends, prepend=0), counts)
    order.adopt(counts)


def _count_cut_documents(lengths: Ints, seq_len: int, packing: str) -> int:
    """Count the documents with tokens in several sequences."""
    if packing not in CUTTING_STRATEGIES:
        return int((lengths > seq_len).sum())
    ends = np.cumsum(lengths)
    return int(((ends - lengths) // seq_len < (ends - 1) // seq_len)[lengths > 0].sum())


def measure_mixing(order: SourceOrder, step_rows: float, share: float) -> MixingMeasure:
    """Measure in one pool the distance of neighbors and the composition of a step.

    Args:
        order: the source.
        step_rows: its sequences per step.
        share: its share of the sequences while it is served.
    """
    pools, spec = order.pools, order.spec
    block = pools.blocks[0]
    pool = pools.count // 2
    if order.counts[pool] > _LARGE_POOL:
        return _measure_large_pools(order, int(order.counts[pool]), step_rows, share)
    rows = pools.rows(pool, 0)
    size = min(max(round(step_rows), 1), max(len(rows), 1))
    first = (len(rows) - size) // 2
    a, b = int(rows.pointers[first]), int(rows.pointers[first + size])
    step_documents = np.unique(rows.documents[a:b])
    # If a step takes more sequences than a pool has, the others come from similar pools.
    more = step_rows / size
    # Single documents are anywhere in an epoch, so the mean distance of two is a third of it.
    alone = spec.shuffle and block == 1
    apart = order.sequences / 3 if alone else _mean_row_distance(rows, block if spec.shuffle else 0)
    return MixingMeasure(
        block=block if spec.shuffle else pools.documents,
        pool=min(spec.pool_size, pools.documents),
        apart=apart / share,
        documents=len(step_documents) * more,
        blocks=len(np.unique(step_documents // block)) * more,
    )


def _measure_large_pools(order: SourceOrder, sequences: int, step_rows: float, share: float) -> MixingMeasure:
    """Estimate the measures of pools whose sequences mostly hold one document each."""
    pools, spec = order.pools, order.spec
    block, pool = pools.blocks[0], min(spec.pool_size, pools.documents)
    if not spec.shuffle:
        step_documents = max(step_rows * pool / sequences, 1.0)
        return MixingMeasure(
            block=pools.documents,
            pool=pool,
            apart=1 / share,
            documents=step_documents,
            blocks=step_documents,
        )

    def distinct(population: float) -> float:
        return population * -math.expm1(-step_rows / population)

    return MixingMeasure(
        block=block,
        pool=pool,
        apart=(order.sequences if block == 1 else sequences) / 3 / share,
        documents=distinct(pool),
        blocks=distinct(max(pool / block, 1)),
    )


def _mean_row_distance(rows: Rows, block: int) -> float:
    """Return the mean distance in rows between a document and the next of its block.

    Both must be in the pool. Block 0 means the complete store.
    """
    numbers = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    order = np.argsort(rows.documents, kind="stable")
    documents, at = rows.documents[order], numbers[order]
    near = documents[1:] == documents[:-1] + 1
    if block:
        near &= documents[1:] // block == documents[:-1] // block
    gaps = np.abs(at[1:] - at[:-1])[near]
    return float(gaps.mean()) if gaps.size else 0.0
