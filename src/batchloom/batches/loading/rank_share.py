"""A process's share of a step: its rows, and its slice of them."""

import functools
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.augment import Augmentation, augment_batch
from batchloom.batches.assembly.batch_assembly import TOKEN_KEYS, BatchLayout, IdCheck, assemble_rows, assemble_varlen
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import (
    Plan,
    PlanSpec,
    check_world,
    compute_imbalance,
    compute_row_costs,
    deal_balanced,
    rank_positions,
    slice_indices,
)
from batchloom.plan.order import (
    Costs,
    Imbalance,
    RankPlacement,
    count_rank_rows,
    deal_in_order,
    find_lane_part,
    sort_by_cost,
)
from batchloom.plan.packing import Rows, format_near_multiples, join_rows, reorder_rows
from batchloom.store import Store, StoreMedia

# (rank, size) as set by torchrun; by srun for a job step; by Open MPI; by MPICH and Intel MPI.
# SLURM_NTASKS is not read: it is also set in a batch script, which is one process.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_RANK_PATTERN = re.compile(r"[0-9]{1,9}")
# Offsets of spans in a batch are 32-bit (cu_seq_lens).
_MAX_TOKENS = (1 << 31) - 1
# A position in the run has 64 bits, whatever the size of a step.
_MAX_STEP = 1 << 40


def find_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world_size) as given, or from torch.distributed or the launcher.

    An initialised torch.distributed takes precedence over the launcher's variables. The default is rank 0 of 1.

    Raises:
        SettingsError: only one of the two is given or set, or a launcher's variables are not numbers.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise SettingsError([f"rank: {rank!r} and world_size: {world_size!r} go together; give both or neither"])
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank_name, size_name in _RANK_VARIABLES:
        rank_text = os.environ.get(rank_name)
        size_text = os.environ.get(size_name)
        if rank_text is None and size_text is None:
            continue
        if rank_name != "RANK" and (rank_text is None or size_text is None):
            continue
        if (
            rank_text is None
            or size_text is None
            or not (_RANK_PATTERN.fullmatch(rank_text) and _RANK_PATTERN.fullmatch(size_text))
        ):
            variables = f"{rank_name}={rank_text!r} and {size_name}={size_text!r}"
            remedy = "set both to numbers, unset both, or give rank= and world_size="
            raise SettingsError(
                [f"rank: the environment has {variables}, which are not a rank and a world size; {remedy}"]
            )
        return int(rank_text), int(size_text)
    return 0, 1


@final
class RowCosts:
    """Costs of rows: squared span lengths, and media tokens for stores with media.

    The work of a model's media encoder grows with the tokens of a medium, whatever else the row holds. Costs
    are the same on every rank: they come from the plan and from immutable files of the store.
    """

    def __init__(self) -> None:
        self._media_by_source: dict[str, tuple[Store, StoreMedia]] = {}

    def of(self, plan: Plan, rows: Rows) -> Ids:
        """Return the costs of rows, int64 [R]; with media int64 [2, R], media tokens last.

        Raises:
            StoreError: a file of media is missing or damaged.
            InputError: a remote store with media cannot be read.
        """
        squares = compute_row_costs(rows)
        if all(self._media_of(name, store) is None for name, store in plan.stores.items()):
            return squares
        return np.stack([squares, self.media_tokens(plan, rows)])

    def media_tokens(self, plan: Plan, rows: Rows) -> Ids:
        """Return the media tokens of each row, int64 [R]; raises as :meth:`of`."""
        tokens = np.zeros(len(rows.documents), np.int64)
        for number, (name, store) in enumerate(plan.stores.items()):
            store_media = self._media_of(name, store)
            if store_media is not None:
                spans = np.flatnonzero(rows.sources == number)
                tokens[spans] = store_media.count_tokens(rows.documents[spans])
        if rows.banned is not None:
            tokens[rows.banned] = 0
        cumulative = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(tokens, out=cumulative[1:])
        return cumulative[rows.pointers[1:]] - cumulative[rows.pointers[:-1]]

    def _media_of(self, name: str, store: object) -> StoreMedia | None:
        """Return the media of a source's store; None if it holds none or only lengths."""
        if not isinstance(store, Store) or store.manifest is None or not store.manifest.processor:
            return None
        cached_media = self._media_by_source.get(name)
        # An edit may replace the store of a source.
        if cached_media is None or cached_media[0] is not store:
            cached_media = self._media_by_source[name] = store, StoreMedia(store)
        return cached_media[1] if cached_media[1].any else None


@dataclass(frozen=True, slots=True)
class RankShare:
    """A process's share of every step."""

    placement: RankPlacement  # location of the process in the mesh
    rows: int  # rows of its batches
    passes: int  # number of micro-batches of ``micro_batch_size`` rows; 1 if none is given

    @property
    def micro_batch_size(self) -> int:
        """Rows of a forward pass."""
        return self.rows // self.passes


@functools.lru_cache(maxsize=1024)
def make_rank_share(plan: PlanSpec, spec: BatchSpec, *, replicated: bool = False) -> RankShare:
    """Return a process's share, after checks that its rows can be distributed and cut.

    Args:
        plan: the plan settings of the steps.
        spec: the batch settings, with the rank.
        replicated: whether every rank has the rows of rank 0.

    Raises:
        PlanError: names sizes that fit.
    """
    placement = spec.mesh.get_placement(spec.rank, spec.world_size)
    size = plan.global_batch_size
    check_world(size, placement.rank, placement.world_size, spec.uneven)
    rows = count_rank_rows(size, placement.world_size, spec.micro_batch_size, spec.uneven)
    if rows * plan.seq_len > _MAX_TOKENS:
        raise PlanError(
            f"A batch of {rows} sequences of {plan.seq_len} tokens holds {rows * plan.seq_len}, more than "
            f"{_MAX_TOKENS}: lower global_batch_size or seq_len, or use more ranks."
        )
    _check_slices(plan, spec)
    passes = rows // (spec.micro_batch_size or rows)
    return RankShare(replace(placement, rank=0) if replicated else placement, rows, passes)


def as_step(step: object) -> int:
    number = as_int(step)
    if number is None or not 0 <= number <= _MAX_STEP:
        hint = "; a batch that was rebuilt from its arrays does not know its step: count the trained steps"
        raise SettingsError(
            [
                f"step: {quote_value(step)} is not a step number (a whole number of at least 0)"
                + (hint if number is not None and number < 0 else "")
            ]
        )
    return number


def check_shares_after_edits(plan: Plan, spec: BatchSpec) -> None:
    for segment in plan.segments:
        make_rank_share(plan.spec_at(segment.step), spec)


def _check_slices(plan: PlanSpec, spec: BatchSpec) -> None:
    mesh = spec.mesh
    part_count = spec.mesh.chunk_count
    cause = f"{mesh.slices} slices for {mesh.context} context ranks cut"
    if spec.form == "varlen" and plan.align % part_count:
        raise PlanError(
            f"{cause} each document into {part_count} in the varlen form, but align is {plan.align}: give "
            f"align={part_count} (part of the plan, so it needs a new run), or form='rows'."
        )
    if plan.seq_len % part_count:
        fitting = format_near_multiples(plan.seq_len, part_count)
        raise PlanError(f"{cause} a sequence into {part_count}, but seq_len is {plan.seq_len}: give {fitting}.")


def select_rank_rows(
    plan: Plan, step: int, share: RankShare, balance: RowCosts | None = None
) -> tuple[Rows, NDArray[np.int64]]:
    """Return a data-parallel rank's rows of a step, and their positions, int64 [R].

    Padding rows without loss come last and have position -1.

    Args:
        plan: the data order.
        step: step number.
        share: share of the rank.
        balance: row costs to distribute rows by; None assigns contiguous ranges.
    """
    placement, (start, stop) = share.placement, plan.positions_of(step)
    part = find_lane_part(plan.spec.lanes, stop - start, placement.rank, placement.world_size)
    if balance is not None and placement.world_size > 1:
        rows = plan.rows(start, stop)
        costs = balance.of(plan, rows)
        ranks = deal_balanced(costs, placement.world_size)
        # Sort by cost, so that micro-batches that run at the same time on all ranks cost about the same.
        order = sort_by_cost(costs)
        own = order[ranks[order] == placement.rank]
        rows = reorder_rows(rows, own)
        positions = start + own
    elif part is not None:
        rows = plan.rows(start, stop, part)
        positions = part.list_positions(start, stop)
    else:
        first, last = rank_positions(0, stop - start, placement.rank, placement.world_size)
        rows = plan.rows(start + first, start + last)
        positions = np.arange(start + first, start + last)
    return pad_rank_rows(rows, positions, share)


def pad_rank_rows(rows: Rows, positions: NDArray[np.int64], share: RankShare) -> tuple[Rows, NDArray[np.int64]]:
    """Pad rows to the size of a share.

    Padding rows without loss come last and have position -1.
    """
    if len(rows) == share.rows:
        return rows, positions
    none = np.full(share.rows - len(rows), -1)
    return join_rows([rows], share.rows), np.concatenate([positions, none])


def measure_imbalance(plan: Plan, step: int, share: RankShare, costs: RowCosts, *, balance: bool) -> Imbalance:
    row_costs = costs.of(plan, plan.rows(*plan.positions_of(step)))
    return assign_balanced_ranks(plan, row_costs, share.placement.world_size, balance=balance)[1]


def assign_balanced_ranks(
    plan: Plan, costs: Costs, world_size: int, *, balance: bool
) -> tuple[NDArray[np.int64], Imbalance]:
    """Return the rank of each row of a step, int64 [B], and the imbalance of costs."""
    if world_size == 1:
        return np.zeros(costs.shape[-1], np.int64), Imbalance(1.0, 1.0)
    plain = deal_in_order(plan.spec.lanes, costs.shape[-1], world_size)
    in_order = compute_imbalance(costs, plain, world_size)
    if not balance:
        return plain, Imbalance(in_order, in_order)
    balanced_ranks = deal_balanced(costs, world_size)
    return balanced_ranks, Imbalance(in_order, compute_imbalance(costs, balanced_ranks, world_size))


def assemble_arrays(
    store: TokenReader,
    rows: Rows,
    plan: PlanSpec,
    spec: BatchSpec,
    context_rank: int,
    augment: tuple[Augmentation, NDArray[np.int64]] | None = None,
    check_ids: IdCheck | None = None,
) -> tuple[dict[str, Any], BatchLayout]:
    """Assemble a context rank's arrays of rows, with their layout.

    ``augment`` includes the position of each row; it is applied before the context rank's slice is taken.
    """
    arrays: dict[str, Any]
    dtype = np.dtype(spec.dtype)
    varlen = spec.form == "varlen"
    if varlen:
        arrays = assemble_varlen(store, rows, spec.labels, plan.align, dtype=dtype, check_ids=check_ids)
    else:
        arrays = assemble_rows(store, rows, plan.seq_len, spec.labels, plan.align, dtype=dtype, check_ids=check_ids)
    if augment:
        augmentation, positions = augment
        augment_batch(arrays, augmentation, rows, positions, plan, labels=spec.labels)
    sliced = spec.mesh.context > 1
    if sliced:
        lengths = np.diff(arrays["cu_seq_lens_q"]).astype(np.int64) if varlen else np.array([plan.seq_len])
        indices = slice_indices(lengths, spec.mesh, context_rank)
        arrays |= {name: arrays[name].take(indices, axis=1) for name in TOKEN_KEYS if name in arrays}
    # Copy, so that a cached batch does not keep the rows of a full pool alive.
    span_arrays = (rows.pointers.copy(), rows.lengths.copy(), rows.row_offsets.copy())
    return arrays, BatchLayout(*span_arrays, plan.align, spec.labels, sliced)


def count_trained_tokens(store: TokenReader, rows: Rows) -> int:
    """Count the tokens with a loss: all but the first of each span and masked ones."""
    if not store.masked:
        return int((rows.lengths - 1).sum())
    long = rows.lengths > 1
    span_flags = store.flags(rows.documents[long], rows.starts[long] + 1, rows.lengths[long] - 1)
    return sum(flags.count_trained() for flags in span_flags)
