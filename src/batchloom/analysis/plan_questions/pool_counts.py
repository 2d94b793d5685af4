"""Having the counts of pools where a question needs them: cached ones, and where it would take long, made and kept."""

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

# Walking over more pools than this takes seconds: then the table is made, and kept.
_MAX_WALKED_POOLS = 128


def adopt_tables(plan: Plan) -> bool:
    """Let the sources of a plan adopt those of their tables that are cached; whether all have theirs."""
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        orders = [plan.orders.order(number, era) for number in numbers]
        for order in orders:
            if not order.is_counted and isinstance(order.store, Store):
                load_table(order, table_folders(order.store))
        # Where an edit packs anew is found out with the counts before it.
        if not all(order.is_counted for order in orders):
            return False
    return True


def ensure_tables(plan: Plan) -> None:
    """Have the counts of all pools: cached, or counted here; the log ``batchloom`` tells how far it is.

    Tables of stores on disk are kept for the next question.
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
    """Have what it takes to find a position: near ones are walked to, for far ones there are tables."""
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
    """Positions from the nearest pool that is known (of one source and lane) to the one that is asked for."""
    if plan.spec.lanes > 1 or len(plan.names) > 1:
        return position
    anchor_positions = [cursor.before for cursor in order.anchors[0] if cursor.before <= position]
    return position - max(anchor_positions, default=0)


def write_tables(plan: Plan) -> tuple[Path, ...]:
    """Count the sequences of every pool of every source and keep the tables; the log tells how far it is.

    Returns:
        Their files.

    Raises:
        InputError: a source has only lengths.
        StoreError: the tables can be kept nowhere.
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
