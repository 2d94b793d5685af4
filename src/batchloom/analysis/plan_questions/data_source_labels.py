"""Labels that mark answers on assumed or synthetic data."""

from batchloom.plan import Plan
from batchloom.plan.order import AssumedStore
from batchloom.store import Store


def make_data_label(plan: Plan) -> dict[str, str]:
    """Return ``source``: ``assumed`` or ``synthetic``; an empty dict for real data."""
    stores = plan.stores.values()
    if any(isinstance(store, AssumedStore) for store in stores):
        return {"source": "assumed"}
    if any(isinstance(store, Store) and store.contents.synthetic for store in stores):
        return {"source": "synthetic"}
    return {}
