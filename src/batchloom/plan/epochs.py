"""How often each source was passed through, at a position of a run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchloom.plan.plan import Plan


def epochs_at(plan: "Plan", position: int) -> dict[str, float]:
    """What ``Plan.epochs`` gives; the plan's lock is held."""
    segment = plan.timeline.segment_at(position)
    if segment is None and plan.timeline.end:
        segment, position = plan.timeline.segment_at(plan.timeline.end - 1), plan.timeline.end
    if segment is None:
        return {}
    served, found = segment.served(position), {}
    for number in plan.weighed_by_era[segment.era]:
        order = plan.order(number, segment.era)
        at = order.find(0, int(served[number, 0]))
        if at is None:
            continue
        # What an edit left of older pools, or another lane lends, has no place among the pools of an epoch.
        share = 0.0
        if at.cursor is not None:
            inside = at.row / (at.row + at.run)
            share = (at.cursor.slot + inside) / len(order.epoch(at.epoch).orders[0])
        found[plan.names[number]] = at.epoch + share
    return found
