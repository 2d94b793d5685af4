"""Estimates of a run from document lengths: packing, and resources of both feeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.findings import ExaminationResult, SourceFacts
from batchloom.plan import choose_lane_pool_size, compute_min_sequences, count_sequences
from batchloom.plan.order import FIRST_POOL, choose_default_lanes
from batchloom.plan.packing import POOL_SIZE
from batchloom.store.format import UINT16_IDS

_DEFAULT_PACKING = "best_fit"

# Used if no global batch size is given.
_DEFAULT_BATCH_SIZE = 64
# Bytes per read, and the smallest byte range of an input that is read separately.
_CHUNK_BYTES, _MIN_RANGE_BYTES = 512 << 10, 1 << 10
# Measured bytes of a tokenizing worker; bytes of a span in a plan, and the number of pools a plan caches.
_WORKER_BYTES, _SPAN_BYTES, _CACHED_POOLS = 160 << 20, 48, 4
# Batches that are queued or being built: three arrays of 8 bytes per token.
_PREFETCHED_BATCHES, _TOKEN_BYTES = 6, 24
_READY_SECONDS = 2.0
# Record kinds that no loader reads.
_PREFERENCE_KINDS = ("pairs", "text-pairs", "labels")


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


@dataclass(frozen=True, slots=True)
class FeedEstimate:
    """Estimated resources of one way to feed a run, on a rank with the full batch.

    Attributes:
        way: ``prepare`` or ``stream``.
        start_seconds: seconds until the first batch; for ``prepare`` including the preparation, on one core.
        memory_bytes: memory of the loader, without the interpreter and its libraries.
        disk_bytes: bytes written to disk.
        lanes: lanes of a stream; None for a store.
        steps: steps of an epoch; None for a stream, whose number of steps must be given.
    """

    way: Literal["prepare", "stream"]
    start_seconds: float
    memory_bytes: int
    disk_bytes: int
    lanes: int | None
    steps: int | None


# Format whose files are read sequentially, so that they cannot be split.
_SEQUENTIAL_KIND = "webdataset"


def estimate_feeds(examination: ExaminationResult, packing: PackingFacts | None) -> tuple[FeedEstimate, ...]:
    """Estimate both ways; empty if the resulting documents are unknown."""
    documents = sum(source.documents for source in examination.sources)
    tokens = sum(source.total_tokens or 0 for source in examination.sources)
    ready = examination.tokenizer is not None and examination.seconds is not None
    if not ready or packing is None or not documents or not examination.bytes:
        return ()
    if examination.faults or any(source.way in _PREFERENCE_KINDS for source in examination.sources):
        return ()
    seconds, size = examination.seconds or 0.0, examination.store_bytes or 0
    batch = packing.global_batch_size or _DEFAULT_BATCH_SIZE
    batches = _PREFETCHED_BATCHES * batch * packing.seq_len * _TOKEN_BYTES
    pools = _CACHED_POOLS * min(documents, POOL_SIZE) * _SPAN_BYTES
    lanes = choose_default_lanes(batch, _estimate_record_ranges(examination.sources))
    share = documents / lanes
    vocabulary = examination.tokenizer.vocab_size if examination.tokenizer else 0
    width = 2 if vocabulary < UINT16_IDS else 4
    pool = choose_lane_pool_size(media=examination.holds_media)
    pool_bytes = 2 * lanes * min(share, pool) * tokens / documents * width
    media_disk_bytes = min(examination.held_bytes, 2 * lanes * pool * examination.held_bytes / documents)
    first = max(min(share, FIRST_POOL) * examination.bytes / documents, _CHUNK_BYTES)
    begin = min(lanes * first, examination.bytes) / examination.bytes * seconds
    return (
        FeedEstimate("prepare", seconds, pools + batches, size, None, packing.steps),
        FeedEstimate(
            *("stream", _READY_SECONDS + begin, round(pool_bytes) + batches + _WORKER_BYTES),
            *(round(media_disk_bytes), lanes, None),
        ),
    )


def _estimate_record_ranges(sources: Sequence[SourceFacts]) -> int:
    """Estimate the number of record ranges to distribute over lanes.

    A compressed file or a tar of samples is one range.
    """
    return sum(
        source.files
        if source.compression or source.format == _SEQUENTIAL_KIND
        else max(source.files, source.bytes // _MIN_RANGE_BYTES)
        for source in sources
    )
