"""Dealing the rows of a step to ranks so that attention costs each of them about the same.

Attention costs a span the square of its tokens. Rows are taken from the costliest down, each by the
rank that has least so far and still has room: longest-processing-time first (Graham: Bounds on
Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 1969) with a bound on the rows of a rank.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.plan.rows import Rows


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The most that a rank has of the attention cost of a step, over the mean of all ranks; 1 is none.

    Attributes:
        in_order: dealt in stretches, as without balancing.
        dealt: dealt as it is.
    """

    in_order: float
    dealt: float


def row_costs(rows: Rows) -> NDArray[np.int64]:
    """Sum of the squared lengths of each row's spans, int64 [R]."""
    sums = np.zeros(len(rows.lengths) + 1, np.int64)
    np.cumsum(rows.lengths * rows.lengths, out=sums[1:])
    return sums[rows.pointers[1:]] - sums[rows.pointers[:-1]]


def stretches(rows: int, world_size: int) -> NDArray[np.int64]:
    """The rank of each row of a step, dealt in stretches (see ``ranks.rank_positions``), int64 [rows]."""
    bounds = np.arange(world_size + 1) * rows // world_size
    return np.repeat(np.arange(world_size), np.diff(bounds))


def balanced(costs: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """The rank of each row of a step, so that ranks cost about the same; at most ceil(B / ranks) rows each.

    A function of its arguments alone: every rank computes it for itself. Never worse than in stretches.

    Args:
        costs: of each row, in the order of positions, int64 [B].
        world_size: number of data-parallel ranks.

    Returns:
        int64 [B].
    """
    plain = stretches(len(costs), world_size)
    dealt = _costliest_first(costs, world_size)
    worst = max_load(costs, plain, world_size)
    return dealt if max_load(costs, dealt, world_size) < worst else plain


def max_load(costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int) -> int:
    """The cost of the rank that has most."""
    return int(_loads(costs, ranks, world_size).max())


def imbalance(costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int) -> float:
    """The most that a rank has over the mean of all; 1 where there is no cost."""
    total = int(costs.sum())
    return max_load(costs, ranks, world_size) * world_size / total if total else 1.0


def _loads(
    costs: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int
) -> NDArray[np.int64]:
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, ranks, costs)
    return loads


def _costliest_first(costs: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    most = -(-len(costs) // world_size)
    rows = [0] * world_size
    # A rank in the queue is one number: its load, then its own.
    queue = list(range(world_size))
    order = np.argsort(-costs, kind="stable")
    dealt = []
    for cost in costs[order].tolist():
        rank = queue[0] % world_size
        dealt.append(rank)
        rows[rank] += 1
        if rows[rank] < most:
            heapq.heapreplace(queue, queue[0] + cost * world_size)
        else:
            heapq.heappop(queue)
    ranks = np.empty(len(costs), np.int64)
    ranks[order] = dealt
    return ranks
