"""What a run would need with the data prepared, and with the data streamed: docs/map-or-stream.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchloom.analysis.doctor.findings import Examination, SourceFacts
from batchloom.analysis.doctor.packing_estimate import PackingFacts
from batchloom.plan import lane_pool_default
from batchloom.plan.order import FIRST_POOL, default_lanes
from batchloom.plan.packing import POOL_SIZE
from batchloom.store.format import UINT16_IDS

# Where nobody says how large a step is.
_USUAL_BATCH = 64
# Read at once, and the smallest stretch of an input.
_CHUNK_BYTES, _STRETCH_BYTES = 512 << 10, 1 << 10
# Of a worker that tokenizes, as measured; of a plan's row of a span, and the pools it keeps.
_WORKER_BYTES, _SPAN_BYTES, _KEPT_POOLS = 160 << 20, 48, 4
# Batches that wait, and those in the making: three arrays of 8 bytes a token.
_BATCHES, _TOKEN_BYTES = 6, 24
_READY_SECONDS = 2.0
# What no loader reads.
_PREFERENCES = ("pairs", "text-pairs", "labels")


@dataclass(frozen=True, slots=True)
class WayFacts:
    """What one way of feeding a run needs, on one rank that has all of the batch; about.

    Attributes:
        way: ``prepare`` or ``stream``.
        start_seconds: until the first batch; of ``prepare`` with all of the preparation, on one core.
        memory_bytes: of the loader, beside the interpreter and its libraries.
        disk_bytes: that are written.
        lanes: of a stream; None of a store.
        steps: of an epoch, known before the run; None of a stream, which must be given its steps.
    """

    way: Literal["prepare", "stream"]
    start_seconds: float
    memory_bytes: int
    disk_bytes: int
    lanes: int | None
    steps: int | None


# A kind of source that is read from its beginning to its end.
_WHOLE = "webdataset"


def way_facts(found: Examination, packing: PackingFacts | None) -> tuple[WayFacts, ...]:
    """Both ways; none where it is not known what the input would become.

    Args:
        found: what was seen of the input.
        packing: of its documents.
    """
    documents = sum(one.documents for one in found.sources)
    tokens = sum(one.total_tokens or 0 for one in found.sources)
    ready = found.tokenizer is not None and found.seconds is not None
    if not ready or packing is None or not documents or not found.bytes:
        return ()
    if found.faults or any(one.way in _PREFERENCES for one in found.sources):
        return ()
    seconds, size = found.seconds or 0.0, found.store_bytes or 0
    batch = packing.global_batch_size or _USUAL_BATCH
    batches = _BATCHES * batch * packing.seq_len * _TOKEN_BYTES
    pools = _KEPT_POOLS * min(documents, POOL_SIZE) * _SPAN_BYTES
    lanes = default_lanes(batch, _stretches(found.sources))
    share = documents / lanes
    vocabulary = found.tokenizer.vocab_size if found.tokenizer else 0
    width = 2 if vocabulary < UINT16_IDS else 4
    pool = lane_pool_default(media=found.holds_media)
    held = 2 * lanes * min(share, pool) * tokens / documents * width
    aside = min(found.held_bytes, 2 * lanes * pool * found.held_bytes / documents)
    first = max(min(share, FIRST_POOL) * found.bytes / documents, _CHUNK_BYTES)
    begin = min(lanes * first, found.bytes) / found.bytes * seconds
    return (
        WayFacts("prepare", seconds, pools + batches, size, None, packing.steps),
        WayFacts(
            *("stream", _READY_SECONDS + begin, round(held) + batches + _WORKER_BYTES),
            *(round(aside), lanes, None),
        ),
    )


def _stretches(sources: Sequence[SourceFacts]) -> int:
    """About how many stretches lanes can be dealt; a packed file, or a tar of samples, is one."""
    return sum(
        one.files
        if one.compression or one.format == _WHOLE
        else max(one.files, one.bytes // _STRETCH_BYTES)
        for one in sources
    )
