"""Positions of a document, found by inverting each step of the order."""

from dataclasses import dataclass

import numpy as np

from batchloom.plan.order.plan import Plan
from batchloom.plan.order.run_positions import LengthGroupedRows, RowWindows
from batchloom.plan.order.source_order import SourceOrder
from batchloom.plan.order.timeline import TimelineSegment
from batchloom.plan.packing.rows import Rows


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """Sequence that holds a document.

    Attributes:
        step: step of the sequence.
        row: index of its row in the step, over all ranks.
        position: position in the run.
        epoch: pass over the source, from 0.
    """

    step: int
    row: int
    position: int
    epoch: int


def find_document_positions(plan: Plan, number: int, document: int, last_step: int) -> list[DocumentPosition]:
    """Return all sequences up to a step that hold a document, sorted by position.

    Past and future steps are included. Pools of the source that are not counted yet are counted.

    Args:
        plan: the plan.
        number: number of the source in the plan.
        document: number of the document in the source.
        last_step: last step of interest.
    """
    last = min(last_step, plan.steps - 1)
    end = plan.positions_of(last)[1]
    # Grouping by length may serve a row at any position of its window, so the search includes the full window.
    end = min(plan.run.window(end - 1)[1], plan.positions)
    plan.orders.timeline.segment_at(max(end - 1, 0))
    segments = [s for s in plan.orders.timeline.segments() if number in s.sources.tolist()]
    document_positions: list[DocumentPosition] = []
    for era in sorted({segment.era for segment in segments}):
        era_segments = [segment for segment in segments if segment.era == era]
        document_positions += _find_in_era(plan, era_segments, (number, document), end)
    document_positions = [position for position in document_positions if position.step <= last]
    return sorted(document_positions, key=lambda position: position.position)


def _find_in_era(
    plan: Plan, segments: list[TimelineSegment], source_document: tuple[int, int], end: int
) -> list[DocumentPosition]:
    number, document = source_document
    order = plan.orders.order(number, segments[0].era)
    epoch, epochs = order.first_epoch, plan.orders.epoch_limit(number)
    document_positions = [
        position
        for lane, index, epoch_number in _find_remainder_indices(order, document)
        if (epochs is None or epoch_number < epochs)
        and (position := _locate_sequence(plan, segments, (number, lane, index), epoch_number))
    ]
    while (epochs is None or epoch < epochs) and _has_epoch_begun(plan, order, segments, number, epoch, end):
        document_positions += [
            position
            for lane, index in _find_indices(order, document, epoch)
            if (position := _locate_sequence(plan, segments, (number, lane, index), epoch))
        ]
        epoch += 1
    document_positions = [
        document_position for document_position in document_positions if document_position.position < end
    ]
    return _group_by_length(plan, document_positions) if plan.spec.group_by_length else document_positions


def _group_by_length(plan: Plan, document_positions: list[DocumentPosition]) -> list[DocumentPosition]:
    """Map sequences to the positions where they are served after length grouping."""
    grouped = LengthGroupedRows(RowWindows(plan.run))
    with plan.orders.lock:
        positions = [
            grouped.find_served_position(document_position.position) for document_position in document_positions
        ]
    return [
        DocumentPosition(*plan.orders.run_layout.step_at(position), position, document_position.epoch)
        for position, document_position in zip(positions, document_positions, strict=True)
    ]


def _has_epoch_begun(
    plan: Plan, order: SourceOrder, segments: list[TimelineSegment], number: int, epoch: int, end: int
) -> bool:
    """Return whether an epoch of a source begins before a position in any lane."""
    _count_pools(order)
    last = segments[-1]
    until = min(plan.orders.timeline.until(last) or end, end)
    served = last.served(max(until, last.position))[number]
    return bool((served > order.quotas(epoch)).any())


def _locate_sequence(
    plan: Plan, segments: list[TimelineSegment], sequence: tuple[int, int, int], epoch: int
) -> DocumentPosition | None:
    """Return the position where a sequence of a source is served.

    Return None if its step was skipped by an edit or the source was retired before it.
    """
    number, lane, index = sequence
    last = segments[-1]
    tail = plan.orders.timeline.tail(number, last, plan.orders.timeline.until(last) or plan.orders.timeline.sure)
    turn = tail.turn(lane, index) if tail else None
    for segment in reversed(segments):
        position = segment.find_position(number, lane, index) if turn is None else segment.turn(number, turn)
        if position is None:
            continue
        until = plan.orders.timeline.until(segment)
        if until is not None and position >= until:
            return None
        step, row = plan.orders.run_layout.step_at(position)
        first, stop = plan.positions_of(step)
        # A position that an edit skipped belongs to no step.
        return DocumentPosition(step, row, position, epoch) if first + row == position < stop else None
    return None


def _find_indices(order: SourceOrder, document: int, epoch: int) -> list[tuple[int, int]]:
    """Return (lane, index) of the sequences of an epoch that hold a document."""
    _count_pools(order)
    pool = order.pools.find_pool(document)
    lane, pools = pool % order.lanes, order.epoch(epoch)
    slot = int(np.flatnonzero(pools.orders[lane] == pool)[0])
    if (epoch, slot) < order.begins[lane][:2]:
        return []
    earlier_rows = int(pools.ends[lane][slot - 1]) if slot else pools.remainder_counts[lane]
    rows = _find_rows_with(order.get_pool_rows(pool, epoch), document)
    return [_find_server(order, epoch, lane, earlier_rows + row) for row in rows]


def _find_remainder_indices(order: SourceOrder, document: int) -> list[tuple[int, int, int]]:
    """Return (lane, index, epoch) of the repacked sequences that hold a document.

    An edit of ``seq_len`` repacks the remainder of a pool.
    """
    _count_pools(order)
    return [
        (*_find_server(order, order.begins[lane].epoch, lane, row), order.begins[lane].epoch)
        for lane, remainder_rows in enumerate(order.remainders)
        for row in (_find_rows_with(remainder_rows, document) if remainder_rows is not None else [])
    ]


def _count_pools(order: SourceOrder) -> None:
    if not order.is_counted:
        order.count_all()


def _find_server(order: SourceOrder, epoch: int, lane: int, inside: int) -> tuple[int, int]:
    """Return the lane that serves a lane's sequence of an epoch, and its index there."""
    lanes, indices = order.find_servers(epoch, np.array([lane]), np.array([inside]))
    return int(lanes[0]), int(indices[0])


def _find_rows_with(rows: Rows, document: int) -> list[int]:
    spans = np.flatnonzero(rows.documents == document)
    numbers: list[int] = np.unique(rows.pointers.searchsorted(spans, side="right") - 1).tolist()
    return numbers
