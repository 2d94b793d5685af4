"""Dealing the rows of a step to ranks so that they cost each of them about the same.

Attention costs a span the square of its tokens. Rows are taken from the costliest down, each by the
rank that has least so far and still has room: longest-processing-time first (Graham: Bounds on
Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 1969) with a bound on the rows of a rank.

Where rows cost several kinds of work, of which ranks wait for each other in each (attention, and the tower that
media go through), each is counted as a part of all of it in the step, and a row goes to the rank whose largest part
stays least: the greedy rule for vectors (Chekuri and Khanna: On Multidimensional Packing Problems, SIAM J. Comput.
2004).
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.packing import Rows

# Of each row, [B]; of several kinds of work [K, B].
Costs = NDArray[np.int64]
# All of a kind of work in a step, of which rows cost a part.
_COST_SCALE, _SUM_BITS = 1 << 30, 32
_FULL_LOAD = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The most that a rank has of the cost of a step, over the mean of all ranks; 1 is none.

    Where rows cost several kinds of work it is that of the kind that lies most unevenly.

    Attributes:
        in_order: dealt in stretches, as without balancing.
        actual: dealt as it is.
    """

    in_order: float
    actual: float


def compute_row_costs(rows: Rows) -> NDArray[np.int64]:
    """Sum of the squared lengths of each row's spans, int64 [R]."""
    cumulative_costs = np.zeros(len(rows.lengths) + 1, np.int64)
    np.cumsum(rows.lengths * rows.lengths, out=cumulative_costs[1:])
    return cumulative_costs[rows.pointers[1:]] - cumulative_costs[rows.pointers[:-1]]


def deal_contiguous(rows: int, world_size: int) -> NDArray[np.int64]:
    """The rank of each row of a step, dealt in stretches (see ``ranks.rank_positions``), int64 [rows]."""
    bounds = np.arange(world_size + 1) * rows // world_size
    return np.repeat(np.arange(world_size), np.diff(bounds))


def deal_balanced(costs: Costs, world_size: int) -> NDArray[np.int64]:
    """The rank of each row of a step, so that ranks cost about the same; at most ceil(B / ranks) rows each.

    A function of its arguments alone: every rank computes it for itself. Never worse than in stretches, of several
    kinds of work by the one that lies most unevenly.

    Args:
        costs: of each row, in the order of positions, int64 [B]; of several kinds of work int64 [K, B].
        world_size: number of data-parallel ranks.

    Returns:
        int64 [B].
    """
    parts = _normalize_costs(costs)
    contiguous_ranks = deal_contiguous(parts.shape[1], world_size)
    order = sort_by_cost(costs)
    deal = _deal_to_least_loaded if len(parts) == 1 else _deal_by_largest_part
    balanced_ranks = deal(parts, order, world_size)
    contiguous_imbalance = compute_imbalance(costs, contiguous_ranks, world_size)
    return (
        balanced_ranks
        if compute_imbalance(costs, balanced_ranks, world_size) < contiguous_imbalance
        else contiguous_ranks
    )


def sort_by_cost(costs: Costs) -> NDArray[np.int64]:
    """The rows of a step from the costliest down, equal ones by position, int64 [B].

    Of several kinds of work a row counts by its largest part, then by all its parts together.
    """
    parts = _normalize_costs(costs)
    if len(parts) == 1:
        return np.argsort(-parts[0], kind="stable")
    return np.lexsort((-parts.sum(axis=0), -parts.max(axis=0)))


def compute_max_load(costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int) -> int:
    """The cost of the rank that has most."""
    return int(_compute_loads(costs, ranks, world_size).max())


def compute_imbalance(costs: Costs, ranks: NDArray[np.int64], world_size: int) -> float:
    """The most that a rank has over the mean of all; 1 where there is no cost. Of several kinds of work the largest."""
    return max(
        compute_max_load(line, ranks, world_size) * world_size / total if (total := int(line.sum())) else 1.0
        for line in np.atleast_2d(costs)
    )


def _normalize_costs(costs: Costs) -> NDArray[np.int64]:
    """Costs that can be held against each other, int64 [K, B]: what one kind costs as it is, several as parts of all.

    A kind of which there is none plays no part.
    """
    lines = np.atleast_2d(costs)
    nonzero_lines = [line for line in lines if line.any()]
    if len(nonzero_lines) < 2:
        return np.stack(nonzero_lines) if nonzero_lines else lines[:1]
    totals = [int(line.sum()) for line in nonzero_lines]
    return np.array(
        [
            # As whole numbers of any size: squares of long rows would not fit 64 bits.
            [cost * _COST_SCALE // total for cost in line.tolist()]
            for line, total in zip(nonzero_lines, totals, strict=True)
        ],
        np.int64,
    )


def _compute_loads(costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, ranks, costs)
    return loads


def _deal_to_least_loaded(parts: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """Each row to the rank that has least."""
    costs = parts[0]
    max_rows = -(-len(costs) // world_size)
    rows = [0] * world_size
    # A rank in the queue is one number: its load, then its own.
    queue = list(range(world_size))
    ordered_ranks = []
    for cost in costs[order].tolist():
        rank = queue[0] % world_size
        ordered_ranks.append(rank)
        rows[rank] += 1
        if rows[rank] < max_rows:
            heapq.heapreplace(queue, queue[0] + cost * world_size)
        else:
            heapq.heappop(queue)
    ranks = np.empty(len(costs), np.int64)
    ranks[order] = ordered_ranks
    return ranks


def _deal_by_largest_part(parts: NDArray[np.int64], order: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """Each row to the rank whose largest part of any kind of work, then all whose parts, are least with it."""
    kinds, count = parts.shape
    max_rows = -(-count // world_size)
    loads, rows = np.zeros((kinds, world_size), np.int64), np.zeros(world_size, np.int64)
    ranks = np.empty(count, np.int64)
    for row in order.tolist():
        new_loads = loads + parts[:, row, None]
        # Parts add up to at most kinds x 2**30, so that both fit into one number.
        key = (new_loads.max(axis=0) << _SUM_BITS) + new_loads.sum(axis=0)
        key[rows == max_rows] = _FULL_LOAD
        rank = int(key.argmin())
        loads[:, rank] = new_loads[:, rank]
        rows[rank] += 1
        ranks[row] = rank
    return ranks
