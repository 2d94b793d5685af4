"""Report of a mixture before a run: shares, their changes, and exhausted sources."""

import logging
from dataclasses import replace
from typing import Any

from batchloom import Mixture, Plan, Store, open_store
from batchloom.core.wording import format_count
from batchloom.train.distributed import RankGroup
from batchloom.train.run_folder import RunFolder

_LOG = logging.getLogger("batchloom")
_MAX_LISTED = 6
# Exhaustion depends on the sequence counts. For up to this many documents they take about a second.
_MAX_INLINE_COUNT = 1 << 20


def describe_mixture(plan: Plan, steps: int) -> list[str]:
    """Describe source shares, changes by stages and edits, and exhausted sources.

    Args:
        plan: plan of the run.
        steps: number of steps of the run.
    """
    lines = []
    if isinstance(plan.orders.data, Mixture):
        lines = _list_mixture_lines(plan, plan.orders.data.exhausted, steps)
    if plan.journal:
        last = plan.journal[-1]
        note = f" ({last['note']})" if "note" in last else ""
        lines.append(
            f"edits  {format_count(len(plan.journal), 'edit')} in the journal, the last applies after "
            f"{format_count(last['step'], 'step')}{note}"
        )
    return lines


def _list_mixture_lines(plan: Plan, exhausted: str, steps: int) -> list[str]:
    orders = plan.orders
    end = orders.run_layout.first_position(steps)
    documents = sum(store.lengths.size for store in plan.stores.values())
    is_exhaustion_known = exhausted == "repeat" or orders.is_counted or documents <= _MAX_INLINE_COUNT
    if is_exhaustion_known:
        orders.timeline.segment_at(end - 1)
    segments = [timeline_segment for timeline_segment in orders.timeline.segments() if timeline_segment.position < end]
    lines = []
    for number, segment in enumerate(segments[:_MAX_LISTED]):
        shares = {
            plan.names[source]: count / segment.schedule.period
            for source, count in zip(segment.sources.tolist(), segment.schedule.counts, strict=True)
        }
        since = f", after {_format_steps(plan, segment.position)}" if number else ""
        lines.append(f"mix    {_format_shares(shares)} of the sequences{since}")
    if len(segments) > _MAX_LISTED:
        lines.append(f"mix    {len(segments) - _MAX_LISTED:,} later changes of the shares are not shown")
    if not is_exhaustion_known:
        lines.append(
            f"mix    exhausted={exhausted}: the first source to run out is known once the sequences are counted"
        )
    exhausted_sources = sorted(
        (exhausted_at, source) for source, exhausted_at in orders.timeline.exhausted.items() if exhausted_at < end
    )
    for exhausted_at, source in exhausted_sources[:_MAX_LISTED]:
        consequence = "the run ends" if exhausted == "stop" else "the others take its share"
        lines.append(
            f"mix    {plan.names[source]} is exhausted after {_format_steps(plan, exhausted_at)}: {consequence}"
        )
    if exhausted == "redistribute" and orders.timeline.end is not None and orders.timeline.end < end:
        done = _format_steps(plan, orders.timeline.end)
        lines.append(f"mix    all sources are exhausted after {done}, and the run ends")
    return lines


def _format_steps(plan: Plan, position: int) -> str:
    """Format the number of completed steps before a change at a position."""
    return format_count(plan.orders.run_layout.steps_until(position), "step")


def _format_shares(shares: dict[str, float]) -> str:
    largest = sorted(shares, key=lambda name: (-shares[name], name))
    omitted_note = f" and {len(shares) - _MAX_LISTED:,} more" if len(shares) > _MAX_LISTED else ""
    return ", ".join(f"{name} {shares[name]:.2%}" for name in largest[:_MAX_LISTED]) + omitted_note


def open_mixture_generations(mixture: Mixture, folder: RunFolder, ranks: RankGroup) -> Mixture:
    """Open each store of a mixture at the generation the run was started on.

    A generation that is not the given one is logged.

    Raises:
        TrainError: there is no run in the folder.
        GenerationError: a generation was compacted away.
    """
    recorded_data = folder.read().get("data")
    sources: Any = recorded_data.get("sources") if isinstance(recorded_data, dict) else None
    stores = dict(mixture.stores)
    for name, store in mixture.stores.items():
        recorded_source = sources.get(name) if isinstance(sources, dict) else None
        if not isinstance(recorded_source, dict) or not isinstance(store, Store):
            continue
        recorded_fingerprint = str(recorded_source.get("store"))
        number = (
            None if recorded_fingerprint == store.fingerprint else store.contents.find_generation(recorded_fingerprint)
        )
        if number is None or number == store.location.generation:
            continue
        open_options = {**store.location.options, "generation": number}
        stores[name] = open_store(store.location.address, store.split, **open_options)
        if ranks.first:
            _LOG.info(
                "The run was started on generation %d of %s and continues with it; the newest is %d.",
                number,
                store.location.name,
                store.location.generation,
            )
    return replace(mixture, stores=stores)
