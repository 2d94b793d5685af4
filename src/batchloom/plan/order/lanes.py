"""Lanes: the order of a stream, and of a plan that repeats it; docs/order.md, section 8.

The input is cut into stretches of neighbouring documents. They are dealt to K lanes; each lane reads
its stretches one after the other, packs its next documents into a pool, and begins anew when it has
come to their end. Position p of the run belongs to lane p mod K, and is its sequence p div K.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.plan.packing import Permutation, PlanSpec, Rows, fit_lengths, pack_rows

# Changes whenever the order of any stream would.
LANES_VERSION = 1
# Documents of a pool; smaller than a plan's, since every lane holds one or two in memory.
LANE_POOL_SIZE = 8192
# Of documents with media, whose bytes may have to be laid aside until their batch is made.
_MEDIA_POOL_SIZE = 1024
# The first pool of a lane, so that the first step waits for few documents; each next one is twice as large.
FIRST_POOL = 128
MAX_DEFAULT_LANES = 64
_SOURCE_NAME = "data"


def choose_lane_pool_size(*, media: bool) -> int:
    """Documents of a pool where nobody says how many."""
    return _MEDIA_POOL_SIZE if media else LANE_POOL_SIZE


def choose_default_lanes(global_batch_size: int, range_count: int) -> int:
    """The greatest common divisor of the batch and 64, halved until every lane has a stretch."""
    lanes = gcd(global_batch_size, MAX_DEFAULT_LANES)
    while lanes > max(range_count, 1):
        lanes //= 2
    return lanes


def check_lanes(lanes: int, global_batch_size: int) -> None:
    """Refuse lanes that steps cannot be dealt to.

    Raises:
        PlanError: names numbers of lanes that fit.
    """
    if global_batch_size % lanes:
        fitting_lanes = [str(n) for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
        nearest_lanes = sorted(sorted(fitting_lanes, key=lambda n: abs(int(n) - lanes))[:6], key=int)
        raise PlanError(
            f"lanes {lanes} do not divide global_batch_size {global_batch_size}: every step takes the same number of "
            f"sequences from each lane. Lanes that fit: {', '.join(nearest_lanes)}."
        )


def check_lane_world(lanes: int, rank: int, world_size: int) -> None:
    """Refuse a world size the lanes cannot be dealt to.

    Raises:
        PlanError: names world sizes that fit.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} of world_size {world_size} does not exist; ranks run from 0 to world_size - 1.")
    if lanes % world_size:
        fitting_sizes = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise PlanError(
            f"{lanes} lanes cannot be dealt evenly to {world_size} ranks. World sizes that fit: {fitting_sizes}. "
            "Lanes are part "
            f"of a stream's order: for another world size give lanes=, a multiple of {world_size}, when it is begun."
        )


def list_rank_lanes(lanes: int, rank: int, world_size: int) -> range:
    """The lanes of a rank, in the order in which its rows of a step take turns."""
    return range(rank, lanes, world_size)


def derive_lane_key(spec: PlanSpec, purpose: str, lane: int, epoch: int = -1, pool: int = -1) -> HashKey:
    """The key of a purpose of a lane."""
    return derive_key(spec.seed, _SOURCE_NAME, f"lane {purpose}", epoch, pool, lane)


def order_lane_ranges(range_count: int, lanes: int, spec: PlanSpec, lane: int, epoch: int) -> NDArray[np.int64]:
    """Numbers of the stretches that a lane reads in an epoch, in order, int64 [N].

    Which they are depends on the seed alone; each epoch has its own order of them.
    """
    lane_ranges = np.arange(lane, range_count, lanes)
    if not spec.shuffle:
        return lane_ranges
    permuted = Permutation(range_count, derive_key(spec.seed, _SOURCE_NAME, "stretches", -1, -1)).at(lane_ranges)
    return permuted[shuffle_range(len(permuted), derive_lane_key(spec, "order", lane, epoch))]


def compute_lane_pool_size(spec: PlanSpec, epoch: int, pool: int) -> int:
    """Documents of a pool of a lane, where it has so many left in its epoch."""
    if epoch or pool >= spec.pool_size.bit_length():
        return spec.pool_size
    return min(spec.pool_size, FIRST_POOL << pool)


def compute_lane_pool_start(spec: PlanSpec, epoch: int, pool: int) -> int:
    """Documents of a lane in an epoch before a pool."""
    growing_pools = spec.pool_size.bit_length() if epoch == 0 else 0
    pool_sizes = [compute_lane_pool_size(spec, epoch, pool_number) for pool_number in range(min(pool, growing_pools))]
    return sum(pool_sizes) + max(pool - growing_pools, 0) * spec.pool_size


def pack_lane_pool(lengths: NDArray[np.uint32], spec: PlanSpec, lane: int, epoch: int, pool: int) -> Rows:
    """The rows of a pool in the order of its sequences; its documents are numbered from 0.

    Args:
        lengths: of its documents in the order they were read, uint32 [N].
        spec: of the order.
        lane: of the pool.
        epoch: of the lane.
        pool: its number in the epoch, from 0.

    Raises:
        PlanError: a document is longer than ``seq_len``, with ``overlong="error"``.
    """
    longest = int(lengths.max(initial=0))
    if spec.overlong == "error" and longest > spec.seq_len:
        raise PlanError(
            f"Lane {lane} has a document of {longest} tokens, more than seq_len {spec.seq_len}, and overlong='error' "
            "was asked for. Raise seq_len, or choose overlong='drop', or (not for documents with images or audio) "
            "'split' or 'truncate'."
        )
    members = np.arange(len(lengths))
    if spec.shuffle:
        members = shuffle_range(len(lengths), derive_lane_key(spec, "members", lane, epoch, pool))
    keys = (
        derive_lane_key(spec, "spans", lane, epoch, pool),
        derive_lane_key(spec, "sequences", lane, epoch, pool),
    )
    return pack_rows(members, np.zeros_like(members), fit_lengths(lengths, spec)[members], spec, keys)


def make_no_sequence_error(lane: int, lanes: int, why: str, remedy: str) -> PlanError:
    """What is said of a lane that has read all of its input and found no sequence.

    Args:
        lane: of the order.
        lanes: how many it has.
        why: what was found instead.
        remedy: what would mend it, as the beginning of a sentence.
    """
    if lanes == 1:
        return PlanError(f"There is no sequence: {why}. {remedy}.")
    fewer = next(lanes // n for n in range(2, lanes + 1) if lanes % n == 0)
    return PlanError(
        f"Lane {lane} of {lanes} has no sequence: {why}. {remedy}; or, where other parts of the input have more, give "
        f"fewer lanes (lanes={fewer})."
    )


def describe_all_too_long(documents: int, shortest: int, spec: PlanSpec) -> tuple[str, str]:
    """Why documents give no sequence, and what would mend it."""
    longer = f"are longer than seq_len {spec.seq_len} (the shortest has {shortest:,} tokens)"
    return (
        f"all {documents:,} documents {longer}, and overlong='drop' leaves them out",
        "Raise seq_len, or cut them (overlong='split'; documents with images or audio are not cut)",
    )
