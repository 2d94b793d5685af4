"""Where an edit of ``seq_len`` leaves a source, and the order that goes on from there."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.plan.order.source_order import Cursor, SourceOrder
from batchloom.plan.packing import (
    PlanSpec,
    Rows,
    join_rows,
    reorder_rows,
    repack_rows,
    slice_rows,
)

Ints = NDArray[np.int64]

# (epoch, slot, row) of the next sequence of each lane; slot -1 is what an earlier cut left.
SourceCut = tuple[tuple[int, int, int], ...]


def compute_source_cut(order: SourceOrder, served: Ints) -> SourceCut | None:
    """Where each lane's next sequence stands; None where lanes lend: then what is left follows from all counts.

    Args:
        order: of the source.
        served: sequences each lane has served, int64 [lanes].
    """
    if not served.any():
        # Nothing of it was packed for anybody: it may have no sequence at all so far.
        return tuple((begin.epoch, -1 if begin.before else begin.slot, 0) for begin in order.begins)
    lane_cuts = []
    for lane, index in enumerate(served.tolist()):
        location = order.find(lane, index)
        if location is None:
            raise AssertionError("without a bound an order has no end")
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
    """The order that goes on from a cut under another spec.

    What is left of each lane's pool comes first, packed anew, and then its next pool. Where lanes have begun to lend
    each other their last sequences of an epoch, all that is left of it comes first.

    Args:
        order: the order up to the cut.
        spec: the other spec.
        source_cut: as :func:`compute_source_cut` tells.
        served: sequences each lane has served, int64 [lanes].
        epochs: how many of the source are served in all; None for no bound.

    Raises:
        PlanError: there is no such pool or row.
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
    """What is left of the pool a lane was cut in, and (epoch, slot) of the pool behind it."""
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
            f"Source {order.name!r} was not cut at row {row}: its pool has fewer rows. Use the state that was saved."
        )
    return slice_rows(pool_rows, row, len(pool_rows)), epoch, slot


class _UnservedSequences(NamedTuple):
    """What nobody has served of an epoch: of each lane's own sequences a range, and single ones that are lent.

    Attributes:
        begins, ends: numbers in the epoch of those each lane serves itself, int64 [lanes].
        lanes, numbers: those that others serve, ascending by lane, int64 [N].
        has_lent: of which lanes others have served some, bool [lanes].
    """

    begins: Ints
    ends: Ints
    lanes: Ints
    numbers: Ints
    has_lent: NDArray[np.bool_]

    def list_numbers(self, lane: int) -> Ints:
        """The numbers of one lane."""
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
    """What is left of each lane's own pools that were entered or lent, and (epoch, slot) of the pool behind them."""
    lane_epochs = [order.find_epoch(lane, index) for lane, index in enumerate(served.tolist())]
    lane_epochs = [epoch_number if epochs is None else min(epoch_number, epochs) for epoch_number in lane_epochs]
    stop = max(lane_epochs) + 1 if epochs is None else min(max(lane_epochs) + 1, epochs)
    unserved_by_epoch = {epoch: _find_unserved(order, epoch, served) for epoch in range(min(lane_epochs), stop)}
    epoch_starts = [int(order.quotas(epoch)[lane]) for lane, epoch in enumerate(lane_epochs)]
    lane_remainders: list[tuple[Rows | None, int, int]] = []
    for lane, lane_epoch in enumerate(lane_epochs):
        # What is left of epochs it is through counts as of the last of them.
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
            # Nobody has been lent anything of it: pools that were not entered stay whole.
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
    """Rows of a lane's own sequences in an epoch, pool by pool."""
    row_slices = []
    start = 0
    while start < len(numbers):
        location = order.locate_own(epoch, lane, int(numbers[start]))
        end = int(numbers.searchsorted(numbers[start] + location.run))
        row_indices = numbers[start:end] - (int(numbers[start]) - location.row)
        row_slices.append(reorder_rows(order.get_pool_rows(location.pool, epoch), row_indices))
        start = end
    return row_slices
