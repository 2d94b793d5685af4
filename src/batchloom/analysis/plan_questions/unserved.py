"""Reasons why a document is in no step of a run."""

import numpy as np

from batchloom.core.wording import format_count
from batchloom.plan import Plan
from batchloom.plan.mixture import list_weighted_sources
from batchloom.store import Store
from batchloom.store.read import has_media


def explain_unserved(plan: Plan, number: int, document: int, last: int) -> str:
    """Explain why no step up to ``last`` serves a document; its pools must be counted.

    Args:
        plan: the plan.
        number: number of the source in the plan.
        document: number of the document in the source.
        last: last step that was searched.
    """
    name = plan.names[number]
    length = int(plan.stores[name].lengths.take(np.array([document]))[0])
    source_store = plan.stores[name]
    media = source_store.contents.media if isinstance(source_store, Store) else ""
    if not length and media:
        return f"it is empty, or its media are not the ones that source {name!r} takes from its store (media={media!r})"
    if not length:
        return "it is empty: there is no token to serve"
    specs = [plan.orders.order(number, era).spec for era in _list_packings(plan, number)]
    if all(spec.overlong == "drop" and length > spec.seq_len for spec in specs):
        store = plan.stores[name]
        overlong_remedy = "" if isinstance(store, Store) and has_media(store) else ", overlong='split' or 'truncate'"
        return (
            f"it has {length:,} tokens, more than seq_len {max(spec.seq_len for spec in specs):,}, and overlong='drop' "
            f"leaves it out; a seq_len of at least {length:,}{overlong_remedy} would serve it"
        )
    if last < 0:
        return "the run has no step"
    # Count a started group_by_length window to its end, since grouping reorders the rows within it.
    end = min(plan.run.window(plan.positions_of(last)[1] - 1)[1], plan.positions)
    served = _count_served(plan, number, end)
    if not served:
        return f"source {name!r} has no weight up to step {last:,}{_describe_later_start(plan, number, end)}"
    total = plan.orders.order(number, _list_packings(plan, number)[0]).sequences
    skips = " Edits skip steps." if any(edit.skip for edit in plan.edits) else ""
    ended = plan.orders.timeline.end is not None and plan.orders.timeline.end <= end
    later = "The sources end the run" if ended else "Later steps may hold it"
    return (
        f"it is not served up to step {last:,}: until then {name} serves {format_count(served, 'sequence')}, and an "
        f"epoch of it has {total:,}.{skips} {later}"
    )


def _list_packings(plan: Plan, number: int) -> list[int]:
    return [era for era, numbers in enumerate(plan.orders.weighted_sources_by_era) if number in numbers]


def _count_served(plan: Plan, number: int, end: int) -> int:
    """Count the sequences of a source before a position."""
    served_sequences = 0
    for segment in plan.orders.timeline.segments():
        if segment.position < end:
            until = min(plan.orders.timeline.until(segment) or end, end)
            served_sequences += int((segment.served(until) - segment.bases)[number].sum())
    return served_sequences


def _describe_later_start(plan: Plan, number: int, end: int) -> str:
    """Describe when the source gets a weight, if that is after ``end``."""
    for change in plan.orders.run_layout.changes:
        if change.position >= end and plan.names[number] in list_weighted_sources(change.weights, plan.names):
            return f"; it gets one after {format_count(plan.orders.run_layout.steps_until(change.position), 'step')}"
    return ""
