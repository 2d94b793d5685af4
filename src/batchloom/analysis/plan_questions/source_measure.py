"""What is known of a source without serving it: sequences, tokens, splits and mixing, of all pools or of a sample."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import compute_min_sequences, count_sequences
from batchloom.plan.order import SourceOrder
from batchloom.plan.packing import Rows, align_lengths

Ints = NDArray[np.int64]

# Pools of more sequences are not looked into: documents far longer than a sequence would take gigabytes.
_LARGE_POOL = 1 << 22


@dataclass(frozen=True, slots=True)
class SourceEpochStatistics:
    """One epoch of a source, from all of its pools or from a sample of them.

    Attributes:
        exact: whether every pool was packed.
        tokens: of an epoch, without what is left out.
        least: sequences that no packing of these documents could do with less of.
        split: documents that are cut, of those that are served.
        dropped: documents that are left out as too long.
        dropped_tokens: tokens that are left out.
        pool_tokens: tokens of each pool, int64 [pools]; None of a sample, or where pools are too large to look into.
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
    """How well neighbours of the store are mixed, measured in sampled pools.

    Attributes:
        block: neighbouring documents that go to the same pool.
        pool: documents that are mixed with one another.
        apart: positions of the run between a document and the next one of the store, in the mean.
        documents: documents in a step.
        blocks: blocks of neighbours they are of.
    """

    block: int
    pool: int
    apart: float
    documents: float
    blocks: float


def measure_pools(order: SourceOrder, most: int) -> SourceEpochStatistics:
    """Pack the pools of a source, or ``most`` of them spread over all, and let it know the number of sequences.

    Of a sample, the pools that were not packed count as the mean of those that were: the source then answers
    every question about positions, about right, and serves nothing.
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
        # Every token is served: a ratio of tokens is nearer than one of documents.
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
    """Let a source know the sequences of its pools; ``total`` is what they come to where not all were packed."""
    if order.is_counted:
        return
    counts = order.counts.copy()
    if total is None:
        counts[sampled_pools] = sequences
    else:
        # The mean is no whole number: every pool has the part of it that is due.
        ends = np.rint(np.arange(1, len(counts) + 1) * (total / len(counts))).astype(np.int64)
        counts = np.where(counts < 0, np.diff(ends, prepend=0), counts)
    order.adopt(counts)


def _count_cut_documents(lengths: Ints, seq_len: int, packing: str) -> int:
    """How many documents have tokens in several sequences."""
    if packing != "wrap":
        return int((lengths > seq_len).sum())
    ends = np.cumsum(lengths)
    return int(((ends - lengths) // seq_len < (ends - 1) // seq_len)[lengths > 0].sum())


def measure_mixing(order: SourceOrder, step_rows: float, share: float) -> MixingMeasure:
    """Measure in one pool how far apart neighbours come, and what a step is drawn from.

    Args:
        order: the source.
        step_rows: its sequences of a step.
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
    # More sequences than a pool has come from further pools like it.
    more = step_rows / size
    # Single documents come anywhere in an epoch, so that two are a third of it apart, in the mean.
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
    """What pools of so many sequences that nearly all hold a piece of one document come to."""
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
    """Rows between a document and the next of its block (0: of the store), both in one pool, in the mean."""
    numbers = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    order = np.argsort(rows.documents, kind="stable")
    documents, at = rows.documents[order], numbers[order]
    near = documents[1:] == documents[:-1] + 1
    if block:
        near &= documents[1:] // block == documents[:-1] // block
    gaps = np.abs(at[1:] - at[:-1])[near]
    return float(gaps.mean()) if gaps.size else 0.0
