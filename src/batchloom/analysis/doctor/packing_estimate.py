"""How full the sequences of a training run would be, told from the lengths of documents."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan import compute_min_sequences, count_sequences
from batchloom.plan.packing import POOL_SIZE

_DEFAULT_PACKING = "best_fit"


@dataclass(frozen=True, slots=True)
class PackingFacts:
    """Packing at one ``seq_len``, with the plan's own packer.

    Attributes:
        seq_len: tokens of a sequence.
        packing: the strategy.
        fill: tokens / (sequences x seq_len), 0 to 1.
        bound: what no packing of these documents can exceed, 0 to 1.
        sequences: of an epoch.
        steps: of an epoch; None where no global batch size was given.
        global_batch_size: sequences of a step; None where it was not given.
        longer: documents longer than ``seq_len``, which a loader cuts, or leaves out and this does not count.
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
    """Pack documents of these lengths as a pool of the plan would be; None where there are none.

    Args:
        lengths: tokens of a document, ascending [N].
        weights: how many documents have each of these lengths [N].
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step, over all ranks.
        drops: whether documents longer than ``seq_len`` are left out; else they are cut.
    """
    if not round(float(weights.sum())) or not (lengths * weights).sum():
        return None
    longer = round(float(weights[lengths > seq_len].sum()))
    if drops:
        fits = lengths <= seq_len
        lengths, weights = lengths[fits], weights[fits]
    documents = round(float(weights.sum()))
    tokens = float((lengths * weights).sum())
    # Pools are alike: one with every length in its proportion stands for all of them.
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
