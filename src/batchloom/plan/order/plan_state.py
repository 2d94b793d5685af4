"""The state of a run: one position, the plan it belongs to, and where each source stands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.fingerprint import broken_link, fingerprint
from batchloom.plan.mixture import Mixture
from batchloom.plan.order.edits import edit_from
from batchloom.plan.order.source_cuts import Cut
from batchloom.plan.order.source_order import Cursor, quotas
from batchloom.plan.packing import ORDER_VERSION

if TYPE_CHECKING:
    from batchloom.plan.order.plan import Plan
    from batchloom.plan.order.timeline import Segment


def state_at(plan: "Plan", position: int) -> dict[str, Any]:
    """What ``Plan.state`` gives."""
    if position < 0:
        raise StateError(f"Position {position} does not exist; positions count from 0.")
    past = plan.spec.steps is None and not plan.holds(position)
    # At the end of a run, the pool of its last sequence: a longer run goes on from there.
    known = _begun(plan, position, plan.positions if past else None)
    segment = plan.timeline.segment_at(known)
    plain: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        "fingerprint": plan.fingerprint,
        "identity": plan.identity,
        "edits": plan.journal,
        "position": position,
        "end": plan.positions if past else None,
        "sources": _cursors(plan, segment, known) if segment else {},
    }
    gone = {plan.names[n]: where for n, where in plan.timeline.exhausted.items() if where <= known}
    if gone:
        plain["exhausted"] = gone
    tails = plan.timeline.tails(known)
    if tails:
        plain["tails"] = {plan.names[n]: sequences for n, sequences in sorted(tails.items())}
    if segment and segment.era:
        numbers = [plan.names.index(name) for name in plain["sources"]]
        plain["cuts"] = {
            plan.names[n]: [_cut_plain(plan.cut(n, era)) for era in range(1, segment.era + 1)]
            for n in numbers
        }
    return {**plain, "check": fingerprint(plain)}


def _begun(plan: "Plan", position: int, end: int | None) -> int:
    """What the sources' places in a state are of: of a window that has begun, all rows are looked up."""
    return plan.grouped.window(position if end is None else max(min(position, end) - 1, 0))[0]


def _cursors(plan: "Plan", segment: "Segment", position: int) -> dict[str, Any]:
    """Where each source stands: the pool of the sequence it serves next, or for lanes a list of them."""
    served = segment.served(position)
    found: dict[str, Any] = {}
    for number in plan.weighed:
        order = plan.order(number, segment.era)
        tail = plan.timeline.tail(number, segment, position) if number in segment.sources else None
        if tail is not None:
            # What lanes lend then has no place in the order of one; the last that was its own has.
            served[number] = np.maximum(tail.begins - 1, 0)
        if plan.spec.lanes == 1:
            found[plan.names[number]] = _plain(order.stands(0, int(served[number, 0])))
        else:
            found[plan.names[number]] = [
                _plain(order.stands(lane, int(served[number, lane])))
                for lane in range(plan.spec.lanes)
            ]
    return found


def _cut_plain(cut: Cut | None) -> list[Any] | None:
    """A cut of one lane as its three numbers, of several as a list of them; None where they lent each other."""
    if cut is None:
        return None
    return list(cut[0]) if len(cut) == 1 else [list(place) for place in cut]


def _cut_from(told: list[Any]) -> Cut:
    places = [told] if isinstance(told[0], int) else told
    return tuple((epoch, slot, row) for epoch, slot, row in places)


def _plain(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "slot": cursor.slot, "before": cursor.before}


def resume_at(plan: "Plan", state: dict[str, Any]) -> int:
    """What ``Plan.resume`` gives."""
    position, end, cursors = _checked(plan, state)
    names = {name: number for number, name in enumerate(plan.names)}
    tails = {names[n]: quotas(told, plan.spec.lanes) for n, told in state.get("tails", {}).items()}
    # Behind the end of its run a state tells of no source that is exhausted there.
    told = position if end is None else max(min(position, end) - 1, 0)
    begun = _begun(plan, position, end) if plan.spec.group_by_length else told
    plan.timeline.adopt(
        {names[n]: where for n, where in state.get("exhausted", {}).items()}, begun, tails
    )
    for name, cuts in state.get("cuts", {}).items():
        for era, told in enumerate(cuts, 1):
            plan.cuts[era, names[name]] = told and _cut_from(told)
    era = len(state.get("cuts", {}) and next(iter(state["cuts"].values())))
    for name, places in cursors.items():
        order = plan.order(names[name], era)
        for lane, cursor in enumerate(places):
            order.anchor(lane, cursor)
    if end is not None and position > end and plan.holds(end):
        step, inside = plan.course.step_at(end)
        return plan.course.position_of(step) if inside else int(end)
    return position


def with_journal(plan: "Plan", state: Any) -> "Plan":
    """The plan with the edits a state's journal holds, where it has none of its own.

    Raises:
        StateError: the journal is none, or adds a source whose store the plan does not have.
    """
    journal = state.get("edits") if isinstance(state, dict) else None
    if not journal or plan.edits:
        return plan
    try:
        number = broken_link(state.get("identity"), journal)
        if number is not None:
            _refuse_changed(number, journal[number])
        _refuse_without_stores(plan, journal)
        told = [
            {k: v for k, v in entry.items() if k not in ("added", "fingerprint")}
            for entry in journal
        ]
        return plan.with_edits([edit_from(entry) for entry in told])
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, PlanError, SettingsError) as error:
        raise StateError(
            f"The state's journal of edits cannot be used: {error}. Use the one that was saved."
        ) from error


def _refuse_without_stores(plan: "Plan", journal: list[dict[str, Any]]) -> None:
    """Refuse a journal that adds a source whose store the plan does not have.

    Raises:
        StateError: names the source.
    """
    for entry in journal:
        for name in entry.get("added", {}):
            if name not in plan.stores:
                raise StateError(
                    f"The run's journal adds source {name!r} at step {entry['step']}: give its store, too, in the "
                    f"stores of the mixture (fingerprint {entry['added'][name]['store'][:12]})."
                )


def _refuse_changed(number: int, edit: dict[str, Any]) -> NoReturn:
    """Refuse an edit of a journal that does not give the fingerprint that was written beside it.

    Raises:
        StateError: names the edit and its fields.
    """
    fields = ", ".join(name for name in edit if name != "fingerprint")
    raise StateError(
        f"Edit {number} of the journal, at step {edit.get('step')}, was changed after it was written: one of {fields} "
        "is not what its fingerprint says. Use the journal that was saved; a new edit is appended (loader.edit, "
        "batchloom edit)."
    )


def _checked(
    plan: "Plan", state: dict[str, Any]
) -> tuple[int, int | None, dict[str, list[Cursor]]]:
    """Position, end and cursors of a state that belongs to this plan."""
    with refusing_no_state():
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
    check_belongs(state, plan.fingerprint, lambda: _other_plan(plan, theirs, edits, named))
    return int(position), end, cursors


@contextmanager
def refusing_no_state() -> Iterator[None]:
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


def check_belongs(state: dict[str, Any], named: str, other: Callable[[], str]) -> None:
    """Refuse a state of another version or plan, or one that was changed.

    Args:
        state: a state.
        named: fingerprint of the plan that is to go on.
        other: gives what is said where the state is not of that plan.

    Raises:
        StateError: it is no state, or one of these.
    """
    with refusing_no_state():
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


def _other_plan(plan: "Plan", theirs: Any, edits: Any, name: str) -> str:
    """What differs between a state's plan and this one, and what would go on."""
    differ = differences(theirs, plan.identity)
    if not differ and edits != plan.journal:
        return (
            f"The state's journal ({len(edits)} edits) is not the plan's ({len(plan.journal)}): "
            f"{_first_edit(edits, plan.journal)}. A loader made without edits takes those of the state; a new edit "
            "is given to the loader that goes on."
        )
    weights = (
        isinstance(plan.data, Mixture) and differ and all(d.startswith("mixture.") for d in differ)
    )
    added = any(d.startswith("sources.") and " was None and is " in d for d in differ)
    if isinstance(plan.data, Mixture) and plan.data.weights == "size" and added:
        return (
            f"The state belongs to another plan: {'; '.join(differ)}. Weights by size are of every store that is "
            "given: give those the run began with. A source is added to weights that are numbers."
        )
    if weights:
        return (
            f"The state belongs to another plan: {'; '.join(differ)}. Give the weights the run began with, and change "
            "them from a step on by an edit (loader.edit)."
        )
    return other_settings(theirs, plan.identity, name)


def other_settings(theirs: Any, ours: dict[str, Any], named: str) -> str:
    """What is said of a state whose plan was made with something else.

    Args:
        theirs: the state's identity.
        ours: that of the plan.
        named: the state's fingerprint.
    """
    lines = differences(theirs, ours)
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


def _first_edit(theirs: Any, ours: list[dict[str, Any]]) -> str:
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        if one != other:
            return f"edit {number} " + "; ".join(differences(one, other))
    return "one has more"


def differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """Each field in which two plain values differ: ``path was ... and is ...``."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            line
            for key in sorted({*theirs, *ours})
            for line in differences(
                theirs.get(key), ours.get(key), f"{path}.{key}" if path else key
            )
        ]
    return [] if theirs == ours else [f"{path} was {theirs!r} and is {ours!r}"]
