"""How often each source was passed through, at a position of a run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchloom.plan.order.plan import Plan


def epochs_at(plan: "Plan", position: int) -> dict[str, float]:
    """What ``Plan.epochs`` gives; the plan's lock is held."""
    segment = plan.timeline.segment_at(position)
    if segment is None and plan.timeline.end:
        segment, position = plan.timeline.segment_at(plan.timeline.end - 1), plan.timeline.end
    if segment is None:
        return {}
    if segment.plain:
        served = {int(segment.sources[0]): segment.index(position)}
    else:
        counts = segment.served(position)
        served = {n: int(counts[n, 0]) for n in plan.weighed_by_era[segment.era]}
    found = {}
    for number, index in served.items():
        order = plan.order(number, segment.era)
        at = order.find(0, index)
        if at is None:
            continue
        # What an edit left of older pools, or another lane lends, has no place among the pools of an epoch.
        share = 0.0
        if at.cursor is not None:
            inside = at.row / (at.row + at.run)
            share = (at.cursor.slot + inside) / len(order.epoch(at.epoch).orders[0])
        most = plan.epochs_of(number)
        if len(plan.names) == 1 and plan.spec.steps is None:
            most = most or plan.spec.epochs or 1
        # Sequences that fill up the last step are of no pass.
        found[plan.names[number]] = (
            at.epoch + share if most is None else min(at.epoch + share, most)
        )
    return found
