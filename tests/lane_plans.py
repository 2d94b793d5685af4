"""Plans in the order of a stream, over the store that it wrote: an oracle of streams."""

from typing import Any

from batchloom.plan import LanePlan, PlanSpec, choose_lane_pool_size
from batchloom.store import Store, read_range_bounds
from batchloom.store.read import choose_default_overlong


def make_lane_plan(store: Store, *, lanes: int = 1, **settings: Any) -> LanePlan:
    """Make the plan of a stream's settings over its kept store."""
    media = store.manifest.processor is not None
    defaults = {"overlong": choose_default_overlong(store), "pool_size": choose_lane_pool_size(media=media)}
    spec = PlanSpec(**{**defaults, **settings})
    return LanePlan(store, spec, lanes=lanes, bounds=read_range_bounds(store))
