"""The state of a run: one position, the plan it belongs to, and where each source stands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from batchloom.core.errors import StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan.mixture import Mixture
from batchloom.plan.order.plan_identity import PlanIdentity
from batchloom.plan.order.run_positions import RunPositions
from batchloom.plan.order.source_cuts import SourceCut
from batchloom.plan.order.source_order import Cursor, compute_quotas
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import TimelineSegment
from batchloom.plan.packing import ORDER_VERSION


def build_state(run: RunPositions, identity: PlanIdentity, position: int) -> dict[str, Any]:
    """Return the state at a position."""
    if position < 0:
        raise StateError(f"Position {position} does not exist; positions count from 0.")
    orders = run.orders
    past = orders.spec.steps is None and not run.carries_data(position)
    # At the end of a run, the pool of its last sequence: a longer run goes on from there.
    known = _window_start(run, position, run.end if past else None)
    segment = orders.timeline.segment_at(known)
    plain: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        "fingerprint": identity.fingerprint,
        "identity": identity.origin,
        "edits": identity.journal,
        "position": position,
        "end": run.end if past else None,
        "sources": _collect_cursors(orders, segment, known) if segment else {},
    }
    gone = {
        orders.names[n]: where for n, where in orders.timeline.exhausted.items() if where <= known
    }
    if gone:
        plain["exhausted"] = gone
    tails = orders.timeline.tails(known)
    if tails:
        plain["tails"] = {orders.names[n]: sequences for n, sequences in sorted(tails.items())}
    if segment and segment.era:
        numbers = [orders.names.index(name) for name in plain["sources"]]
        plain["cuts"] = {
            orders.names[n]: [
                _cut_to_plain(orders.cut(n, era)) for era in range(1, segment.era + 1)
            ]
            for n in numbers
        }
    return {**plain, "check": fingerprint(plain)}


def _window_start(run: RunPositions, position: int, end: int | None) -> int:
    """What the sources' places in a state are of: of a window that has begun, all rows are looked up."""
    return run.window(position if end is None else max(min(position, end) - 1, 0))[0]


def _collect_cursors(
    orders: SourceOrders, segment: TimelineSegment, position: int
) -> dict[str, Any]:
    """Where each source stands: the pool of the sequence it serves next, or for lanes a list of them."""
    served = segment.served(position)
    found: dict[str, Any] = {}
    for number in orders.weighted_sources:
        order = orders.order(number, segment.era)
        tail = (
            orders.timeline.tail(number, segment, position) if number in segment.sources else None
        )
        if tail is not None:
            # What lanes lend then has no place in the order of one; the last that was its own has.
            served[number] = np.maximum(tail.begins - 1, 0)
        if orders.spec.lanes == 1:
            found[orders.names[number]] = _cursor_to_plain(order.stands(0, int(served[number, 0])))
        else:
            found[orders.names[number]] = [
                _cursor_to_plain(order.stands(lane, int(served[number, lane])))
                for lane in range(orders.spec.lanes)
            ]
    return found


def _cut_to_plain(cut: SourceCut | None) -> list[Any] | None:
    """A cut of one lane as its three numbers, of several as a list of them; None where they lent each other."""
    if cut is None:
        return None
    return list(cut[0]) if len(cut) == 1 else [list(place) for place in cut]


def _cut_from_plain(told: list[Any]) -> SourceCut:
    places = [told] if isinstance(told[0], int) else told
    return tuple((epoch, slot, row) for epoch, slot, row in places)


def _cursor_to_plain(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "slot": cursor.slot, "before": cursor.before}


def resume_from_state(run: RunPositions, identity: PlanIdentity, state: dict[str, Any]) -> int:
    """Check a state and return the position to go on with."""
    orders = run.orders
    position, end, cursors = _parse_state(orders, identity, state)
    names = {name: number for number, name in enumerate(orders.names)}
    tails = {
        names[n]: compute_quotas(told, orders.spec.lanes)
        for n, told in state.get("tails", {}).items()
    }
    # Behind the end of its run a state tells of no source that is exhausted there.
    told = position if end is None else max(min(position, end) - 1, 0)
    begun = _window_start(run, position, end) if orders.spec.group_by_length else told
    orders.timeline.adopt(
        {names[n]: where for n, where in state.get("exhausted", {}).items()}, begun, tails
    )
    for name, cuts in state.get("cuts", {}).items():
        for era, told in enumerate(cuts, 1):
            orders.cuts[era, names[name]] = told and _cut_from_plain(told)
    era = len(state.get("cuts", {}) and next(iter(state["cuts"].values())))
    for name, places in cursors.items():
        order = orders.order(names[name], era)
        for lane, cursor in enumerate(places):
            order.anchor(lane, cursor)
    if end is not None and position > end and run.carries_data(end):
        step, inside = orders.course.step_at(end)
        return orders.course.first_position(step) if inside else int(end)
    return position


def _parse_state(
    orders: SourceOrders, identity: PlanIdentity, state: dict[str, Any]
) -> tuple[int, int | None, dict[str, list[Cursor]]]:
    """Position, end and cursors of a state that belongs to this plan."""
    with wrap_state_errors():
        theirs, edits, named = (state[name] for name in ("identity", "edits", "fingerprint"))
        cursors = {
            name: [
                Cursor(one["epoch"], one["slot"], one["before"])
                for one in (places if isinstance(places, list) else [places])
            ]
            for name, places in state["sources"].items()
        }
        position, end = state["position"], state["end"]
        if not isinstance(edits, list):
            raise TypeError(f"edits is {edits!r}")
    check_state_belongs(
        state,
        identity.fingerprint,
        lambda: _describe_other_plan(orders, identity, theirs, edits, named),
    )
    return int(position), end, cursors


@contextmanager
def wrap_state_errors() -> Iterator[None]:
    """Around what reads a state's fields.

    Raises:
        StateError: it has not the fields of one.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StateError(
            f"This is not a loader's state ({error!r}). Give what state_dict() returned."
        ) from error


def check_state_belongs(state: dict[str, Any], named: str, other: Callable[[], str]) -> None:
    """Refuse a state of another version or plan, or one that was changed.

    Args:
        state: a state.
        named: fingerprint of the plan that is to go on.
        other: gives what is said where the state is not of that plan.

    Raises:
        StateError: it is no state, or one of these.
    """
    with wrap_state_errors():
        rest = {name: value for name, value in state.items() if name != "check"}
        version, theirs = state["order_version"], state["fingerprint"]
        same = state["check"] == fingerprint(rest)
    if version != ORDER_VERSION:
        raise StateError(
            f"The state has order_version {version}, this batchloom makes {ORDER_VERSION}; go on with the "
            "version that wrote it, or start without it."
        )
    if theirs != named:
        raise StateError(other())
    if not same:
        raise StateError(
            "The state was changed after it was saved: its check does not fit its fields. Use the one that "
            "was saved."
        )


def _describe_other_plan(
    orders: SourceOrders, identity: PlanIdentity, theirs: Any, edits: Any, name: str
) -> str:
    """What differs between a state's plan and this one, and what would go on."""
    differ = list_differences(theirs, identity.origin)
    if not differ and edits != identity.journal:
        return (
            f"The state's journal ({len(edits)} edits) is not the plan's ({len(identity.journal)}): "
            f"{_describe_first_edit(edits, identity.journal)}. A loader made without edits takes those of the "
            f"state; a new edit "
            "is given to the loader that goes on."
        )
    weights = (
        isinstance(orders.data, Mixture)
        and differ
        and all(d.startswith("mixture.") for d in differ)
    )
    added = any(d.startswith("sources.") and " was None and is " in d for d in differ)
    if isinstance(orders.data, Mixture) and orders.data.weights == "size" and added:
        return (
            f"The state belongs to another plan: {'; '.join(differ)}. Weights by size are of every store that is "
            "given: give those the run began with. A source is added to weights that are numbers."
        )
    if weights:
        return (
            f"The state belongs to another plan: {'; '.join(differ)}. Give the weights the run began with, and change "
            "them from a step on by an edit (loader.edit)."
        )
    return describe_other_settings(theirs, identity.origin, name)


def describe_other_settings(theirs: Any, ours: dict[str, Any], named: str) -> str:
    """What is said of a state whose plan was made with something else.

    Args:
        theirs: the state's identity.
        ours: that of the plan.
        named: the state's fingerprint.
    """
    lines = list_differences(theirs, ours)
    told = "; ".join(lines) or f"fingerprint was {named!r}"
    packing = ours["spec"]["packing"]
    bare = packing.removesuffix("@2")
    if f"spec.packing was {bare!r} and is {packing!r}" in lines:
        return (
            f"The state belongs to another plan: {told}. It was packed by the first version of this rule: give "
            f"packing={bare + '@1'!r} to go on with it."
        )
    return (
        f"The state belongs to another plan: {told}. Give the settings and the store the state was made with, or start "
        "without it."
    )


def _describe_first_edit(theirs: Any, ours: list[dict[str, Any]]) -> str:
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        if one != other:
            return f"edit {number} " + "; ".join(list_differences(one, other))
    return "one has more"


def list_differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """Each field in which two plain values differ: ``path was ... and is ...``."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            line
            for key in sorted({*theirs, *ours})
            for line in list_differences(
                theirs.get(key), ours.get(key), f"{path}.{key}" if path else key
            )
        ]
    return [] if theirs == ours else [f"{path} was {theirs!r} and is {ours!r}"]
