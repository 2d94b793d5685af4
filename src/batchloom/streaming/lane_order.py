"""The order of a stream, in lanes.

The input is cut into ranges of neighbouring documents, which are distributed over K lanes. Each lane reads its
ranges one after the other, packs its next documents into a pool, and starts its next epoch at the end of its
ranges. Position p of the run belongs to lane p mod K, and is its sequence p div K (docs/reference/order.md, 8).
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.core.wording import format_count
from batchloom.plan import Permutation, PlanSpec
from batchloom.plan.order import SOURCE, check_rank, format_near_divisors, list_divisors
from batchloom.plan.packing import Rows, fit_lengths, pack_rows

# Increment this number whenever the order of any stream changes.
LANES_VERSION = 1
# Documents of a pool. It is smaller than a plan's, because each lane has one or two pools in memory.
LANE_POOL_SIZE = 8192
# Pool size for documents with media, whose bytes may have to be cached until their batch is built.
_MEDIA_POOL_SIZE = 1024
# Size of a lane's first pool, so that the first step waits for few documents. Each following pool is twice as
# large.
FIRST_POOL = 128
MAX_DEFAULT_LANES = 64


def choose_lane_pool_size(*, media: bool) -> int:
    """Return the default number of documents of a pool."""
    return _MEDIA_POOL_SIZE if media else LANE_POOL_SIZE


def choose_default_lanes(global_batch_size: int, range_count: int) -> int:
    """Return gcd(batch, 64), halved until each lane has a document range."""
    lanes = gcd(global_batch_size, MAX_DEFAULT_LANES)
    while lanes > max(range_count, 1):
        lanes //= 2
    return lanes


def check_lanes(lanes: int, global_batch_size: int) -> None:
    """Refuse a number of lanes that does not divide the batch."""
    if global_batch_size % lanes:
        raise PlanError(
            f"lanes {lanes} does not divide global_batch_size {global_batch_size}: every step takes the same number "
            f"of sequences from each lane. Lanes that fit: {format_near_divisors(global_batch_size, lanes)}."
        )


def check_lane_world(lanes: int, rank: int, world_size: int) -> None:
    """Refuse a world size that does not divide the lanes."""
    check_rank(rank, world_size)
    if lanes % world_size:
        fitting_sizes = ", ".join(map(str, list_divisors(lanes)))
        raise PlanError(
            f"{format_count(lanes, 'lane')} cannot be divided evenly among {world_size} ranks. World sizes that fit: "
            f"{fitting_sizes}. Lanes are part of a stream's order: for this world size, start the stream with lanes= "
            f"a multiple of {world_size}."
        )


def list_rank_lanes(lanes: int, rank: int, world_size: int) -> range:
    """Return the lanes of a rank, in the order its rows of a step alternate."""
    return range(rank, lanes, world_size)


def derive_lane_key(spec: PlanSpec, purpose: str, lane: int, epoch: int = -1, pool: int = -1) -> HashKey:
    return derive_key(spec.seed, SOURCE, f"lane {purpose}", epoch, pool, lane)


def order_lane_ranges(range_count: int, lanes: int, spec: PlanSpec, lane: int, epoch: int) -> NDArray[np.int64]:
    """Return the document ranges that a lane reads in an epoch, int64 [N].

    The assignment to lanes depends on the seed alone; each epoch has its own order.
    """
    lane_ranges = np.arange(lane, range_count, lanes)
    if not spec.shuffle:
        return lane_ranges
    permuted = Permutation(range_count, derive_key(spec.seed, SOURCE, "stretches", -1, -1)).at(lane_ranges)
    return permuted[shuffle_range(len(permuted), derive_lane_key(spec, "order", lane, epoch))]


def compute_lane_pool_size(spec: PlanSpec, epoch: int, pool: int) -> int:
    """Return the maximum number of documents of a lane's pool."""
    if epoch or pool >= spec.pool_size.bit_length():
        return spec.pool_size
    return min(spec.pool_size, FIRST_POOL << pool)


def pack_lane_pool(lengths: NDArray[np.uint32], spec: PlanSpec, lane: int, epoch: int, pool: int) -> Rows:
    """Return the rows of a pool in serving order; documents are numbered from 0.

    Args:
        lengths: tokens of its documents in the order they were read, uint32 [N].
        spec: spec of the order.
        lane: lane of the pool.
        epoch: epoch of the lane.
        pool: number of the pool in the epoch, from 0.
    """
    longest = int(lengths.max(initial=0))
    if spec.overlong == "error" and longest > spec.seq_len:
        raise PlanError(
            f"Lane {lane} has a document of {longest} tokens, more than seq_len {spec.seq_len}, and overlong='error' "
            "is set. Raise seq_len, or choose overlong='drop', or (not for documents with images or audio) 'split' "
            "or 'truncate'."
        )
    members = np.arange(len(lengths))
    if spec.shuffle:
        members = shuffle_range(len(lengths), derive_lane_key(spec, "members", lane, epoch, pool))
    keys = (derive_lane_key(spec, "spans", lane, epoch, pool), derive_lane_key(spec, "sequences", lane, epoch, pool))
    return pack_rows(members, np.zeros_like(members), fit_lengths(lengths, spec)[members], spec, keys)


def make_no_sequence_error(lane: int, lanes: int, why: str, remedy: str) -> PlanError:
    """Return the error for a lane that has read all of its input without a sequence."""
    if lanes == 1:
        return PlanError(f"There is no sequence: {why}. {remedy}.")
    fewer = next(lanes // n for n in range(2, lanes + 1) if lanes % n == 0)
    return PlanError(
        f"Lane {lane} of {lanes} has no sequence: {why}. {remedy}; or, if other parts of the input have more, give "
        f"fewer lanes (lanes={fewer})."
    )


def describe_all_too_long(documents: int, shortest: int, spec: PlanSpec) -> tuple[str, str]:
    """Return the reason why documents give no sequence, and a remedy."""
    longer = f"are longer than seq_len {spec.seq_len} (the shortest has {shortest:,} tokens)"
    return (
        f"all {documents:,} documents {longer}, and overlong='drop' leaves them out",
        "Raise seq_len, or cut them (overlong='split'; documents with images or audio are never cut)",
    )
