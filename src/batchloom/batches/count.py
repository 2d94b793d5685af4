"""``python -m batchloom.batches.count``: count pool tables in the background."""

import json
import os
import sys

from batchloom.batches.loading.pool_tables import load_table, lock_table, table_folders, write_table
from batchloom.core.settings import from_plain
from batchloom.plan import PlanSpec
from batchloom.plan.order import SourceOrder
from batchloom.store import open_store


def main() -> None:
    """Count the tables that standard input requests, unless another process does."""
    os.nice(10)
    parent = os.getppid()

    def leave_with_parent(_done: int, _pools: int) -> None:
        if os.getppid() != parent:
            raise SystemExit

    for request in json.load(sys.stdin):
        store = open_store(request["path"], request["split"] or "train", **request["opened"])
        order = SourceOrder(request["name"], store, from_plain(PlanSpec, request["spec"]))
        folders = table_folders(store)
        with lock_table(order, folders) as has_lock:
            if has_lock and not load_table(order, folders):
                write_table(order, folders, leave_with_parent)


if __name__ == "__main__":
    main()
