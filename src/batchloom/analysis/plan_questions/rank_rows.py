"""Assignment of the rows of a step to data-parallel ranks."""

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import Loader
from batchloom.batches.loading import RawStream
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Plan, check_world, deal_balanced, deal_contiguous
from batchloom.plan.order import refuse_lane_order, sort_by_cost

Ints = NDArray[np.int64]


def get_plan(data: Plan | Loader) -> Plan:
    """Return the plan of a loader, or the given plan.

    Raises:
        PlanError: it is a stream, or repeats one.
        TypeError: it is neither a plan nor a loader.
    """
    plan: object = data.plan if isinstance(data, Loader) else data
    refuse_lane_order(plan, "cannot be used with explain or when")
    if isinstance(plan, RawStream):
        raise PlanError(
            "A stream cannot be used with explain or when: its steps come one after the other. Make a plan of pools "
            "over prepared data: batchloom prepare, or the store of stream(keep=FOLDER)."
        )
    if isinstance(data, Loader):
        return data.plan
    if not isinstance(data, Plan):
        raise TypeError(
            f"Give a Plan or a Loader, not {type(data).__name__}: explain(Loader(store, seq_len=..., "
            "global_batch_size=...), step)"
        )
    return data


def assign_step_ranks(data: Plan | Loader, step: int, world_size: int) -> Ints:
    """Return the data-parallel rank of each row of a step, int64 [global_batch_size].

    Args:
        data: a plan, or a loader, whose ``balance`` and ``uneven`` apply.
        step: the step.
        world_size: number of data-parallel ranks.

    Raises:
        PlanError: the world size does not divide the step.
    """
    plan = get_plan(data)
    start, stop = plan.positions_of(step)
    size, lanes = stop - start, plan.spec.lanes
    uneven = data.spec.uneven if isinstance(data, Loader) else "refuse"
    check_world(size, 0, world_size, uneven)
    if isinstance(data, Loader) and data.spec.balance and world_size > 1:
        return deal_balanced(data.costs.of(plan, plan.rows(start, stop)), world_size)
    if lanes > 1 and lanes % world_size == 0:
        return plan.run.lanes_of(start, stop) % world_size
    return deal_contiguous(size, world_size)


def sort_by_rank(data: Plan | Loader, step: int, row_ranks: Ints) -> Ints:
    """Return the rows of a step rank by rank, those of each rank in batch order.

    Args:
        data: a plan, or a loader.
        step: the step.
        row_ranks: rank of each row, int64 [global_batch_size].
    """
    if isinstance(data, Loader) and data.spec.balance and row_ranks.any():
        order = sort_by_cost(data.costs.of(data.plan, data.plan.rows(*data.plan.positions_of(step))))
        return order[np.argsort(row_ranks[order], kind="stable")]
    return np.argsort(row_ranks, kind="stable")


def resolve_world(data: Plan | Loader, rank: int | None, world_size: int | None) -> tuple[int | None, int]:
    """Return the data-parallel rank (None for all) and world size of a request.

    Raises:
        SettingsError: a rank is given without a world size, or a number is invalid.
        PlanError: the rank does not exist.
    """
    ranks, number = as_int(world_size), as_int(rank)
    problems = [
        f"{name}: {quote_value(value)} is not a whole number of at least {least}"
        for name, value, parsed_value, least in (
            ("world_size", world_size, ranks, 1),
            ("rank", rank, number, 0),
        )
        if value is not None and (parsed_value is None or parsed_value < least)
    ]
    own = data.spec.mesh.get_placement(data.spec.rank, data.spec.world_size) if isinstance(data, Loader) else None
    if rank is not None and world_size is None and own is None:
        problems.append("world_size: missing; a rank needs the number of ranks")
    if problems:
        raise SettingsError(problems)
    ranks = ranks or (own.world_size if own else 1)
    if number is not None and number >= ranks:
        raise PlanError(f"rank {number} of world_size {ranks} does not exist; ranks run from 0 to {ranks - 1}.")
    return number, ranks
