"""What names an order: every field that decides it, as plain values."""

from typing import TYPE_CHECKING, Any

from batchloom.core.settings import to_plain
from batchloom.plan.mixture import Mixture, weighed_in
from batchloom.plan.packing import ORDER_VERSION, PlanSpec

if TYPE_CHECKING:
    from batchloom.plan.order.plan import Plan

# What may change between a run and its continuation without changing the order.
_NOT_ORDER = ("epochs", "steps", "last")


def origin_identity(plan: "Plan") -> dict[str, Any]:
    """The identity of a plan before any edit.

    A plan of one store has the fields it always had; lanes, alignment and mixture are named where there are some.
    """
    spec = {k: v for k, v in plan.spec.identity_fields().items() if k not in _NOT_ORDER}
    # Orders from before these could be asked for keep their fingerprint.
    for name, default in (("lanes", 1), ("align", 1), ("group_by_length", 0)):
        if spec[name] == default:
            del spec[name]
    if plan.spec.group_by_length:
        spec |= _end(plan.spec)
    identity: dict[str, Any] = {"order_version": ORDER_VERSION, "spec": spec}
    mixture = plan.data
    if not isinstance(mixture, Mixture):
        spec["block"] = plan.pools.blocks[0]
        return {**identity, "sources": {plan.names[0]: source_identity(plan, 0)}}
    used = _used(plan, mixture)
    identity["sources"] = {plan.names[n]: source_identity(plan, n) for n in used}
    identity["mixture"] = {
        "unit": mixture.unit,
        "exhausted": mixture.exhausted,
        "temperature": mixture.temperature,
        "most_epochs": mixture.most_epochs,
        "weights": _plain(mixture.weights),
        "stages": [
            {**to_plain(stage), "weights": _plain(stage.weights)} for stage in mixture.stages
        ],
    }
    if mixture.most_epochs is not None:
        # Weights under a bound of epochs are of a run of so many steps.
        identity["mixture"]["steps"] = plan.spec.steps
    return identity


def _end(spec: PlanSpec) -> dict[str, int]:
    """Where the last window of a run ends, which decides the order of its rows; nothing where all are whole."""
    if spec.epochs is not None or spec.steps is None:
        return {"epochs": spec.epochs or 1}
    return {"steps": spec.steps} if spec.steps % spec.group_by_length else {}


def source_identity(plan: "Plan", number: int) -> dict[str, Any]:
    """What decides the order of one source."""
    name, pools = plan.names[number], plan.order(number).pools
    identity = {"store": plan.stores[name].fingerprint, "documents": pools.documents}
    if isinstance(plan.data, Mixture):
        own = {k: v for k, v in to_plain(plan.source_spec(number)).items() if v is not None}
        identity.update(block=pools.blocks[0], **own)
    return {**identity, **pools.layers_identity()}


def _used(plan: "Plan", mixture: Mixture) -> list[int]:
    found: set[str] = set()
    for weights in (mixture.weights, *(stage.weights for stage in mixture.stages)):
        found |= weighed_in(weights, plan.names)
    return [n for n, name in enumerate(plan.names) if name in found]


def _plain(weights: Any) -> Any:
    """Weights as plain values: numbers as floats, so that 1 and 1.0 are one weight."""
    if isinstance(weights, str):
        return weights
    return {
        name: {
            "weight": float(weight["weight"]),
            "sources": _plain(weight["sources"])
            if hasattr(weight["sources"], "items")
            else list(weight["sources"]),
        }
        if hasattr(weight, "items")
        else float(weight)
        for name, weight in weights.items()
    }
