"""Sequence counts of pools: cached tables, computed and cached if missing."""

from pathlib import Path

from batchloom.batches.loading import (
    MAX_INLINE_POOLS,
    get_open_store,
    load_table,
    table_folders,
    table_name,
    wait_for_table,
)
from batchloom.plan import Plan
from batchloom.plan.order import SourceOrder
from batchloom.store import Store

# Walking over more pools than this takes seconds, so the table is computed and cached instead.
_MAX_WALKED_POOLS = 128


def adopt_tables(plan: Plan) -> bool:
    """Adopt the cached tables of a plan's sources; return whether all have one."""
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        orders = [plan.orders.order(number, era) for number in numbers]
        for order in orders:
            if not order.is_counted and isinstance(order.store, Store):
                load_table(order, table_folders(order.store))
        # The position at which an edit packs again follows from the counts before it.
        if not all(order.is_counted for order in orders):
            return False
    return True


def ensure_tables(plan: Plan) -> None:
    """Load or compute the counts of all pools; progress is logged to ``batchloom``.

    Computed tables of stores on disk are cached.
    """
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        for number in numbers:
            order = plan.orders.order(number, era)
            if order.is_counted:
                continue
            if order.pools.count <= MAX_INLINE_POOLS or not isinstance(order.store, Store):
                order.count_all()
            else:
                wait_for_table(order, table_folders(order.store))


def ensure_tables_for(plan: Plan, position: int) -> None:
    """Prepare to find a position: walk to a near one, use tables for a distant one."""
    if adopt_tables(plan):
        return
    orders = [plan.orders.order(number) for number in plan.orders.weighted_sources]
    if all(order.pools.count <= MAX_INLINE_POOLS for order in orders):
        return
    pools = sum(order.pools.count for order in orders)
    tokens = sum(order.store.tokens for order in orders) / pools
    near = _count_positions_ahead(plan, orders[0], position)
    if near * plan.spec.seq_len / max(tokens, 1) > _MAX_WALKED_POOLS:
        ensure_tables(plan)


def _count_positions_ahead(plan: Plan, order: SourceOrder, position: int) -> int:
    """Count positions from the nearest known pool to the requested one."""
    if plan.spec.lanes > 1 or len(plan.names) > 1:
        return position
    anchor_positions = [cursor.before for cursor in order.anchors[0] if cursor.before <= position]
    return position - max(anchor_positions, default=0)


def write_tables(plan: Plan) -> tuple[Path, ...]:
    """Count the sequences of every pool and cache the tables; progress is logged.

    Returns:
        Paths of the table files.

    Raises:
        InputError: a source has only lengths.
        StoreError: no folder for the tables is writable.
    """
    table_files = []
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        for number in numbers:
            order = plan.orders.order(number, era)
            folders = table_folders(get_open_store(order))
            if not load_table(order, folders):
                wait_for_table(order, folders)
            name = table_name(order)
            table_files += [folder / name for folder in folders if (folder / name).is_file()][:1]
    return tuple(dict.fromkeys(table_files))
