"""Saying in every answer where its numbers come from, where that is no real data."""

from batchloom.plan import Plan
from batchloom.plan.order import AssumedStore
from batchloom.store import Store


def make_data_label(plan: Plan) -> dict[str, str]:
    """What an answer says of its data: ``source`` is ``assumed`` or ``synthetic``; nothing of real data."""
    stores = plan.stores.values()
    if any(isinstance(store, AssumedStore) for store in stores):
        return {"source": "assumed"}
    if any(isinstance(store, Store) and store.contents.synthetic for store in stores):
        return {"source": "synthetic"}
    return {}
