"""Cuts of a source at an edit of ``seq_len``, and the order after a cut."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.plan.order.source_order import Cursor, SourceOrder
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.row_order import repack_rows
from batchloom.plan.packing.rows import Rows, join_rows, reorder_rows, slice_rows

Ints = NDArray[np.int64]

# (epoch, slot, row) of the next sequence of each lane. Slot -1 is the remainder of an earlier cut.
SourceCut = tuple[tuple[int, int, int], ...]


def compute_source_cut(order: SourceOrder, served: Ints) -> SourceCut | None:
    """Return the position of each lane's next sequence as a cut.

    ``served`` are the sequences each lane has served, int64 [lanes]. Return None if lanes lend sequences to each
    other: then the remainder follows from the counts of all lanes.
    """
    if not served.any():
        # Nothing of the source was served, and it may not have any sequence so far.
        return tuple((begin.epoch, -1 if begin.before else begin.slot, 0) for begin in order.begins)
    lane_cuts = []
    for lane, index in enumerate(served.tolist()):
        location = order.find(lane, index)
        if location is None:
            raise AssertionError("an order without a bound has no end")
        if location.cursor is None and location.pool != -1 - lane:
            return None
        lane_cuts.append((location.epoch, location.cursor.slot if location.cursor else -1, location.row))
    is_same_epoch = len({epoch for epoch, _, _ in lane_cuts}) == 1
    return tuple(lane_cuts) if is_same_epoch else None


def continue_after_cut(
    order: SourceOrder,
    spec: PlanSpec,
    source_cut: SourceCut | None,
    served: Ints,
    epochs: int | None,
) -> SourceOrder:
    """Return the order that continues from a cut under another spec.

    The repacked remainder of each lane's pool comes first, then its next pool. If lanes have begun to lend each
    other their last sequences of an epoch, all the remainder of the epoch comes first. ``served`` are the
    sequences each lane has served, int64 [lanes]. ``epochs`` are the total epochs of the source, or None. A cut
    at a missing row raises PlanError.
    """
    if source_cut is None:
        lane_remainders = _find_unserved_lent(order, served, epochs)
    else:
        lane_remainders = [_list_pool_remainder(order, lane, lane_cut) for lane, lane_cut in enumerate(source_cut)]
    remainders, begins = [], []
    for lane, (rows, epoch, slot) in enumerate(lane_remainders):
        pool_location = (epoch, slot) if order.lanes == 1 else (epoch, slot, lane)
        remainder_rows = repack_rows(rows, order.name, spec, pool_location) if rows is not None else None
        remainders.append(remainder_rows)
        begins.append(Cursor(epoch, slot, len(remainder_rows) if remainder_rows is not None else 0))
    served_tokens = order.served_tokens + int(served.sum()) * order.spec.seq_len
    return SourceOrder(
        order.name,
        order.store,
        spec,
        remainders=tuple(remainders),
        begins=tuple(begins),
        served_tokens=served_tokens,
    )


def _list_pool_remainder(order: SourceOrder, lane: int, lane_cut: tuple[int, int, int]) -> tuple[Rows | None, int, int]:
    """Return the remainder of a lane's pool at a cut.

    It comes with (epoch, slot) of the next pool.
    """
    epoch, slot, row = lane_cut
    if slot < 0:
        pool_rows, (epoch, slot, _) = order.remainders[lane], order.begins[lane]
    elif not row:
        return None, epoch, slot
    else:
        pools = order.epoch(epoch).orders[lane]
        pool_rows = order.get_pool_rows(int(pools[slot]), epoch) if slot < len(pools) else None
        slot += 1
    if pool_rows is None or row >= len(pool_rows):
        raise PlanError(
            f"Source {order.name!r} was not cut at row {row}: its pool has fewer rows. Use the state as it was saved."
        )
    return slice_rows(pool_rows, row, len(pool_rows)), epoch, slot


class _UnservedSequences(NamedTuple):
    """Unserved sequences of an epoch: a range of own ones per lane, and lent ones.

    Attributes:
        begins, ends: range of the numbers in the epoch that each lane serves itself, int64 [lanes].
        lanes, numbers: sequences that other lanes serve, ascending by lane, int64 [N].
        has_lent: whether other lanes have served some of a lane, bool [lanes].
    """

    begins: Ints
    ends: Ints
    lanes: Ints
    numbers: Ints
    has_lent: NDArray[np.bool_]

    def list_numbers(self, lane: int) -> Ints:
        """Return the sequence numbers of one lane."""
        own = np.arange(self.begins[lane], self.ends[lane])
        return np.concatenate([own, self.numbers[self.lanes == lane]])


def _find_unserved(order: SourceOrder, epoch: int, served: Ints) -> _UnservedSequences:
    quotas, own_counts = order.count_shares(epoch)
    own = np.minimum(quotas, own_counts)
    lent = own_counts - own
    lanes = np.repeat(np.arange(order.lanes), lent)
    numbers = np.arange(len(lanes)) - np.repeat(np.cumsum(lent) - lent, lent) + own[lanes]
    servers, indices = order.find_servers(epoch, lanes, numbers)
    is_unserved = indices >= served[servers]
    has_lent = np.zeros(order.lanes, bool)
    has_lent[lanes[~is_unserved]] = True
    begins = np.clip(served - order.quotas(epoch), 0, own)
    return _UnservedSequences(begins, own, lanes[is_unserved], numbers[is_unserved], has_lent)


def _find_unserved_lent(order: SourceOrder, served: Ints, epochs: int | None) -> list[tuple[Rows | None, int, int]]:
    """Return the remainder of each lane's entered or lent pools.

    Each remainder comes with (epoch, slot) of the next pool.
    """
    lane_epochs = [order.find_epoch(lane, index) for lane, index in enumerate(served.tolist())]
    lane_epochs = [epoch_number if epochs is None else min(epoch_number, epochs) for epoch_number in lane_epochs]
    stop = max(lane_epochs) + 1 if epochs is None else min(max(lane_epochs) + 1, epochs)
    unserved_by_epoch = {epoch: _find_unserved(order, epoch, served) for epoch in range(min(lane_epochs), stop)}
    epoch_starts = [int(order.quotas(epoch)[lane]) for lane, epoch in enumerate(lane_epochs)]
    lane_remainders: list[tuple[Rows | None, int, int]] = []
    for lane, lane_epoch in enumerate(lane_epochs):
        # The remainder of epochs that a lane has finished counts as part of the last of them.
        is_epoch_finished = int(served[lane]) == epoch_starts[lane] and lane_epoch > min(lane_epochs)
        last_epoch = lane_epoch - (lane_epoch == epochs or is_epoch_finished)
        last_epoch = max(
            [
                last_epoch,
                *(epoch for epoch, unserved in unserved_by_epoch.items() if unserved.has_lent[lane]),
            ]
        )
        numbers = {
            epoch: unserved.list_numbers(lane) for epoch, unserved in unserved_by_epoch.items() if epoch <= last_epoch
        }
        slot = len(order.epoch(last_epoch).orders[lane])
        own_count = order.epoch(last_epoch).count_sequences(lane)
        inside = int(served[lane]) - epoch_starts[lane]
        if last_epoch == lane_epoch and inside < own_count and len(numbers[last_epoch]) == own_count - inside:
            # No sequence of this epoch was lent, so pools that were not entered stay intact.
            location = order.locate_own(last_epoch, lane, inside)
            at_pool_start = location.cursor is not None and not location.row
            slot = location.cursor.slot + (location.row > 0) if location.cursor else order.begins[lane].slot
            numbers[last_epoch] = numbers[last_epoch][: 0 if at_pool_start else location.run]
        row_slices = [
            row_slice for epoch, own in numbers.items() for row_slice in _collect_rows(order, epoch, lane, own)
        ]
        rows = join_rows(row_slices, sum(len(row_slice) for row_slice in row_slices)) if row_slices else None
        lane_remainders.append((rows, last_epoch, slot))
    return lane_remainders


def _collect_rows(order: SourceOrder, epoch: int, lane: int, numbers: Ints) -> list[Rows]:
    """Return the rows of a lane's own sequences in an epoch, pool by pool."""
    row_slices = []
    start = 0
    while start < len(numbers):
        location = order.locate_own(epoch, lane, int(numbers[start]))
        end = int(numbers.searchsorted(numbers[start] + location.run))
        row_indices = numbers[start:end] - (int(numbers[start]) - location.row)
        row_slices.append(reorder_rows(order.get_pool_rows(location.pool, epoch), row_indices))
        start = end
    return row_slices
