"""Plans in the order of a stream, over the store that it wrote: an oracle of streams."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchloom import Loader, PlanSpec
from batchloom.batches import BatchSpec
from batchloom.batches.loading import PlanFeed
from batchloom.plan.order import SOURCE, RowPart
from batchloom.plan.packing import Rows, join_rows, reorder_rows, slice_rows
from batchloom.preparation.documents import RecordParsers
from batchloom.sources import RecordBounds
from batchloom.store import Store, map_provenance
from batchloom.streaming import (
    choose_lane_pool_size,
    compute_lane_pool_size,
    describe_all_too_long,
    make_no_sequence_error,
    order_lane_ranges,
    pack_lane_pool,
)
from batchloom.streaming.lane import is_sequential_text

_MAX_CACHED_POOLS = 2
_ALL_ROWS = RowPart(0, 1)


def make_lane_loader(store: Store, stream: Any, *, rank: int = 0, world_size: int = 1, **settings: Any) -> Loader:
    """Make a loader that repeats a stream on the store that it wrote; ``settings`` change those of the order."""
    spec = replace(stream.spec, **settings)
    plan = LanePlan(store, spec, lanes=stream.lanes, bounds=find_range_bounds(stream, store))
    feed = PlanFeed(plan, BatchSpec(rank=rank, world_size=world_size, output="numpy", prefetch=0), None)
    # What a run leaves out is logged for plans alone.
    feed.announce = lambda: False
    return Loader(feed)


def compute_lane_pool_start(spec: PlanSpec, epoch: int, pool: int) -> int:
    """Return the number of a lane's documents in an epoch before a pool."""
    growing_pools = spec.pool_size.bit_length() if epoch == 0 else 0
    pool_sizes = [compute_lane_pool_size(spec, epoch, pool_number) for pool_number in range(min(pool, growing_pools))]
    return sum(pool_sizes) + max(pool - growing_pools, 0) * spec.pool_size


@dataclass(frozen=True, slots=True)
class _LanePoolPosition:
    """Pool of a lane, and the number of the lane's sequences before it."""

    epoch: int
    number: int
    before: int


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

    def documents(self, epoch: int, number: int):
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


class LaneOrders:
    """Lanes of a plan, in place of ``SourceOrders`` and ``RunPositions``."""

    is_counted = True

    def __init__(self, data, spec: PlanSpec, bounds) -> None:
        self.data = data
        self.spec = spec
        self.bounds = bounds
        self.segments = (SimpleNamespace(step=0, bans=()),)
        self.lanes = [_LaneOrder(self, lane) for lane in range(spec.lanes)]

    def latest(self) -> list:
        """Return no orders, because no pools are counted."""
        return []


class LanePlan:
    """Plan in the order of a stream, with what a ``PlanFeed`` asks of a plan.

    Args:
        store: any object with ``lengths``.
        spec: settings of the stream.
        lanes: number of lanes of the stream.
        bounds: first document of each range of the input, then the number of documents, int64 [ranges + 1].
    """

    def __init__(self, store, spec: PlanSpec, *, lanes: int, bounds) -> None:
        self.spec = replace(spec, lanes=lanes, pool_size=spec.pool_size or choose_lane_pool_size(media=False))
        self.stores = {SOURCE: store}
        self.edits = ()
        self.mixture = None
        # The loader asks ``orders`` and ``run`` of a plan; here one object answers both.
        self.orders = self.run = LaneOrders(store, self.spec, bounds)

    def __copy__(self) -> "LanePlan":
        orders = self.orders
        return LanePlan(orders.data, self.spec, lanes=self.spec.lanes, bounds=orders.bounds)

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return int(self.spec.steps or 0)

    def has_step(self, step: int) -> bool:
        """Return whether the run has this step."""
        return 0 <= step < self.steps

    @property
    def segments(self) -> tuple[SimpleNamespace, ...]:
        """The only segment of the run."""
        return self.orders.segments

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

    def rows(self, start: int, stop: int, part: RowPart = _ALL_ROWS) -> Rows:
        """Return the rows of positions ``start`` to ``stop - 1``, or of a part of them."""
        return self._rows(part.list_positions(start, stop))

    def _rows(self, positions) -> Rows:
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


def find_range_bounds(stream: Any, store: Store):
    """Return the first document of each range of a stream in the store that it wrote, int64 [S + 1]."""
    parsers = RecordParsers(stream.recipe, stream._settings.run.limits)
    begins = []
    for range_group in stream._range_groups:
        record_range = range_group.ranges[0]
        part = record_range.unit_part
        start = record_range.start
        if start > part.start and not is_sequential_text(part, parsers.rules):
            start = RecordBounds(parsers.get_parser(part.source).rules).find_bound(part.source, start)
        at_part_start = record_range.start == part.start
        begins.append((range_group.first_part + record_range.part_index, 0 if at_part_start else start))
    return _compute_range_bounds(store, begins)


def _compute_range_bounds(store: Store, begins: list[tuple[int, int]]):
    """Return the first document of each stream range, int64 [S + 1].

    The last element is the number of documents.
    """
    bounds = np.zeros(len(begins) + 1, np.int64)
    bounds[-1] = len(store)
    parts = np.array([part for part, _ in begins], np.int64)
    offsets = np.array([offset for _, offset in begins], np.int64)
    next_range = 0
    for stem, first in zip(store.shards.stems, store.shards.bounds, strict=False):
        provenance = map_provenance(stem.with_suffix(".docs"))
        last = int(provenance.parts[-1]), int(provenance.offsets[-1])
        # Count the remaining ranges that begin at or before the last document of the shard.
        stop = next_range + int(
            np.sum(
                (parts[next_range:] < last[0]) | ((parts[next_range:] == last[0]) & (offsets[next_range:] <= last[1]))
            )
        )
        for number in range(next_range, stop):
            a, b = np.searchsorted(provenance.parts, [parts[number], parts[number] + 1])
            part_row = np.searchsorted(provenance.offsets[a:b], np.uint64(offsets[number]))
            bounds[number] = first + int(a) + int(part_row)
        next_range = stop
    bounds[next_range:-1] = len(store)
    return bounds
