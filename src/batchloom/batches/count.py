"""``python -m batchloom.batches.count``: counts one plan's table beside the training."""

import json
import os
import sys

from batchloom.batches.tables import load_table, lock_table, table_folders, write_table
from batchloom.core.spec import from_plain
from batchloom.plan.plan import Plan
from batchloom.plan.spec import PlanSpec
from batchloom.store.opening import open_store


def main() -> None:
    """Read a request from standard input; leave at once when another process counts."""
    os.nice(10)
    request = json.load(sys.stdin)
    store = open_store(request["path"], request["split"] or "train", **request["opened"])
    plan = Plan(store, from_plain(PlanSpec, request["spec"]))
    folders = table_folders(store)
    parent = os.getppid()

    def leave_with_parent(_done: int, _pools: int) -> None:
        if os.getppid() != parent:
            raise SystemExit

    with lock_table(plan, folders) as mine:
        if mine and not load_table(plan, folders):
            write_table(plan, folders, leave_with_parent)


if __name__ == "__main__":
    main()
