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
        return tuple((one.epoch, -1 if one.before else one.slot, 0) for one in order.begins)
    found = []
    for lane, index in enumerate(served.tolist()):
        one = order.find(lane, index)
        if one is None:
            raise AssertionError("without a bound an order has no end")
        if one.cursor is None and one.pool != -1 - lane:
            return None
        found.append((one.epoch, one.cursor.slot if one.cursor else -1, one.row))
    same = len({epoch for epoch, _, _ in found}) == 1
    return tuple(found) if same else None


def continue_after_cut(
    order: SourceOrder, spec: PlanSpec, cut: SourceCut | None, served: Ints, epochs: int | None
) -> SourceOrder:
    """The order that goes on from a cut under another spec.

    What is left of each lane's pool comes first, packed anew, and then its next pool. Where lanes have begun to lend
    each other their last sequences of an epoch, all that is left of it comes first.

    Args:
        order: the order up to the cut.
        spec: the other spec.
        cut: as :func:`compute_source_cut` tells.
        served: sequences each lane has served, int64 [lanes].
        epochs: how many of the source are served in all; None for no bound.

    Raises:
        PlanError: there is no such pool or row.
    """
    if cut is None:
        left = _find_unserved_lent(order, served, epochs)
    else:
        left = [_list_pool_remainder(order, lane, place) for lane, place in enumerate(cut)]
    rests, begins = [], []
    for lane, (rows, epoch, slot) in enumerate(left):
        place = (epoch, slot) if order.lanes == 1 else (epoch, slot, lane)
        rest = repack_rows(rows, order.name, spec, place) if rows is not None else None
        rests.append(rest)
        begins.append(Cursor(epoch, slot, len(rest) if rest is not None else 0))
    spent = order.spent + int(served.sum()) * order.spec.seq_len
    return SourceOrder(
        order.name, order.store, spec, rests=tuple(rests), begins=tuple(begins), spent=spent
    )


def _list_pool_remainder(
    order: SourceOrder, lane: int, place: tuple[int, int, int]
) -> tuple[Rows | None, int, int]:
    """What is left of the pool a lane was cut in, and (epoch, slot) of the pool behind it."""
    epoch, slot, row = place
    if slot < 0:
        left, (epoch, slot, _) = order.rests[lane], order.begins[lane]
    elif not row:
        return None, epoch, slot
    else:
        pools = order.epoch(epoch).orders[lane]
        left = order.entered(int(pools[slot]), epoch) if slot < len(pools) else None
        slot += 1
    if left is None or row >= len(left):
        raise PlanError(
            f"Source {order.name!r} was not cut at row {row}: its pool has fewer rows. Use the state that was saved."
        )
    return slice_rows(left, row, len(left)), epoch, slot


class _UnservedSequences(NamedTuple):
    """What nobody has served of an epoch: of each lane's own sequences a range, and single ones that are lent.

    Attributes:
        begins, ends: numbers in the epoch of those each lane serves itself, int64 [lanes].
        lanes, numbers: those that others serve, ascending by lane, int64 [N].
        touched: of which lanes others have served some, bool [lanes].
    """

    begins: Ints
    ends: Ints
    lanes: Ints
    numbers: Ints
    touched: NDArray[np.bool_]

    def of(self, lane: int) -> Ints:
        """The numbers of one lane."""
        own = np.arange(self.begins[lane], self.ends[lane])
        return np.concatenate([own, self.numbers[self.lanes == lane]])


def _find_unserved(order: SourceOrder, epoch: int, served: Ints) -> _UnservedSequences:
    asked, has = order.shares(epoch)
    own = np.minimum(asked, has)
    lent = has - own
    lanes = np.repeat(np.arange(order.lanes), lent)
    numbers = np.arange(len(lanes)) - np.repeat(np.cumsum(lent) - lent, lent) + own[lanes]
    by, indices = order.find_servers(epoch, lanes, numbers)
    left = indices >= served[by]
    touched = np.zeros(order.lanes, bool)
    touched[lanes[~left]] = True
    begins = np.clip(served - order.quotas(epoch), 0, own)
    return _UnservedSequences(begins, own, lanes[left], numbers[left], touched)


def _find_unserved_lent(
    order: SourceOrder, served: Ints, epochs: int | None
) -> list[tuple[Rows | None, int, int]]:
    """What is left of each lane's own pools that were entered or lent, and (epoch, slot) of the pool behind them."""
    at = [order.find_epoch(lane, index) for lane, index in enumerate(served.tolist())]
    at = [one if epochs is None else min(one, epochs) for one in at]
    stop = max(at) + 1 if epochs is None else min(max(at) + 1, epochs)
    left = {epoch: _find_unserved(order, epoch, served) for epoch in range(min(at), stop)}
    begun = [int(order.quotas(epoch)[lane]) for lane, epoch in enumerate(at)]
    found: list[tuple[Rows | None, int, int]] = []
    for lane, mine in enumerate(at):
        # What is left of epochs it is through counts as of the last of them.
        through = int(served[lane]) == begun[lane] and mine > min(at)
        last = mine - (mine == epochs or through)
        last = max([last, *(epoch for epoch, one in left.items() if one.touched[lane])])
        numbers = {epoch: one.of(lane) for epoch, one in left.items() if epoch <= last}
        slot = len(order.epoch(last).orders[lane])
        has = order.epoch(last).has(lane)
        inside = int(served[lane]) - begun[lane]
        if last == mine and inside < has and len(numbers[last]) == has - inside:
            # Nobody has been lent anything of it: pools that were not entered stay whole.
            one = order.own(last, lane, inside)
            whole = one.cursor is not None and not one.row
            slot = one.cursor.slot + (one.row > 0) if one.cursor else order.begins[lane].slot
            numbers[last] = numbers[last][: 0 if whole else one.run]
        pieces = [
            piece
            for epoch, own in numbers.items()
            for piece in _collect_rows(order, epoch, lane, own)
        ]
        rows = join_rows(pieces, sum(len(piece) for piece in pieces)) if pieces else None
        found.append((rows, last, slot))
    return found


def _collect_rows(order: SourceOrder, epoch: int, lane: int, numbers: Ints) -> list[Rows]:
    """Rows of a lane's own sequences in an epoch, pool by pool."""
    pieces = []
    at = 0
    while at < len(numbers):
        one = order.own(epoch, lane, int(numbers[at]))
        end = int(numbers.searchsorted(numbers[at] + one.run))
        chosen = numbers[at:end] - (int(numbers[at]) - one.row)
        pieces.append(reorder_rows(order.entered(one.pool, epoch), chosen))
        at = end
    return pieces
