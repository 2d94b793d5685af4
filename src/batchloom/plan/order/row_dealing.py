"""Assignment of the rows of a step to ranks so that ranks have about equal cost.

Attention costs a span the square of its tokens. Rows are taken from the costliest down. Each goes to the rank
with the lowest cost so far that still has room: longest-processing-time first (Graham: Bounds on Multiprocessing
Timing Anomalies, SIAM J. Appl. Math. 1969) with a bound on the rows of a rank.

Rows may cost several kinds of work at which ranks wait for each other (attention, and the media encoder). Then
each kind is counted as a fraction of its total in the step, and a row goes to the rank whose largest fraction
stays lowest: the greedy rule for vectors (Chekuri and Khanna: On Multidimensional Packing Problems, SIAM J.
Comput. 2004).
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.packing.rows import Rows

# Cost of each row, [B]; for several kinds of work [K, B].
Costs = NDArray[np.int64]
# _COST_SCALE is the total of one kind of work in a step; the cost of a row is a fraction of it.
_COST_SCALE, _SUM_BITS = 1 << 30, 32
_FULL_LOAD = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Highest cost of a rank in a step over the mean of all ranks; 1 is balanced.

    With several kinds of work it is that of the least balanced kind.

    Attributes:
        in_order: imbalance if each rank takes contiguous rows.
        actual: imbalance of the actual assignment.
    """

    in_order: float
    actual: float


def compute_row_costs(rows: Rows) -> NDArray[np.int64]:
    """Return the sum of the squared lengths of each row's spans, int64 [R]."""
    cumulative_costs = np.zeros(len(rows.lengths) + 1, np.int64)
    np.cumsum(rows.lengths * rows.lengths, out=cumulative_costs[1:])
    return cumulative_costs[rows.pointers[1:]] - cumulative_costs[rows.pointers[:-1]]


def deal_contiguous(rows: int, world_size: int) -> NDArray[np.int64]:
    """Return the rank of each row of a step in contiguous ranges, int64 [rows].

    The ranges are those of :func:`rank_positions`.
    """
    bounds = np.arange(world_size + 1) * rows // world_size
    return np.repeat(np.arange(world_size), np.diff(bounds))


def deal_balanced(costs: Costs, world_size: int) -> NDArray[np.int64]:
    """Return the rank of each row of a step such that ranks cost about the same.

    Each rank has at most ceil(B / ranks) rows. The result depends only on the arguments, so that every rank
    computes it by itself. It is never worse than contiguous ranges, judged by the least balanced kind of work.

    Args:
        costs: cost of each row, in the order of positions, int64 [B]; for several kinds of work int64 [K, B].
        world_size: number of data-parallel ranks.

    Returns:
        rank of each row, int64 [B].
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
    """Return the rows of a step from the costliest down, ties by position, int64 [B].

    With several kinds of work rows are sorted by their largest fraction, then by the sum of their fractions.
    """
    parts = _normalize_costs(costs)
    if len(parts) == 1:
        return np.argsort(-parts[0], kind="stable")
    return np.lexsort((-parts.sum(axis=0), -parts.max(axis=0)))


def compute_max_load(costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int) -> int:
    """Return the cost of the rank with the highest cost."""
    return int(_compute_loads(costs, ranks, world_size).max())


def compute_imbalance(costs: Costs, ranks: NDArray[np.int64], world_size: int) -> float:
    """Return the highest cost of a rank over the mean; 1 without any cost.

    With several kinds of work it is the maximum over the kinds.
    """
    return max(
        compute_max_load(line, ranks, world_size) * world_size / total if (total := int(line.sum())) else 1.0
        for line in np.atleast_2d(costs)
    )


def _normalize_costs(costs: Costs) -> NDArray[np.int64]:
    """Make the costs of different kinds comparable, int64 [K, B].

    A single kind keeps its costs; several become fractions of their totals. Kinds without any cost are left out.
    """
    lines = np.atleast_2d(costs)
    nonzero_lines = [line for line in lines if line.any()]
    if len(nonzero_lines) < 2:
        return np.stack(nonzero_lines) if nonzero_lines else lines[:1]
    totals = [int(line.sum()) for line in nonzero_lines]
    return np.array(
        [
            # Python integers are unbounded, and scaled squares of long rows do not fit 64 bits.
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
    """Assign each row to the rank with the lowest cost."""
    costs = parts[0]
    max_rows = -(-len(costs) // world_size)
    rows = [0] * world_size
    # A queue entry is one integer: load * world_size + rank.
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
    """Assign each row to the rank whose largest fraction stays lowest.

    Ties are broken by the sum of the fractions.
    """
    kinds, count = parts.shape
    max_rows = -(-count // world_size)
    loads, rows = np.zeros((kinds, world_size), np.int64), np.zeros(world_size, np.int64)
    ranks = np.empty(count, np.int64)
    for row in order.tolist():
        new_loads = loads + parts[:, row, None]
        # Fractions sum to at most kinds x 2**30, so that both keys fit into one integer.
        key = (new_loads.max(axis=0) << _SUM_BITS) + new_loads.sum(axis=0)
        key[rows == max_rows] = _FULL_LOAD
        rank = int(key.argmin())
        loads[:, rank] = new_loads[:, rank]
        rows[rank] += 1
        ranks[row] = rank
    return ranks
