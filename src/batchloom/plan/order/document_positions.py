"""Search for the sequences of a run that hold a document."""

from dataclasses import dataclass

import numpy as np

from batchloom.plan.order.plan import Plan
from batchloom.plan.order.source_order import Cursor, SourceOrder
from batchloom.plan.order.timeline import ServedSegment
from batchloom.plan.packing.rows import Rows


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """Sequence that holds a document."""

    step: int
    row: int
    position: int
    epoch: int


def find_document_positions(plan: Plan, number: int, document: int, last_step: int) -> list[DocumentPosition]:
    """Return all sequences up to a step that hold a document, sorted by position.

    Past and future steps are included. Pools of the source that are not counted yet are counted.
    """
    last = min(last_step, plan.steps - 1)
    end = plan.positions_of(last)[1]
    # Grouping by length may serve a row at any position of its window, so the search includes the full window.
    end = min(plan.run.window(end - 1)[1], plan.positions)
    document_positions = []
    segments_by_era: dict[int, list[tuple[ServedSegment, int]]] = {}
    for segment, stop in plan.serve_until(end).segments:
        segments_by_era.setdefault(segment.era, []).append((segment, stop))
    for era, segments in segments_by_era.items():
        served = int(segments[-1][0].served(segments[-1][1])[number])
        with plan.orders.lock:
            for index, epoch in _find_sequences(plan, plan.orders.order(number, era), served, document):
                position = _find_position(segments, number, index)
                if position is not None:
                    document_positions.append(_locate(plan, position, epoch))
    # A position that an edit skipped belongs to no step.
    found = [entry for entry in document_positions if entry.step <= last and _is_in_step(plan, entry)]
    return sorted(found, key=lambda entry: entry.position)


def _find_sequences(plan: Plan, order: SourceOrder, served: int, document: int) -> list[tuple[int, int]]:
    """Return index and epoch of the served sequences that hold a document."""
    if not order.counts.is_complete:
        order.counts.count_all()
    epoch = order.begin.epoch
    sequences = []
    if order.remainder is not None:
        sequences += [(index, epoch) for index in _find_rows_with(order.remainder, document)]
    while served > order.count_before(epoch):
        sequences += [(index, epoch) for index in _find_indices(order, document, epoch)]
        epoch += 1
    epochs = plan.orders.shares.get_epoch_limit(plan.names.index(order.name))
    return [(index, epoch) for index, epoch in sequences if index < served and (epochs is None or epoch < epochs)]


def _find_position(segments: list[tuple[ServedSegment, int]], number: int, index: int) -> int | None:
    """Return the position that serves a sequence; None if no segment does."""
    for segment, stop in segments:
        position = segment.find_position(number, index)
        if position is not None and position < stop:
            return position
    return None


def _locate(plan: Plan, position: int, epoch: int) -> DocumentPosition:
    position = plan.run.find_served_position(position)
    return DocumentPosition(*plan.step_at(position), position, epoch)


def _is_in_step(plan: Plan, entry: DocumentPosition) -> bool:
    first, stop = plan.positions_of(entry.step)
    return first + entry.row == entry.position < stop


def _find_indices(order: SourceOrder, document: int, epoch: int) -> list[int]:
    """Return the sequences of an epoch that hold a document."""
    pool = order.pools.find_pool(document)
    slots, ends = order.epoch(epoch)
    slot = int(np.nonzero(slots == pool)[0][0])
    if ends is None or (epoch, slot) < order.begin[:2]:
        return []
    earlier = order.count_before(epoch) + (int(ends[slot - 1]) if slot else 0)
    before = max(earlier, order.begin.before if epoch == order.begin.epoch else 0)
    pools, rows = order.locate(Cursor(epoch, slot, before))
    found_rows = _find_rows_with(order.pool_rows.get(pool, epoch), document)
    indices: list[int] = (before + np.flatnonzero((pools == pool) & np.isin(rows, found_rows))).tolist()
    return indices


def _find_rows_with(rows: Rows, document: int) -> list[int]:
    spans = np.flatnonzero(rows.documents == document)
    numbers: list[int] = np.unique(rows.pointers.searchsorted(spans, side="right") - 1).tolist()
    return numbers
