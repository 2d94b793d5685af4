"""State of a stream: the resume position of each lane."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchloom.core.errors import StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import ORDER_VERSION
from batchloom.plan.order import list_differences
from batchloom.preparation.settings import list_recipe_differences
from batchloom.streaming.lane import LanePosition
from batchloom.streaming.rank_feed import LaneCursors

_CURSOR_FIELDS = 8


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    fingerprint: str
    identity: Mapping[str, Any]  # Fields of the fingerprint
    recipe: Mapping[str, Any]  # Recipe of the stream (``identity`` has only its fingerprint); empty in older states
    keep: str | None = None  # Folder of the stream's cached data; None without one


def make_stream_state(facts: StreamIdentity, position: int, cursors: LaneCursors) -> dict[str, Any]:
    """Return a position of a stream as plain JSON values."""
    plain = {
        "order_version": ORDER_VERSION,
        "fingerprint": facts.fingerprint,
        "identity": dict(facts.identity),
        "recipe": dict(facts.recipe),
        "keep": facts.keep,
        "position": position,
        "lanes": {str(lane): [*lane_position, before] for lane, (lane_position, before) in sorted(cursors.items())},
    }
    return {**plain, "check": fingerprint(plain)}


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that any number of ranks can resume from.

    Args:
        states: ``Loader.state_dict()`` of each rank of a stream, all at the same step.

    Raises:
        StateError: the list is empty, or the states are of different streams or steps.
    """
    if not states:
        raise StateError("There are no states to merge; gather state_dict() of every rank.")
    lanes: dict[str, list[int]] = {}
    for state in states:
        lanes |= _validate_state(state)["lanes"]
    first = states[0]
    for state in states[1:]:
        for name in ("fingerprint", "position"):
            if state[name] != first[name]:
                raise StateError(
                    f"The states of the ranks do not belong together: {name} is {first[name]!r} and {state[name]!r}. "
                    "Save all of them at the same step of the same stream."
                )
    cursors = {int(lane): (LanePosition(*cursor[:-1]), cursor[-1]) for lane, cursor in lanes.items()}
    return make_stream_state(_parse_identity(first), first["position"], cursors)


def _parse_identity(state: Mapping[str, Any]) -> StreamIdentity:
    stream_fingerprint, identity = state["fingerprint"], state["identity"]
    return StreamIdentity(stream_fingerprint, identity, state.get("recipe") or {}, state.get("keep"))


def check_same_stream(state: Mapping[str, Any], facts: StreamIdentity) -> StreamIdentity:
    """Return the identity in a state, after a check that it is of this stream."""
    saved_identity = _parse_identity(_validate_state(state))
    if saved_identity.fingerprint == facts.fingerprint:
        return saved_identity
    saved_fields, current_fields = dict(saved_identity.identity), dict(facts.identity)
    differences = (
        list_recipe_differences(dict(saved_identity.recipe), dict(facts.recipe)) if saved_identity.recipe else []
    )
    if differences:
        # The recipe differences explain these two fingerprints.
        hidden = ("recipe", "tokenizer")[: 1 + any(difference.startswith("tokenizer:") for difference in differences)]
        saved_fields, current_fields = (
            {k: v for k, v in identity_fields.items() if k not in hidden}
            for identity_fields in (saved_fields, current_fields)
        )
    differences += list_differences(saved_fields, current_fields)
    raise StateError(
        f"The state belongs to another stream: {'; '.join(differences) or 'its fingerprint differs'}. Give the inputs "
        "and settings the state was made with, or start without it."
    )


def read_stream_state(
    state: Mapping[str, Any], facts: StreamIdentity, rank_lanes: range
) -> tuple[int, LaneCursors, str | None]:
    """Return a state's position, its lane positions, and its ``keep`` folder."""
    saved_identity, lanes = check_same_stream(state, facts), state["lanes"]
    missing = [lane for lane in rank_lanes if str(lane) not in lanes]
    if missing:
        raise StateError(
            f"The state has lanes {', '.join(sorted(lanes, key=int)[:8])}, and this rank needs lane {missing[0]}: it "
            "is the state of a single rank. Merge the states of all ranks with batchloom.streaming.merge_states."
        )
    cursors = {lane: (LanePosition(*lanes[str(lane)][:-1]), lanes[str(lane)][-1]) for lane in rank_lanes}
    return int(state["position"]), cursors, saved_identity.keep


def _validate_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        checked_fields = {name: value for name, value in state.items() if name != "check"}
        checksum_matches = state["check"] == fingerprint(checked_fields)
        sound = all(
            len(cursor) == _CURSOR_FIELDS and all(isinstance(n, int) and n >= 0 for n in cursor)
            for cursor in state["lanes"].values()
        )
        version = state["order_version"]
        sound = sound and isinstance(state["position"], int) and bool(state["identity"].items())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StateError(f"This is not the state of a stream ({error!r}). Give what state_dict() returned.") from error
    if version != ORDER_VERSION:
        raise StateError(
            f"The state has order_version {version}, and this batchloom writes {ORDER_VERSION}. Continue with the "
            "version that wrote it, or start without it."
        )
    if not checksum_matches or not sound:
        raise StateError(
            "The state was changed after it was saved: its check does not match its fields. Use the state as it was "
            "saved."
        )
    return state
