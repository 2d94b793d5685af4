"""Lanes: the order of a stream, and of a plan that repeats it.

The input is cut into ranges of neighbouring documents, which are distributed over K lanes. Each lane reads its
ranges one after the other, packs its next documents into a pool, and starts its next epoch at the end of its
ranges. Position p of the run belongs to lane p mod K, and is its sequence p div K (docs/reference/order.md, 8).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import gcd
from threading import RLock
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, StateError
from batchloom.core.fingerprint import derive_key, fingerprint
from batchloom.core.keyed_hashing import HashKey, shuffle_range
from batchloom.core.wording import format_count
from batchloom.plan.mixture import PlanStore
from batchloom.plan.order.edits import Edit
from batchloom.plan.order.plan_states import check_state, describe_other_settings, wrap_state_errors
from batchloom.plan.order.rank_slices import WHOLE, RowPart, check_rank, format_near_divisors, list_divisors
from batchloom.plan.order.segments import RunLayout, Segment
from batchloom.plan.order.source_order import SourceOrder
from batchloom.plan.order.source_shares import SOURCE
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec
from batchloom.plan.packing.pools import Permutation
from batchloom.plan.packing.rows import Rows, fit_lengths, join_rows, pack_rows, reorder_rows, slice_rows

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
_MAX_CACHED_POOLS = 2


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


def compute_lane_pool_start(spec: PlanSpec, epoch: int, pool: int) -> int:
    """Return the number of a lane's documents in an epoch before a pool."""
    growing_pools = spec.pool_size.bit_length() if epoch == 0 else 0
    pool_sizes = [compute_lane_pool_size(spec, epoch, pool_number) for pool_number in range(min(pool, growing_pools))]
    return sum(pool_sizes) + max(pool - growing_pools, 0) * spec.pool_size


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


@dataclass(frozen=True, slots=True)
class _LanePoolPosition:
    """Pool of a lane, and the number of the lane's sequences before it."""

    epoch: int
    number: int
    before: int


@final
class _LaneOrder:
    """One lane: the documents of its pools and the locations of its sequences."""

    def __init__(self, orders: "LaneOrders", lane: int) -> None:
        self._orders = orders
        self.lane = lane
        self._pool_positions = [_LanePoolPosition(0, 0, 0)]
        self._entered: dict[tuple[int, int], Rows] = {}

    def begin(self, pool: _LanePoolPosition) -> None:
        """Record the location of a pool, so that later lookups start there."""
        index = bisect_right(self._pool_positions, pool.before, key=lambda one: one.before)
        if pool not in self._pool_positions[max(index - 1, 0) : index]:
            self._pool_positions.insert(index, pool)

    def documents(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the documents of a pool in reading order, as numbers in the store."""
        orders = self._orders
        spec = self._orders.spec
        order = order_lane_ranges(len(orders.bounds) - 1, spec.lanes, spec, self.lane, epoch)
        first = orders.bounds[:-1][order]
        sizes = orders.bounds[1:][order] - first
        ends = np.cumsum(sizes)
        start = compute_lane_pool_start(spec, epoch, number)
        stop = min(start + compute_lane_pool_size(spec, epoch, number), int(ends[-1]) if len(ends) else 0)
        if start >= stop:
            return np.empty(0, np.int64)
        a, b = (int(range_index) for range_index in np.searchsorted(ends, [start + 1, stop]))
        document_ranges = [
            np.arange(
                first[index] + max(start - int(ends[index] - sizes[index]), 0),
                first[index] + min(stop - int(ends[index] - sizes[index]), int(sizes[index])),
            )
            for index in range(a, b + 1)
        ]
        return np.concatenate(document_ranges)

    def rows(self, epoch: int, number: int) -> Rows | None:
        """Return the rows of a pool; None if the epoch ends before it."""
        if (epoch, number) in self._entered:
            return self._entered[epoch, number]
        documents = self.documents(epoch, number)
        if not len(documents):
            return None
        orders = self._orders
        lengths = orders.data.lengths.take(documents)
        packed_rows = pack_lane_pool(lengths, orders.spec, self.lane, epoch, number)
        rows = replace(packed_rows, documents=documents[packed_rows.documents])
        while len(self._entered) >= _MAX_CACHED_POOLS:
            del self._entered[next(iter(self._entered))]
        self._entered[epoch, number] = rows
        return rows

    def _explain_no_sequence(self, epoch: int) -> tuple[str, str]:
        documents = 0
        shortest = 0
        number = 0
        while len(pool_documents := self.documents(epoch, number)):
            least = int(self._orders.data.lengths.take(pool_documents).min())
            shortest = min(shortest, least) if documents else least
            documents += len(pool_documents)
            number += 1
        if documents:
            return describe_all_too_long(documents, shortest, self._orders.spec)
        return "the lane received no document", "Give more input"

    def locate(self, sequence: int) -> tuple[_LanePoolPosition, Rows]:
        """Return the pool that holds a sequence of the lane, and the rows of the pool."""
        index = bisect_right(self._pool_positions, sequence, key=lambda one: one.before)
        pool = self._pool_positions[index - 1]
        barren = 0
        while True:
            rows = self.rows(pool.epoch, pool.number)
            if rows is None:
                barren += 1
                if barren > 1:
                    raise make_no_sequence_error(
                        self.lane, self._orders.spec.lanes, *self._explain_no_sequence(pool.epoch)
                    )
                pool = _LanePoolPosition(pool.epoch + 1, 0, pool.before)
                continue
            if len(rows):
                barren = 0
            if sequence < pool.before + len(rows):
                self.begin(pool)
                return pool, rows
            pool = _LanePoolPosition(pool.epoch, pool.number + 1, pool.before + len(rows))


@final
class LaneOrders:
    """Lanes of a plan, in place of ``SourceOrders`` and ``RunPositions``."""

    is_counted = True

    def __init__(self, data: PlanStore, spec: PlanSpec, bounds: NDArray[np.int64]) -> None:
        self.data = data
        self.spec = spec
        self.bounds = bounds
        self.run_layout = RunLayout((Segment(0, 0, spec.global_batch_size, spec.seq_len, {SOURCE: 1.0}),))
        self.lanes = [_LaneOrder(self, lane) for lane in range(spec.lanes)]
        self.lock = RLock()

    def latest(self) -> list[SourceOrder]:
        """Return no orders, because no pools are counted."""
        return []


@final
class LanePlan:
    """Plan in lane order over one store; see :mod:`batchloom.plan.order.lane_plan`.

    Threads may share it.

    Args:
        store: any object with ``lengths`` and a ``fingerprint``.
        spec: settings of the order; ``steps`` must be given, ``block`` is ignored.
        lanes: a divisor of ``global_batch_size``.
        bounds: first document of each document range, then the number of documents, int64 [ranges + 1].

    Raises:
        PlanError: ``lanes`` does not divide the batch, ``steps`` is missing, rows are grouped by length, or the
            document ranges do not match the store.
    """

    def __init__(self, store: PlanStore, spec: PlanSpec, *, lanes: int, bounds: NDArray[np.int64]) -> None:
        check_lanes(lanes, spec.global_batch_size)
        if spec.group_by_length:
            raise make_lane_order_error("cannot be grouped by length")
        self.spec = replace(spec, lanes=lanes, pool_size=spec.pool_size or LANE_POOL_SIZE)
        self.stores = {SOURCE: store}
        self.edits = ()
        self.mixture = None
        if spec.steps is None:
            raise PlanError("A plan in the order of lanes does not take epochs. Give steps.")
        if int(bounds[-1]) != store.lengths.size or (np.diff(bounds) < 0).any():
            raise PlanError(
                f"The record ranges end at document {int(bounds[-1])} and the subset has {store.lengths.size} "
                "documents. The store was not written by a stream, or documents were appended or moved since."
            )
        # The loader asks ``orders`` and ``run`` of a plan; here one object answers both.
        self.orders = self.run = LaneOrders(store, self.spec, bounds)

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"LanePlan({format_count(spec.lanes, 'lane')}, {self.steps:,} steps of {spec.global_batch_size:,} "
            f"sequences of {spec.seq_len:,} tokens, packing {spec.packing}, seed {spec.seed})"
        )

    def __copy__(self) -> "LanePlan":
        orders = self.orders
        return LanePlan(orders.data, self.spec, lanes=self.spec.lanes, bounds=orders.bounds)

    def edited(self, *_edits: Edit) -> NoReturn:
        """Refuse edits, because the stream that this order repeats has none.

        Raises:
            PlanError: always.
        """
        raise make_lane_order_error("takes no edits")

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return int(self.spec.steps or 0)

    def has_step(self, step: int) -> bool:
        """Return whether the run has this step."""
        return 0 <= step < self.steps

    @property
    def identity(self) -> dict[str, Any]:
        """All fields that determine the order."""
        plain = {
            k: v
            for k, v in self.spec.identity_fields().items()
            if k not in ("epochs", "steps", "last", "block", "group_by_length")
        }
        return {
            "order_version": ORDER_VERSION,
            "lanes_version": LANES_VERSION,
            "spec": {**plain, "order": "lanes"},
            "sources": {
                SOURCE: {
                    "store": self.orders.data.fingerprint,
                    "documents": self.orders.data.lengths.size,
                    "stretches": fingerprint(self.orders.bounds.tolist()),
                }
            },
        }

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the order, 32 hex digits."""
        return fingerprint(self.identity)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The only segment of the run."""
        return self.orders.run_layout.segments

    def step_at(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and its row."""
        return divmod(position, self.spec.global_batch_size)

    def spec_at(self, _step: int) -> PlanSpec:
        """Return the settings at a step."""
        return self.spec

    def positions_of(self, step: int) -> tuple[int, int]:
        """Return the first and last + 1 position of a step."""
        size = self.spec.global_batch_size
        return step * size, (step + 1) * size

    def rows(self, start: int, stop: int, part: RowPart = WHOLE) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``, or of a part of them."""
        with self.orders.lock:
            return self._rows(part.list_positions(start, stop))

    def _rows(self, positions: NDArray[np.int64]) -> Rows:
        row_slices = []
        indices_by_lane = []
        for lane in np.unique(positions % self.spec.lanes).tolist():
            lane_indices = np.flatnonzero(positions % self.spec.lanes == lane)
            sequence, last = (int(positions[index]) // self.spec.lanes for index in (lane_indices[0], lane_indices[-1]))
            while sequence <= last:
                pool, rows = self.orders.lanes[lane].locate(sequence)
                end = min(pool.before + len(rows), last + 1)
                row_slices.append(slice_rows(rows, sequence - pool.before, end - pool.before))
                sequence = end
            indices_by_lane.append(lane_indices)
        joined_rows = join_rows(row_slices, len(positions))
        return reorder_rows(joined_rows, np.argsort(np.concatenate(indices_by_lane or [np.empty(0, np.int64)])))

    def epochs(self, position: int) -> dict[str, float]:
        """Return the completed passes of lane 0 before a position."""
        with self.orders.lock:
            pool, _ = self.orders.lanes[0].locate(-(-position // self.spec.lanes))
        return {SOURCE: float(pool.epoch)}

    def state(self, position: int) -> dict[str, Any]:
        """Return a position as plain JSON values, with a cursor for each lane.

        The cursors make resuming immediate.
        """
        cursors = {}
        with self.orders.lock:
            for lane in self.orders.lanes:
                pool, _ = lane.locate(-(-(position - lane.lane) // self.spec.lanes))
                cursors[str(lane.lane)] = [pool.epoch, pool.number, pool.before]
        plain = {
            "order_version": ORDER_VERSION,
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "position": position,
            "lanes": cursors,
        }
        return {**plain, "check": fingerprint(plain)}

    def resume(self, state: dict[str, Any]) -> int:
        """Check a state against this plan and return the position to resume at.

        Raises:
            StateError: not a state, changed after it was saved, or of another plan (names each field that
                differs).
        """
        with wrap_state_errors():
            state_identity = state["identity"]
            state_fingerprint = state["fingerprint"]
            position = int(state["position"])
        check_state(state)
        if state_fingerprint != self.fingerprint:
            raise StateError(describe_other_settings(state_identity, self.identity, state_fingerprint))
        with wrap_state_errors():
            pools = [_LanePoolPosition(*state["lanes"][str(lane)]) for lane in list_rank_lanes(self.spec.lanes, 0, 1)]
        with self.orders.lock:
            for lane, pool in zip(self.orders.lanes, pools, strict=True):
                lane.begin(pool)
        return position


def make_lane_order_error(limitation: str) -> PlanError:
    return PlanError(
        f"A plan in the order of lanes {limitation}: it only repeats a stream. Plan the store in pools "
        "(order='pools', which is another order of the same documents)."
    )


def refuse_lane_order(plan: object, limitation: str) -> None:
    """Refuse a plan in lane order."""
    if isinstance(plan, LanePlan):
        raise make_lane_order_error(limitation)
