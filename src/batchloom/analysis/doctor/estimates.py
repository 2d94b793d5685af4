"""Estimates of a run from document lengths: packing, and resources of both feeds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.examination import ExaminationResult
from batchloom.analysis.doctor.findings import FeedEstimate, PackingFacts, SourceFacts
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
# Format whose files are read sequentially, so that they cannot be split.
_SEQUENTIAL_KIND = "webdataset"
# Record kinds that no loader reads.
_PREFERENCE_KINDS = ("pairs", "text-pairs", "labels")


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


def estimate_feeds(examination: ExaminationResult, packing: PackingFacts | None) -> tuple[FeedEstimate, ...]:
    """Estimate both ways; empty if the resulting documents are unknown."""
    found = examination.diagnosis
    documents, tokens = found.documents, found.tokens or 0
    if found.tokenizer is None or found.seconds is None or packing is None or not documents or not found.bytes:
        return ()
    if found.faults or any(source.way in _PREFERENCE_KINDS for source in found.sources):
        return ()
    batch = packing.global_batch_size or _DEFAULT_BATCH_SIZE
    batch_bytes = _PREFETCHED_BATCHES * batch * packing.seq_len * _TOKEN_BYTES
    plan_bytes = _CACHED_POOLS * min(documents, POOL_SIZE) * _SPAN_BYTES
    lanes = choose_default_lanes(batch, _estimate_record_ranges(found.sources))
    lane_documents = documents / lanes
    id_bytes = 2 if found.tokenizer.vocab_size < UINT16_IDS else 4
    pool = choose_lane_pool_size(media=any(source.media for source in found.sources))
    pool_bytes = 2 * lanes * min(lane_documents, pool) * tokens / documents * id_bytes
    media_disk_bytes = min(examination.held_bytes, 2 * lanes * pool * examination.held_bytes / documents)
    first_pool_bytes = max(min(lane_documents, FIRST_POOL) * found.bytes / documents, _CHUNK_BYTES)
    first_pool_seconds = min(lanes * first_pool_bytes, found.bytes) / found.bytes * found.seconds
    return (
        FeedEstimate(
            way="prepare",
            start_seconds=found.seconds,
            memory_bytes=plan_bytes + batch_bytes,
            disk_bytes=found.store_bytes or 0,
            lanes=None,
            steps=packing.steps,
        ),
        FeedEstimate(
            way="stream",
            start_seconds=_READY_SECONDS + first_pool_seconds,
            memory_bytes=round(pool_bytes) + batch_bytes + _WORKER_BYTES,
            disk_bytes=round(media_disk_bytes),
            lanes=lanes,
            steps=None,
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
