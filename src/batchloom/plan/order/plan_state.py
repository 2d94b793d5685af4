"""Identity of a plan, and the state of a run: position, plan and source cursors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from batchloom.core.errors import StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import to_plain
from batchloom.plan.mixture.mixture_spec import Mixture, list_weighted_sources
from batchloom.plan.order.run_positions import RunPositions
from batchloom.plan.order.source_order import Cursor, compute_quotas
from batchloom.plan.order.source_orders import SourceCut, SourceOrders
from batchloom.plan.order.timeline import TimelineSegment, edit_to_plain
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec

# These fields may change between a run and its continuation without changing the order.
_NON_ORDER_FIELDS = ("epochs", "steps", "last")


def build_journal(orders: SourceOrders, origin: dict[str, Any]) -> list[dict[str, Any]]:
    """Return edits as plain values, each with added sources and its fingerprint."""
    sources = set(origin["sources"])
    order_fingerprint, entries = fingerprint(origin), []
    for edit in orders.edits:
        entry = edit_to_plain(edit)
        used_sources = list_weighted_sources(edit.weights, orders.names) if edit.weights is not None else set()
        added_sources = sorted(used_sources - sources)
        if added_sources:
            entry["added"] = {name: _describe_source(orders, orders.names.index(name)) for name in added_sources}
            sources |= set(added_sources)
        order_fingerprint = fingerprint([order_fingerprint, entry])
        entries.append({**entry, "fingerprint": order_fingerprint})
    return entries


def find_last_fingerprint(origin: dict[str, Any], journal: list[dict[str, Any]]) -> str:
    """Return the fingerprint of the order after all edits, 32 hex digits."""
    name: str = journal[-1]["fingerprint"] if journal else fingerprint(origin)
    return name


def describe_origin(orders: SourceOrders) -> dict[str, Any]:
    """Return the identity of a plan before any edit.

    Lanes, alignment and mixture appear only if they are used, so older plans keep their fingerprint.
    """
    spec = {k: v for k, v in orders.spec.identity_fields().items() if k not in _NON_ORDER_FIELDS}
    # Default values are left out, because plans that predate these settings must keep their fingerprint.
    for name, default in (("lanes", 1), ("align", 1), ("group_by_length", 0)):
        if spec[name] == default:
            del spec[name]
    if orders.spec.group_by_length:
        spec |= _describe_end(orders.spec)
    identity: dict[str, Any] = {"order_version": ORDER_VERSION, "spec": spec}
    mixture = orders.data
    if not isinstance(mixture, Mixture):
        spec["block"] = orders.pools.blocks[0]
        return {**identity, "sources": {orders.names[0]: _describe_source(orders, 0)}}
    used = _list_used_sources(orders, mixture)
    identity["sources"] = {orders.names[n]: _describe_source(orders, n) for n in used}
    identity["mixture"] = {
        "unit": mixture.unit,
        "exhausted": mixture.exhausted,
        "temperature": mixture.temperature,
        "most_epochs": mixture.most_epochs,
        "weights": _weights_to_plain(mixture.weights),
        "stages": [{**to_plain(stage), "weights": _weights_to_plain(stage.weights)} for stage in mixture.stages],
    }
    if mixture.most_epochs is not None:
        # Weights that are bounded by most_epochs depend on the number of steps.
        identity["mixture"]["steps"] = orders.spec.steps
    return identity


def _describe_end(spec: PlanSpec) -> dict[str, int]:
    """Return the end of the run if its last length-group window may be incomplete.

    In that case the end determines the order of the window's rows.
    """
    if spec.epochs is not None or spec.steps is None:
        return {"epochs": spec.epochs or 1}
    return {"steps": spec.steps} if spec.steps % spec.group_by_length else {}


def _describe_source(orders: SourceOrders, number: int) -> dict[str, Any]:
    name, pools = orders.names[number], orders.order(number).pools
    identity = {"store": orders.stores[name].fingerprint, "documents": pools.documents}
    if isinstance(orders.data, Mixture):
        source_settings = {k: v for k, v in to_plain(orders.source_spec(number)).items() if v is not None}
        identity.update(block=pools.blocks[0], **source_settings)
    return {**identity, **pools.layers_identity()}


def _list_used_sources(orders: SourceOrders, mixture: Mixture) -> list[int]:
    source_names: set[str] = set()
    for weights in (mixture.weights, *(stage.weights for stage in mixture.stages)):
        source_names |= list_weighted_sources(weights, orders.names)
    return [n for n, name in enumerate(orders.names) if name in source_names]


def _weights_to_plain(weights: Any) -> Any:
    """Return weights as plain values, with numbers as floats: 1 and 1.0 are equal."""
    if isinstance(weights, str):
        return weights
    return {
        name: {
            "weight": float(weight["weight"]),
            "sources": _weights_to_plain(weight["sources"])
            if hasattr(weight["sources"], "items")
            else list(weight["sources"]),
        }
        if hasattr(weight, "items")
        else float(weight)
        for name, weight in weights.items()
    }


def build_state(
    run: RunPositions, origin: dict[str, Any], journal: list[dict[str, Any]], position: int
) -> dict[str, Any]:
    if position < 0:
        raise StateError(f"Position {position} does not exist; positions count from 0.")
    orders = run.orders
    is_past_end = orders.spec.steps is None and not run.carries_data(position)
    # Past the end, use the pool of the last sequence, because a longer run continues from there.
    cursor_position = _find_window_start(run, position, run.end if is_past_end else None)
    segment = orders.timeline.segment_at(cursor_position)
    plain: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        "fingerprint": find_last_fingerprint(origin, journal),
        "identity": origin,
        "edits": journal,
        "position": position,
        "end": run.end if is_past_end else None,
        "sources": _collect_cursors(orders, segment, cursor_position) if segment else {},
    }
    exhausted_sources = {
        orders.names[n]: exhausted_at
        for n, exhausted_at in orders.timeline.exhausted.items()
        if exhausted_at <= cursor_position
    }
    if exhausted_sources:
        plain["exhausted"] = exhausted_sources
    tails = orders.timeline.tails(cursor_position)
    if tails:
        plain["tails"] = {orders.names[n]: sequences for n, sequences in sorted(tails.items())}
    if segment and segment.era:
        numbers = [orders.names.index(name) for name in plain["sources"]]
        plain["cuts"] = {
            orders.names[n]: [_cut_to_plain(orders.get_source_cut(n, era)) for era in range(1, segment.era + 1)]
            for n in numbers
        }
    return {**plain, "check": fingerprint(plain)}


def _find_window_start(run: RunPositions, position: int, end: int | None) -> int:
    return run.window(position if end is None else max(min(position, end) - 1, 0))[0]


def _collect_cursors(orders: SourceOrders, segment: TimelineSegment, position: int) -> dict[str, Any]:
    """Return the pool of each source's next sequence, or a list of them per lane."""
    served = segment.served(position)
    cursors: dict[str, Any] = {}
    for number in orders.weighted_sources:
        order = orders.order(number, segment.era)
        tail = orders.timeline.tail(number, segment, position) if number in segment.sources else None
        if tail is not None:
            # Sequences lent by other lanes have no cursor in the lane's own order; use the last one of its own.
            served[number] = np.maximum(tail.begins - 1, 0)
        if orders.spec.lanes == 1:
            cursors[orders.names[number]] = _cursor_to_plain(order.find_cursor(0, int(served[number, 0])))
        else:
            cursors[orders.names[number]] = [
                _cursor_to_plain(order.find_cursor(lane, int(served[number, lane])))
                for lane in range(orders.spec.lanes)
            ]
    return cursors


def _cut_to_plain(source_cut: SourceCut | None) -> list[Any] | None:
    """Return a cut as three numbers, or a list of them per lane."""
    if source_cut is None:
        return None
    return list(source_cut[0]) if len(source_cut) == 1 else [list(lane_cut) for lane_cut in source_cut]


def _cursor_to_plain(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "slot": cursor.slot, "before": cursor.before}


def resume_from_state(
    run: RunPositions, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> int:
    orders = run.orders
    position, end, cursors = _parse_state(orders, origin, journal, state)
    names = {name: number for number, name in enumerate(orders.names)}
    tails = {
        names[n]: compute_quotas(state_value, orders.spec.lanes) for n, state_value in state.get("tails", {}).items()
    }
    # A state past the end of its run does not list the sources that are exhausted there.
    last_position = position if end is None else max(min(position, end) - 1, 0)
    cursor_position = _find_window_start(run, position, end) if orders.spec.group_by_length else last_position
    orders.timeline.adopt(
        {names[n]: exhausted_at for n, exhausted_at in state.get("exhausted", {}).items()}, cursor_position, tails
    )
    for name, plain_cuts in state.get("cuts", {}).items():
        for era, plain_cut in enumerate(plain_cuts, 1):
            lane_cuts = [plain_cut] if plain_cut and isinstance(plain_cut[0], int) else plain_cut
            orders.source_cuts[era, names[name]] = tuple(map(tuple, lane_cuts)) if lane_cuts else None
    era = len(state.get("cuts", {}) and next(iter(state["cuts"].values())))
    for name, lane_cursors in cursors.items():
        order = orders.order(names[name], era)
        for lane, cursor in enumerate(lane_cursors):
            order.anchor(lane, cursor)
    if end is not None and position > end and run.carries_data(end):
        step, inside = orders.run_layout.step_at(end)
        return orders.run_layout.first_position(step) if inside else int(end)
    return position


def _parse_state(
    orders: SourceOrders, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> tuple[int, int | None, dict[str, list[Cursor]]]:
    with wrap_state_errors():
        state_identity, state_edits, state_fingerprint = (state[name] for name in ("identity", "edits", "fingerprint"))
        cursors = {
            name: [
                Cursor(plain_cursor["epoch"], plain_cursor["slot"], plain_cursor["before"])
                for plain_cursor in (plain_cursors if isinstance(plain_cursors, list) else [plain_cursors])
            ]
            for name, plain_cursors in state["sources"].items()
        }
        position, end = state["position"], state["end"]
        if not isinstance(state_edits, list):
            raise TypeError(f"edits is {state_edits!r}")

    def describe_mismatch() -> str:
        if state_edits != journal and not list_differences(state_identity, origin):
            return (
                f"The state's journal ({len(state_edits)} edits) differs from the plan's ({len(journal)}): "
                f"{_describe_first_edit(state_edits, journal)}. Make the loader without edits: it takes those "
                "of the state. Then add new edits to the resumed loader."
            )
        return _describe_other_plan(orders, origin, state_identity, state_fingerprint)

    check_state_belongs(state, find_last_fingerprint(origin, journal), describe_mismatch)
    return int(position), end, cursors


@contextmanager
def wrap_state_errors() -> Iterator[None]:
    """Convert errors of reading a state's fields to StateError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fault = f"it lacks {error}" if isinstance(error, KeyError) else repr(error)
        raise StateError(f"This is not a loader's state ({fault}). Give what state_dict() returned.") from error


def check_state_belongs(state: dict[str, Any], plan_fingerprint: str, describe_mismatch: Callable[[], str]) -> None:
    """Refuse a state of another version or plan, or one that was changed."""
    with wrap_state_errors():
        checked_fields = {name: value for name, value in state.items() if name != "check"}
        version, state_fingerprint = state["order_version"], state["fingerprint"]
        is_unchanged = state["check"] == fingerprint(checked_fields)
    if version != ORDER_VERSION:
        raise StateError(
            f"The state has order_version {version}, and this batchloom writes {ORDER_VERSION}. Continue with the "
            "version that wrote it, or start without it."
        )
    if state_fingerprint != plan_fingerprint:
        raise StateError(describe_mismatch())
    if not is_unchanged:
        raise StateError(
            "The state was changed after it was saved: its check does not match its fields. Use the state as it was "
            "saved."
        )


def _describe_other_plan(
    orders: SourceOrders, origin: dict[str, Any], state_identity: Any, state_fingerprint: str
) -> str:
    differences = list_differences(state_identity, origin)
    only_mixture_differs = (
        isinstance(orders.data, Mixture) and differences and all(d.startswith("mixture.") for d in differences)
    )
    has_added_source = any(d.startswith("sources.") and " was None and is " in d for d in differences)
    if isinstance(orders.data, Mixture) and orders.data.weights == "size" and has_added_source:
        return (
            f"The state belongs to another plan: {'; '.join(differences)}. Weights by size cover every given store: "
            "give the stores the run started with. Sources can be added only to weights that are numbers."
        )
    if only_mixture_differs:
        return (
            f"The state belongs to another plan: {'; '.join(differences)}. Give the weights the run started with, "
            "and change them at a later step by an edit (loader.edit)."
        )
    return describe_other_settings(state_identity, origin, state_fingerprint)


def describe_other_settings(state_identity: Any, plan_identity: dict[str, Any], state_fingerprint: str) -> str:
    lines = list_differences(state_identity, plan_identity)
    differences = "; ".join(lines) or f"fingerprint was {state_fingerprint!r}"
    packing = plan_identity["spec"]["packing"]
    bare = packing.removesuffix("@2")
    if f"spec.packing was {bare!r} and is {packing!r}" in lines:
        return (
            f"The state belongs to another plan: {differences}. It was packed by the first version of this rule: "
            f"give packing={bare + '@1'!r} to continue it."
        )
    return (
        f"The state belongs to another plan: {differences}. Give the settings and the store the state was made "
        "with, or start without it."
    )


def _describe_first_edit(state_edits: Any, plan_edits: list[dict[str, Any]]) -> str:
    for number, (state_edit, plan_edit) in enumerate(zip(state_edits, plan_edits, strict=False)):
        if state_edit != plan_edit:
            return f"edit {number} " + "; ".join(list_differences(state_edit, plan_edit))
    return "one of them has more edits"


def list_differences(old_value: Any, new_value: Any, path: str = "") -> list[str]:
    """List the fields in which two plain values differ: ``path was ... and is ...``."""
    if isinstance(old_value, dict) and isinstance(new_value, dict):
        return [
            line
            for key in sorted({*old_value, *new_value})
            for line in list_differences(old_value.get(key), new_value.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old_value == new_value else [f"{path} was {old_value!r} and is {new_value!r}"]
