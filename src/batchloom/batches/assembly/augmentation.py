"""Augmentation as arithmetic: what becomes of a token hangs on its place in the run alone.

A token's place is the position of its sequence in the run and its number in that row, so that
ranks, workers, forms and resumes change the same tokens, and each epoch others. Draws are
SplitMix64's (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014),
a generator for each sequence, whose numbers can be had at any place.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.augment import Augmentation
from batchloom.batches.assembly.batch_assembly import IGNORE_INDEX
from batchloom.core.keyed_hashing import GOLDEN, HashKey, hash_indices, mix_in_place
from batchloom.plan import PlanSpec
from batchloom.plan.packing import Rows, align_lengths

Ids = NDArray[np.int64]

# A draw is a number of 32 bits: which of them a share is below is exact to 2**-32.
_RANDOM_VALUES = 1 << 32
_LOW_MASK, _HALF_BITS = np.uint64(_RANDOM_VALUES - 1), np.uint64(32)


def augment_batch(
    arrays: Mapping[str, Any],
    made: Augmentation,
    rows: Rows,
    positions: Ids,
    plan: PlanSpec,
    *,
    labels: str,
) -> None:
    """Change ``input_ids`` and ``labels`` of an assembled batch in place.

    Args:
        arrays: of either form, as assembled: [R, seq_len], or [1, T] of the same rows' spans.
        made: what to do.
        rows: what the batch was assembled from, R rows.
        positions: of each row in the run, int64 [R].
        plan: ``seq_len`` and ``align`` of the rows.
        labels: ``align_lengths`` or ``shifted``.
    """
    seq_len = plan.seq_len
    ids, targets = arrays["input_ids"].reshape(-1), arrays["labels"].reshape(-1)
    if not rows.lengths.size:
        return
    cells = _compute_token_cells(rows, plan) if ids.size != len(rows) * seq_len else None
    behind = 1 if labels == "shifted" else 0
    share = made.settings.mask_prob or made.settings.noise_prob
    if share:
        chosen = _select_tokens(share, made.choose, positions, seq_len, cells)
        chosen = chosen[_mask_with_loss(targets, chosen, behind)]
        chosen = chosen[~made.special[np.minimum(ids[chosen], made.special.size - 1)]]
        own = chosen if cells is None else cells[chosen]
        words = _random_words(made.become, positions, own, seq_len)
        if made.settings.mask_prob:
            targets[:] = IGNORE_INDEX
            targets[chosen] = ids[chosen]
            _apply_mask(ids, chosen, words, made)
        else:
            ids[chosen] = _draw_ids(words, made)
    if made.settings.loss_drop_prob:
        left = _select_tokens(made.settings.loss_drop_prob, made.drop, positions, seq_len, cells)
        left = left[_mask_with_loss(targets, left, behind)]
        targets[left - behind] = IGNORE_INDEX


def _compute_token_cells(rows: Rows, plan: PlanSpec) -> Ids:
    """The place of each token of the spans in the rows [R * seq_len], back to back, int64 [T]."""
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    taken = align_lengths(rows.lengths, plan.align)
    stops = np.cumsum(taken)
    begins = row_of * plan.seq_len + rows.places
    return np.repeat(begins - (stops - taken), taken) + np.arange(int(stops[-1]))


def _select_tokens(
    share: float, key: HashKey, positions: Ids, seq_len: int, cells: Ids | None
) -> Ids:
    """The numbers of the batch's tokens that a share of all is made of."""
    # Each 64-bit number of a row's generator is two draws, for neighbours.
    steps = np.arange(1, (seq_len + 1) // 2 + 1).astype(np.uint64) * np.uint64(GOLDEN)
    words = mix_in_place(hash_indices(positions, key)[:, None] + steps)
    draws = words.astype("<u8", copy=False).view("<u4")[:, :seq_len].reshape(-1)
    if cells is not None:
        draws = draws[cells]
    return np.flatnonzero(draws <= np.uint32(max(1, round(share * _RANDOM_VALUES)) - 1))


def _random_words(key: HashKey, positions: Ids, cells: Ids, seq_len: int) -> NDArray[np.uint64]:
    """A number of 64 bits for each of these places in the rows, uint64 [cells]."""
    rows, places = np.divmod(cells, seq_len)
    words = hash_indices(positions, key)[rows]
    words += (places + 1).astype(np.uint64) * np.uint64(GOLDEN)
    return mix_in_place(words)


def _mask_with_loss(targets: Ids, places: Ids, behind: int) -> NDArray[np.bool_]:
    """Whether each of these tokens is trained: its label stands ``behind`` places before it."""
    # What would be before the first token is after the last, which has no loss as a shifted label.
    lossy: NDArray[np.bool_] = targets[places - behind] != IGNORE_INDEX
    return lossy


def _apply_mask(ids: Ids, chosen: Ids, words: NDArray[np.uint64], made: Augmentation) -> None:
    draws = (words >> _HALF_BITS).astype(np.int64)
    masked = round(made.settings.mask_replace_prob * _RANDOM_VALUES)
    replaced = masked + round(made.settings.random_replace_prob * _RANDOM_VALUES)
    if made.settings.mask_id is not None:
        ids[chosen[draws < masked]] = made.settings.mask_id
    other = (draws >= masked) & (draws < replaced)
    if made.drawn.size:
        ids[chosen[other]] = _draw_ids(words[other], made)


def _draw_ids(words: NDArray[np.uint64], made: Augmentation) -> Ids:
    """Any of the ids that a token may become, by the low half of each word."""
    picked = ((words & _LOW_MASK) * np.uint64(made.drawn.size)) >> _HALF_BITS
    return made.drawn[picked.astype(np.int64)]
