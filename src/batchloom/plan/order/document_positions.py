"""When a document is seen: the way back from a document to positions, by inverting every step of the order."""

from dataclasses import dataclass

from batchloom.plan.order.length_groups import LengthGroupedRows
from batchloom.plan.order.plan import Plan
from batchloom.plan.order.row_windows import RowWindows
from batchloom.plan.order.source_order import SourceOrder
from batchloom.plan.order.timeline import TimelineSegment


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """One sequence that holds a document.

    Attributes:
        step: the step.
        row: its place in the step, counted over all ranks.
        position: its position in the run.
        epoch: the pass over its source, from 0.
    """

    step: int
    row: int
    position: int
    epoch: int


def find_document_positions(
    plan: Plan, number: int, document: int, last_step: int
) -> list[DocumentPosition]:
    """Every sequence up to a step that holds a document, past and future, in order.

    Counts the sequences of every pool of the source where that has not been done.

    Args:
        plan: the order.
        number: of the source in the plan.
        document: of the source.
        last_step: the last step of interest.
    """
    last = min(last_step, plan.steps - 1)
    end = plan.positions_of(last)[1]
    # What a window holds is served anywhere in it.
    end = min(plan.orders.window(end - 1)[1], plan.positions)
    plan.orders.timeline.segment_at(max(end - 1, 0))
    segments = [s for s in plan.orders.timeline.segments() if number in s.sources.tolist()]
    found: list[DocumentPosition] = []
    for era in sorted({segment.era for segment in segments}):
        mine = [segment for segment in segments if segment.era == era]
        found += _find_in_era(plan, mine, (number, document), end)
    found = [one for one in found if one.step <= last]
    return sorted(found, key=lambda one: one.position)


def _find_in_era(
    plan: Plan, segments: list[TimelineSegment], what: tuple[int, int], end: int
) -> list[DocumentPosition]:
    number, document = what
    order = plan.orders.order(number, segments[0].era)
    epoch, epochs = order.first_epoch, plan.orders.epoch_limit(number)
    found = [
        one
        for lane, index, of in order.find_remainder_indices(document)
        if (epochs is None or of < epochs)
        and (one := _locate_sequence(plan, segments, (number, lane, index), of))
    ]
    while (epochs is None or epoch < epochs) and _has_epoch_begun(
        plan, order, segments, number, epoch, end
    ):
        found += [
            one
            for lane, index in order.indices(document, epoch)
            if (one := _locate_sequence(plan, segments, (number, lane, index), epoch))
        ]
        epoch += 1
    found = [one for one in found if one.position < end]
    return _group_by_length(plan, found) if plan.spec.group_by_length else found


def _group_by_length(plan: Plan, found: list[DocumentPosition]) -> list[DocumentPosition]:
    """Return where sequences are served when rows are grouped by length."""
    grouped = LengthGroupedRows(RowWindows(plan.orders))
    with plan.orders.lock:
        positions = [grouped.served(one.position) for one in found]
    return [
        DocumentPosition(*plan.orders.course.step_at(position), position, one.epoch)
        for position, one in zip(positions, found, strict=True)
    ]


def _has_epoch_begun(
    plan: Plan,
    order: SourceOrder,
    segments: list[TimelineSegment],
    number: int,
    epoch: int,
    end: int,
) -> bool:
    """Whether an epoch of a source has begun before a position, in any lane."""
    if not order.is_counted:
        order.count_all()
    last = segments[-1]
    until = min(plan.orders.timeline.until(last) or end, end)
    served = last.served(max(until, last.position))[number]
    return bool((served > order.quotas(epoch)).any())


def _locate_sequence(
    plan: Plan, segments: list[TimelineSegment], sequence: tuple[int, int, int], epoch: int
) -> DocumentPosition | None:
    """Where a sequence of a source is served; None if it is not, since its step was left out or the source retired."""
    number, lane, index = sequence
    last = segments[-1]
    tail = plan.orders.timeline.tail(
        number, last, plan.orders.timeline.until(last) or plan.orders.timeline.sure
    )
    turn = tail.turn(lane, index) if tail else None
    for segment in reversed(segments):
        position = (
            segment.place(number, lane, index) if turn is None else segment.turn(number, turn)
        )
        if position is None:
            continue
        until = plan.orders.timeline.until(segment)
        if until is not None and position >= until:
            return None
        step, row = plan.orders.course.step_at(position)
        first, stop = plan.positions_of(step)
        # A position that an edit skipped belongs to no step.
        return (
            DocumentPosition(step, row, position, epoch) if first + row == position < stop else None
        )
    return None
