"""Positions, rows and tokens of each process: arithmetic that is equal everywhere.

The rows of a step are dealt to ranks so that these have about equal cost. Attention costs a span the square of its
tokens. Rows are taken from the costliest down. Each goes to the rank with the lowest cost so far that still has room:
longest-processing-time first (Graham: Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 1969) with a
bound on the rows of a rank.

Rows may cost several kinds of work at which ranks wait for each other (attention, and the media encoder). Then
each kind is counted as a fraction of its total in the step, and a row goes to the rank whose largest fraction
stays lowest: the greedy rule for vectors (Chekuri and Khanna: On Multidimensional Packing Problems, SIAM J.
Comput. 2004).
"""

import heapq
from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.plan.packing.plan_spec import format_near_multiples, list_choice_problems
from batchloom.plan.packing.rows import Rows

UnevenPolicy = Literal["refuse", "pad"]
SliceLayout = Literal["contiguous", "zigzag"]
# Fastest-varying dimension first, as Megatron and DeepSpeed number their processes.
MESH_ORDER = ("tensor", "context", "data", "pipeline")
_MAX_PEERS = 1 << 24
# Cost of each row, [B]; for several kinds of work [K, B].
Costs = NDArray[np.int64]
# _COST_SCALE is the total of one kind of work in a step; the cost of a row is a fraction of it.
_COST_SCALE = 1 << 30
_SUM_BITS = 32
_FULL_LOAD = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Location of a process in the mesh; its data depends on nothing else."""

    rank: int  # data-parallel rank
    world_size: int  # number of data-parallel ranks
    context_rank: int = 0  # context-parallel rank among the processes that share the rows of a data-parallel rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Mesh of processes that also includes model-parallel dimensions.

    Tensor- and pipeline-parallel peers receive the same data. Context-parallel peers receive the same rows, each
    its slice of them.

    Attributes:
        tensor: tensor-parallel size.
        context: context-parallel size.
        pipeline: pipeline-parallel size.
        slices: slice of a row (of a document in the varlen form) for each context rank: of C ranks,
            ``contiguous`` gives rank c the c-th of C equal slices, ``zigzag`` the c-th and the c-th last of 2C,
            which balances their cost under a causal mask.
        order: dimensions in the order processes are numbered, fastest first.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    slices: SliceLayout = "contiguous"
    order: tuple[str, ...] = MESH_ORDER

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("tensor", "context", "pipeline"), (1, _MAX_PEERS))
        problems = coerce_int_fields(self, sizes) + list_choice_problems(self, {"slices": SliceLayout})
        if sorted(self.order) != sorted(MESH_ORDER):
            problems.append(f"order: {self.order!r} must name {', '.join(MESH_ORDER)}, each once")
        raise_problems([f"mesh.{problem}" for problem in problems])

    @property
    def processes_per_data_rank(self) -> int:
        """Number of processes that share one data-parallel rank."""
        return self.tensor * self.context * self.pipeline

    @property
    def chunk_count(self) -> int:
        """Number of equal chunks of a row; its tokens must be a multiple."""
        if self.context == 1:
            return 1
        return self.context * (2 if self.slices == "zigzag" else 1)

    def get_placement(self, rank: int, world_size: int) -> RankPlacement:
        """Return the placement of process ``rank`` of ``world_size``.

        Raises:
            PlanError: there is no such process, or the world size is not a multiple of ``processes_per_data_rank``.
        """
        check_rank(rank, world_size)
        if world_size % self.processes_per_data_rank:
            raise PlanError(
                f"{world_size} processes cannot form a mesh of tensor {self.tensor} x context {self.context} x "
                f"pipeline {self.pipeline}: each data-parallel rank takes {self.processes_per_data_rank} of them. "
                f"Numbers that fit: {format_near_multiples(world_size, self.processes_per_data_rank)}."
            )
        data = world_size // self.processes_per_data_rank
        sizes_of = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline, "data": data}
        coordinates = {}
        for name in self.order:
            rank, coordinates[name] = divmod(rank, sizes_of[name])
        return RankPlacement(coordinates["data"], data, coordinates["context"])


DATA_PARALLEL = Mesh()


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that a world of this size does not have."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} of world_size {world_size} does not exist; ranks run from 0 to world_size - 1.")


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def format_near_divisors(number: int, target: int) -> str:
    """Format the six divisors of a number that are nearest to the target."""
    return ", ".join(map(str, sorted(sorted(list_divisors(number), key=lambda n: abs(n - target))[:6])))


def check_world(global_batch_size: int, rank: int, world_size: int, uneven: UnevenPolicy = "refuse") -> None:
    """Refuse a rank or a world size that the batch cannot be split over.

    Raises:
        PlanError: lists world sizes that fit.
    """
    check_rank(rank, world_size)
    if uneven == "refuse" and global_batch_size % world_size:
        raise PlanError(
            f"global_batch_size {global_batch_size} cannot be divided evenly among {world_size} ranks. World sizes "
            f"that divide it: {format_near_divisors(global_batch_size, world_size)}; nearby global batch sizes that "
            f"fit: {format_near_multiples(global_batch_size, world_size)}. Or pad with rows that carry no loss: "
            "uneven='pad'."
        )


def count_rank_rows(
    global_batch_size: int, world_size: int, micro_batch_size: int | None = None, uneven: UnevenPolicy = "refuse"
) -> int:
    """Return the rows of each rank's batches, including rows without loss.

    The number is equal on all ranks.
    """
    rows = -(-global_batch_size // world_size)
    micro = micro_batch_size or rows
    if rows % micro and uneven == "refuse":
        raise PlanError(
            f"A rank's {rows} rows of a step (global_batch_size {global_batch_size} over {world_size} ranks) cannot "
            f"be cut into micro-batches of {micro}. Sizes that divide it: {format_near_divisors(rows, micro)}. Or "
            "pad with rows that carry no loss: uneven='pad'."
        )
    return -(-rows // micro) * micro


def rank_positions(step: int, global_batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first and last + 1 position of a rank in a step.

    Ranges are as equal as possible: if the world size does not divide the batch, some have one more.
    """
    start = step * global_batch_size
    first, stop = (n * global_batch_size // world_size for n in (rank, rank + 1))
    return start + first, start + stop


class RowPart(NamedTuple):
    """Every ``stride``-th row of a step, from row ``offset`` on."""

    offset: int = 0
    stride: int = 1

    def count(self, rows: int) -> int:
        """Return the number of rows of the part in a step of ``rows``."""
        return len(range(self.offset, rows, self.stride))

    def list_positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of the part between those of a step, int64 [N]."""
        return np.arange(start + self.offset, stop, self.stride)


WHOLE = RowPart()


def find_lane_part(lanes: int, rows: int, rank: int, world_size: int) -> RowPart | None:
    """Return the rows of a rank in a step with lanes; None for contiguous ones.

    A rank has the rows of some lanes, or several neighbouring ranks share those of one lane.
    """
    if lanes > 1 and lanes % world_size == 0:
        return RowPart(rank, world_size)
    if lanes > 1 and world_size % lanes == 0 and rows % world_size == 0:
        lane, inside = divmod(rank, world_size // lanes)
        return RowPart(lane + lanes * inside, world_size)
    return None


def deal_in_order(lanes: int, rows: int, world_size: int) -> NDArray[np.int64]:
    """Return the rank of each row of a step without regard to cost, int64 [rows]."""
    ranks = deal_contiguous(rows, world_size)
    for rank in range(world_size if lanes > 1 else 0):
        part = find_lane_part(lanes, rows, rank, world_size)
        if part is not None:
            ranks[part.offset :: part.stride] = rank
    return ranks


def slice_indices(lengths: NDArray[np.int64], mesh: Mesh, context_rank: int) -> NDArray[np.int64]:
    """Return the token indices of a context rank in concatenated token ranges.

    Each range is sliced by itself. For one range ``zigzag`` equals Megatron's ``get_batch_on_this_cp_rank``, for
    several TransformerEngine's ``thd_get_partitioned_indices``. ``contiguous`` is the layout of ring attention
    without load balancing.

    Args:
        lengths: tokens of each range, each a multiple of ``mesh.chunk_count``, int64 [N].
        mesh: mesh with the number of context ranks and ``slices``.
        context_rank: the context rank.

    Returns:
        ascending token indices, int64 [sum of lengths / mesh.context].
    """
    own_lengths = lengths // mesh.context
    begins = np.cumsum(lengths) - lengths
    own_begins = np.cumsum(own_lengths) - own_lengths
    shift = begins - own_begins
    if mesh.slices == "contiguous" or mesh.context == 1:
        return np.arange(int(own_lengths.sum())) + np.repeat(shift + context_rank * own_lengths, own_lengths)
    half = own_lengths // 2
    # The offset from the first chunk to the second skips the chunks of the ranks in between.
    first = shift + context_rank * half
    second = shift + (2 * mesh.context - 2 - context_rank) * half
    halves = np.repeat(half, 2)
    return np.arange(int(own_lengths.sum())) + np.repeat(np.stack([first, second], 1).ravel(), halves)


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Highest cost of a rank in a step over the mean of all ranks; 1 is balanced.

    With several kinds of work it is that of the least balanced kind.
    """

    in_order: float  # imbalance if each rank takes contiguous rows
    actual: float  # imbalance of the actual assignment


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
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, ranks, costs)
    return int(loads.max())


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
    """Assign each row to the rank whose largest fraction stays lowest."""
    kinds, count = parts.shape
    max_rows = -(-count // world_size)
    loads = np.zeros((kinds, world_size), np.int64)
    rows = np.zeros(world_size, np.int64)
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
