"""Identity of a plan: all that determines its order, and the journal of its edits."""

from typing import Any

from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import to_plain
from batchloom.plan.mixture import Mixture, list_weighted_sources
from batchloom.plan.order.edits import edit_to_plain
from batchloom.plan.order.source_orders import SourceOrders
from batchloom.plan.packing.plan_spec import ORDER_VERSION, PlanSpec

# These fields may change between a run and its continuation without changing the order.
_NON_ORDER_FIELDS = ("epochs", "steps", "last")


def describe_origin(orders: SourceOrders) -> dict[str, Any]:
    """Return the identity of a plan before any edit.

    Lanes, alignment, groups and mixture appear only if they are used.
    """
    spec = {k: v for k, v in orders.spec.identity_fields().items() if k not in _NON_ORDER_FIELDS}
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
    name = orders.names[number]
    pools = orders.order(number).pools
    identity = {"store": orders.stores[name].fingerprint, "documents": pools.documents}
    if isinstance(orders.data, Mixture):
        source_settings = {k: v for k, v in to_plain(orders.shares.get_source_spec(number)).items() if v is not None}
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


def build_journal(orders: SourceOrders, origin: dict[str, Any]) -> list[dict[str, Any]]:
    """Return edits as plain values, each with added sources and its fingerprint."""
    sources = set(origin["sources"])
    order_fingerprint = fingerprint(origin)
    entries = []
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
