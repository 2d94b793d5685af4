"""Statistics of a plan's step over all ranks, computed locally from lengths."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.loading.combined_store import is_replicated
from batchloom.batches.loading.loader import Loader
from batchloom.batches.loading.rank_share import assign_balanced_ranks, make_rank_share, select_rank_rows
from batchloom.plan import compute_row_costs
from batchloom.plan.order import Imbalance
from batchloom.plan.packing import Rows, align_lengths

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Statistics of one step over all ranks.

    Attributes:
        tokens: tokens of each data-parallel rank without padding, int64 [ranks].
        sources: tokens of each source of the plan, int64 [sources].
        squares: sum of the squared lengths of all spans.
        trained: tokens that carry a loss; None if it depends on masks.
        capacity: tokens that its sequences can hold.
        computed_tokens: tokens that all ranks compute, including padding.
        imbalance: imbalance of its cost, see ``Loader.imbalance``; None if ranks cannot differ.
        banned: spans that are padding because their documents are banned or their media missing.
    """

    tokens: Ints
    sources: Ints
    squares: int
    trained: int | None
    capacity: int
    computed_tokens: int
    imbalance: Imbalance | None
    banned: int


def collect_step_facts(loader: Loader, step: int) -> StepFacts:
    """Collect the statistics of a step of a loader over a plan."""
    plan, batch_spec = loader.plan, loader.spec
    spec = plan.spec_at(step)
    share = make_rank_share(spec, batch_spec, replicated=is_replicated(loader.store))
    ranks = share.placement.world_size
    copies = ranks if is_replicated(loader.store) else 1
    uneven = None
    if is_replicated(loader.store):
        rows, _ = select_rank_rows(plan, step, share, loader.costs if batch_spec.balance else None)
        owners = np.zeros(len(rows), np.int64)
    else:
        rows = plan.rows(*plan.positions_of(step))
        costs = loader.costs.of(plan, rows)
        owners, uneven = assign_balanced_ranks(plan, step, costs, ranks, balance=batch_spec.balance)
    served = rows.lengths if rows.banned is None else np.where(rows.banned, 0, rows.lengths)
    computed_tokens = ranks * share.rows * spec.seq_len
    if batch_spec.form == "varlen":
        computed_tokens = copies * int(align_lengths(rows.lengths, spec.align).sum())
        # A rank without a span computes padding: models take no empty input.
        spans = np.bincount(owners.repeat(np.diff(rows.pointers)), minlength=ranks // copies)
        computed_tokens += copies * spec.align * int((spans == 0).sum())
    return StepFacts(
        tokens=_sum_by_rank(rows, served, owners, ranks, copies),
        sources=copies * _sum_by_key(rows.sources, served, len(plan.stores)),
        squares=copies * int(compute_row_costs(rows).sum()),
        trained=None if _requires_masks(loader) else copies * int((served - 1).clip(0).sum()),
        capacity=copies * len(rows) * spec.seq_len,
        computed_tokens=computed_tokens,
        imbalance=uneven if ranks > 1 else None,
        banned=0 if rows.banned is None else copies * int(rows.banned.sum()),
    )


def _requires_masks(loader: Loader) -> bool:
    """Return whether masks, not lengths alone, decide which tokens carry a loss."""
    drops = loader.augmentation is not None and loader.augmentation.drops_loss
    return loader.store.masked or drops


def _sum_by_rank(rows: Rows, served: Ints, owners: Ints, ranks: int, copies: int) -> Ints:
    spans = owners.repeat(np.diff(rows.pointers))
    tokens = _sum_by_key(spans, served, ranks)
    return np.repeat(tokens[:1], ranks) if copies > 1 else tokens


def _sum_by_key(keys: NDArray[np.integer], values: Ints, count: int) -> Ints:
    """Sum values by key; exact below 2**53."""
    return np.bincount(keys, values, count).astype(np.int64)
