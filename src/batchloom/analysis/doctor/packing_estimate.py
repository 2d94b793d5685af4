"""Estimate of how full training sequences are, from document lengths."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import compute_min_sequences, count_sequences
from batchloom.plan.packing import POOL_SIZE

_DEFAULT_PACKING = "best_fit"


@dataclass(frozen=True, slots=True)
class PackingFacts:
    """Packing at one ``seq_len`` with the plan's packer.

    Attributes:
        seq_len: tokens of a sequence.
        packing: the packing strategy.
        fill: tokens / (sequences x seq_len), 0 to 1.
        bound: upper bound of ``fill`` over all packings of these documents, 0 to 1.
        sequences: sequences of an epoch.
        steps: steps of an epoch; None without a global batch size.
        global_batch_size: sequences of a step; None if it was not given.
        longer: documents longer than ``seq_len``, which a loader cuts, or drops (not counted here then).
    """

    seq_len: int
    packing: str
    fill: float
    bound: float
    sequences: int
    steps: int | None
    global_batch_size: int | None
    longer: int


def estimate_packing(
    lengths: NDArray[np.int64],
    weights: NDArray[np.float64],
    seq_len: int,
    global_batch_size: int | None = None,
    *,
    drops: bool = False,
) -> PackingFacts | None:
    """Pack documents of these lengths like a pool of the plan; None without documents.

    Args:
        lengths: tokens of a document, ascending [N].
        weights: number of documents of each length [N].
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step, over all ranks.
        drops: whether documents longer than ``seq_len`` are dropped; otherwise they are cut.
    """
    if not round(float(weights.sum())) or not (lengths * weights).sum():
        return None
    longer = round(float(weights[lengths > seq_len].sum()))
    if drops:
        fits = lengths <= seq_len
        lengths, weights = lengths[fits], weights[fits]
    documents = round(float(weights.sum()))
    tokens = float((lengths * weights).sum())
    # One pool with every length in proportion represents all pools.
    size = min(documents, POOL_SIZE)
    ends = np.cumsum(weights)
    sample_positions = (np.arange(size) + 0.5) / max(size, 1) * ends[-1:]
    pool = lengths[np.minimum(np.searchsorted(ends, sample_positions, side="right"), len(lengths) - 1)]
    packed, pool_tokens = count_sequences(pool, seq_len, _DEFAULT_PACKING), int(pool.sum())
    least = compute_min_sequences(pool, seq_len)
    sequences = packed if documents <= POOL_SIZE else round(tokens * packed / max(pool_tokens, 1))
    steps = None if global_batch_size is None else -(-sequences // global_batch_size)
    return PackingFacts(
        seq_len=seq_len,
        packing=_DEFAULT_PACKING,
        fill=pool_tokens / max(packed * seq_len, 1),
        bound=min(1.0, pool_tokens / max(least * seq_len, 1)),
        sequences=sequences,
        steps=steps,
        global_batch_size=global_batch_size,
        longer=longer,
    )
