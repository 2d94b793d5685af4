"""What a run of several stores says before it begins: shares, where they change, what runs out and when."""

import logging
from dataclasses import replace
from typing import Any

from batchloom import Mixture, Plan, Store, open_store
from batchloom.core.wording import counted
from batchloom.train.distributed import Ranks
from batchloom.train.run_folder import RunFolder

_LOG = logging.getLogger("batchloom")
_SHOWN = 6
# Where sources run out follows from their counts: up to so many documents these take a second.
_AT_ONCE = 1 << 20


def mixture_lines(plan: Plan, steps: int) -> list[str]:
    """The effective shares of a run's sources, what its stages and edits change, and what is exhausted.

    Args:
        plan: of the run.
        steps: how many it is to have.
    """
    lines = []
    if isinstance(plan.orders.data, Mixture):
        lines = _mixture_lines(plan, plan.orders.data.exhausted, steps)
    if plan.journal:
        last = plan.journal[-1]
        note = f" ({last['note']})" if "note" in last else ""
        lines.append(
            f"edits  {counted(len(plan.journal), 'edit')} in the journal, the last holds after "
            f"{counted(last['step'], 'step')}{note}"
        )
    return lines


def _mixture_lines(plan: Plan, exhausted: str, steps: int) -> list[str]:
    orders = plan.orders
    end = orders.course.position_of(steps)
    known = exhausted == "repeat" or orders.counted or plan.documents <= _AT_ONCE
    if known:
        orders.timeline.segment_at(end - 1)
    segments = [one for one in orders.timeline.segments() if one.position < end]
    lines = []
    for number, segment in enumerate(segments[:_SHOWN]):
        shares = {
            plan.names[source]: count / segment.schedule.period
            for source, count in zip(segment.sources.tolist(), segment.schedule.counts, strict=True)
        }
        since = f", after {_steps(plan, segment.position)}" if number else ""
        lines.append(f"mix    {_named(shares)} of the sequences{since}")
    if len(segments) > _SHOWN:
        lines.append(f"mix    {len(segments) - _SHOWN:,} later changes of the shares are not shown")
    if not known:
        lines.append(
            f"mix    exhausted={exhausted}: which source runs out is found while its sequences are counted"
        )
    gone = sorted(
        (where, source) for source, where in orders.timeline.exhausted.items() if where < end
    )
    for where, source in gone[:_SHOWN]:
        what = "the run ends" if exhausted == "stop" else "the others take its share"
        lines.append(
            f"mix    {plan.names[source]} is exhausted after {_steps(plan, where)}: {what}"
        )
    if (
        exhausted == "redistribute"
        and orders.timeline.end is not None
        and orders.timeline.end < end
    ):
        done = _steps(plan, orders.timeline.end)
        lines.append(f"mix    all sources are exhausted after {done}, and the run ends")
    return lines


def _steps(plan: Plan, position: int) -> str:
    """How many steps are done where what a position begins holds for whole steps: one number, from 0 or 1 counted."""
    return counted(plan.orders.course.steps_until(position), "step")


def _named(shares: dict[str, float]) -> str:
    largest = sorted(shares, key=lambda name: (-shares[name], name))
    more = f" and {len(shares) - _SHOWN:,} more" if len(shares) > _SHOWN else ""
    return ", ".join(f"{name} {shares[name]:.2%}" for name in largest[:_SHOWN]) + more


def mixture_begun_on(mixture: Mixture, folder: RunFolder, ranks: Ranks) -> Mixture:
    """The mixture with each store of the generation that a run was begun on, told where it is not the one given.

    Raises:
        TrainError: there is no run in the folder.
        GenerationError: a generation was compacted away.
    """
    before = folder.read().get("data")
    sources: Any = before.get("sources") if isinstance(before, dict) else None
    stores = dict(mixture.stores)
    for name, store in mixture.stores.items():
        told = sources.get(name) if isinstance(sources, dict) else None
        if not isinstance(told, dict) or not isinstance(store, Store):
            continue
        named = str(told.get("store"))
        number = None if named == store.fingerprint else store.contents.generation_with(named)
        if number is None or number == store.location.generation:
            continue
        opened = {**store.location.options, "generation": number}
        stores[name] = open_store(store.location.address, store.split, **opened)
        if ranks.first:
            _LOG.info(
                "The run was begun on generation %d of %s and goes on with it; the newest is %d.",
                number,
                store.location.name,
                store.location.generation,
            )
    return replace(mixture, stores=stores)
