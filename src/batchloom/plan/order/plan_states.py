"""States of a plan: one position of a run as plain values, and resuming from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchloom.core.errors import StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan.mixture import Mixture
from batchloom.plan.order.plan_identity import find_last_fingerprint
from batchloom.plan.order.run_positions import RunPositions
from batchloom.plan.order.source_order import Cursor, SourceCut
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.order.timeline import ServedSegment
from batchloom.plan.packing.plan_spec import ORDER_VERSION


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
    if segment and segment.era:
        eras = range(1, segment.era + 1)
        plain["cuts"] = {
            name: [_cut_to_plain(orders.get_source_cut(orders.names.index(name), era)) for era in eras]
            for name in plain["sources"]
        }
    return {**plain, "check": fingerprint(plain)}


def _find_window_start(run: RunPositions, position: int, end: int | None) -> int:
    return run.window(position if end is None else max(min(position, end) - 1, 0))[0]


def _collect_cursors(orders: SourceOrders, segment: ServedSegment, position: int) -> dict[str, Any]:
    """Return the start of the slot of each source's next sequence."""
    served = segment.served(position)
    return {
        orders.names[number]: _cursor_to_plain(orders.order(number, segment.era).find_cursor(int(served[number])))
        for number in orders.weighted_sources
    }


def _cut_to_plain(source_cut: SourceCut) -> list[int]:
    """Return a cut as three numbers, or four with several lanes."""
    return list(source_cut) if source_cut.before else list(source_cut[:3])


def _cursor_to_plain(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "slot": cursor.slot, "before": cursor.before}


def resume_from_state(
    run: RunPositions, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> int:
    orders = run.orders
    position, end, cursors = _parse_state(orders, origin, journal, state)
    names = {name: number for number, name in enumerate(orders.names)}
    # A state past the end of its run does not list the sources that are exhausted there.
    last_position = position if end is None else max(min(position, end) - 1, 0)
    cursor_position = _find_window_start(run, position, end) if orders.spec.group_by_length else last_position
    exhausted = {names[n]: exhausted_at for n, exhausted_at in state.get("exhausted", {}).items()}
    orders.timeline.adopt(exhausted, cursor_position)
    for name, plain_cuts in state.get("cuts", {}).items():
        for era, plain_cut in enumerate(plain_cuts, 1):
            orders.source_cuts[era, names[name]] = SourceCut(*plain_cut)
    era = len(state.get("cuts", {}) and next(iter(state["cuts"].values())))
    for name, cursor in cursors.items():
        orders.order(names[name], era).anchor(cursor)
    if end is not None and position > end and run.carries_data(end):
        step, inside = orders.run_layout.step_at(end)
        return orders.run_layout.first_position(step) if inside else int(end)
    return position


def _parse_state(
    orders: SourceOrders, origin: dict[str, Any], journal: list[dict[str, Any]], state: dict[str, Any]
) -> tuple[int, int | None, dict[str, Cursor]]:
    with wrap_state_errors():
        state_identity, state_edits, state_fingerprint = (state[name] for name in ("identity", "edits", "fingerprint"))
        cursors = {
            name: Cursor(plain_cursor["epoch"], plain_cursor["slot"], plain_cursor["before"])
            for name, plain_cursor in state["sources"].items()
        }
        position = state["position"]
        end = state["end"]
        if not isinstance(state_edits, list):
            raise TypeError(f"edits is {state_edits!r}")
    check_state(state)
    if state_fingerprint != find_last_fingerprint(origin, journal):
        if state_edits != journal and not list_differences(state_identity, origin):
            raise StateError(
                f"The state's journal ({len(state_edits)} edits) differs from the plan's ({len(journal)}): "
                f"{_describe_first_edit(state_edits, journal)}. Make the loader without edits: it takes those "
                "of the state. Then add new edits to the resumed loader."
            )
        raise StateError(_describe_other_plan(orders, origin, state_identity, state_fingerprint))
    return int(position), end, cursors


@contextmanager
def wrap_state_errors() -> Iterator[None]:
    """Convert errors of reading a state's fields to StateError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fault = f"it lacks {error}" if isinstance(error, KeyError) else repr(error)
        raise StateError(f"This is not a loader's state ({fault}). Give what state_dict() returned.") from error


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse a state of another version, or one that was changed.

    Raises:
        StateError: the state is of another version, was changed after it was saved, or is not a loader's state.
    """
    with wrap_state_errors():
        checked_fields = {name: value for name, value in state.items() if name != "check"}
        version = state["order_version"]
        is_unchanged = state["check"] == fingerprint(checked_fields)
    if version != ORDER_VERSION:
        raise StateError(
            f"The state has order_version {version}, and this batchloom writes {ORDER_VERSION}. Continue with the "
            "version that wrote it, or start without it."
        )
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
    differences = "; ".join(list_differences(state_identity, plan_identity)) or f"fingerprint was {state_fingerprint!r}"
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
