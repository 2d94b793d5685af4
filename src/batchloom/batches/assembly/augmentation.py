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
    augmentation: Augmentation,
    rows: Rows,
    positions: Ids,
    plan: PlanSpec,
    *,
    labels: str,
) -> None:
    """Change ``input_ids`` and ``labels`` of an assembled batch in place.

    Args:
        arrays: of either form, as assembled: [R, seq_len], or [1, T] of the same rows' spans.
        augmentation: what to do.
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
    label_offset = 1 if labels == "shifted" else 0
    share = augmentation.settings.mask_prob or augmentation.settings.noise_prob
    if share:
        token_indices = _select_tokens(share, augmentation.choice_key, positions, seq_len, cells)
        token_indices = token_indices[_mask_with_loss(targets, token_indices, label_offset)]
        token_indices = token_indices[
            ~augmentation.special[np.minimum(ids[token_indices], augmentation.special.size - 1)]
        ]
        own = token_indices if cells is None else cells[token_indices]
        words = _random_words(augmentation.replacement_key, positions, own, seq_len)
        if augmentation.settings.mask_prob:
            targets[:] = IGNORE_INDEX
            targets[token_indices] = ids[token_indices]
            _apply_mask(ids, token_indices, words, augmentation)
        else:
            ids[token_indices] = _draw_ids(words, augmentation)
    if augmentation.settings.loss_drop_prob:
        dropped_indices = _select_tokens(
            augmentation.settings.loss_drop_prob, augmentation.drop_key, positions, seq_len, cells
        )
        dropped_indices = dropped_indices[_mask_with_loss(targets, dropped_indices, label_offset)]
        targets[dropped_indices - label_offset] = IGNORE_INDEX


def _compute_token_cells(rows: Rows, plan: PlanSpec) -> Ids:
    """The place of each token of the spans in the rows [R * seq_len], back to back, int64 [T]."""
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    aligned_lengths = align_lengths(rows.lengths, plan.align)
    stops = np.cumsum(aligned_lengths)
    begins = row_of * plan.seq_len + rows.row_offsets
    return np.repeat(begins - (stops - aligned_lengths), aligned_lengths) + np.arange(int(stops[-1]))


def _select_tokens(share: float, key: HashKey, positions: Ids, seq_len: int, cells: Ids | None) -> Ids:
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
    rows, columns = np.divmod(cells, seq_len)
    words = hash_indices(positions, key)[rows]
    words += (columns + 1).astype(np.uint64) * np.uint64(GOLDEN)
    return mix_in_place(words)


def _mask_with_loss(targets: Ids, token_indices: Ids, label_offset: int) -> NDArray[np.bool_]:
    """Whether each of these tokens is trained: its label stands ``label_offset`` places before it."""
    # What would be before the first token is after the last, which has no loss as a shifted label.
    lossy: NDArray[np.bool_] = targets[token_indices - label_offset] != IGNORE_INDEX
    return lossy


def _apply_mask(ids: Ids, token_indices: Ids, words: NDArray[np.uint64], augmentation: Augmentation) -> None:
    draws = (words >> _HALF_BITS).astype(np.int64)
    masked = round(augmentation.settings.mask_replace_prob * _RANDOM_VALUES)
    replaced = masked + round(augmentation.settings.random_replace_prob * _RANDOM_VALUES)
    if augmentation.settings.mask_id is not None:
        ids[token_indices[draws < masked]] = augmentation.settings.mask_id
    is_random = (draws >= masked) & (draws < replaced)
    if augmentation.replacement_ids.size:
        ids[token_indices[is_random]] = _draw_ids(words[is_random], augmentation)


def _draw_ids(words: NDArray[np.uint64], augmentation: Augmentation) -> Ids:
    """Any of the ids that a token may become, by the low half of each word."""
    id_indices = ((words & _LOW_MASK) * np.uint64(augmentation.replacement_ids.size)) >> _HALF_BITS
    return augmentation.replacement_ids[id_indices.astype(np.int64)]
