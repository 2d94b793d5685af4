"""Seeded token augmentation that depends only on a token's position in the run.

The position is the sequence's position in the run and the column in its row. So ranks, workers, forms and
resumes change the same tokens, and each epoch changes others. Draws use SplitMix64 (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014), one generator per sequence, with random access.
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

# A draw has 32 bits, so a probability is exact to 2**-32.
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
        arrays: assembled arrays of either form: [R, seq_len], or [1, T] of the same rows' spans.
        augmentation: the prepared settings.
        rows: the R rows that the batch was assembled from.
        positions: position of each row in the run, int64 [R].
        plan: provides ``seq_len`` and ``align`` of the rows.
        labels: ``aligned`` or ``shifted``.
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
    """Return the index of each span token in the flat rows [R * seq_len], int64 [T]."""
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    aligned_lengths = align_lengths(rows.lengths, plan.align)
    stops = np.cumsum(aligned_lengths)
    begins = row_of * plan.seq_len + rows.row_offsets
    return np.repeat(begins - (stops - aligned_lengths), aligned_lengths) + np.arange(int(stops[-1]))


def _select_tokens(share: float, key: HashKey, positions: Ids, seq_len: int, cells: Ids | None) -> Ids:
    """Return the indices of tokens drawn with probability ``share``."""
    # Each 64-bit number of a row's generator yields two draws, for adjacent tokens.
    steps = np.arange(1, (seq_len + 1) // 2 + 1).astype(np.uint64) * np.uint64(GOLDEN)
    words = mix_in_place(hash_indices(positions, key)[:, None] + steps)
    draws = words.astype("<u8", copy=False).view("<u4")[:, :seq_len].reshape(-1)
    if cells is not None:
        draws = draws[cells]
    return np.flatnonzero(draws <= np.uint32(max(1, round(share * _RANDOM_VALUES)) - 1))


def _random_words(key: HashKey, positions: Ids, cells: Ids, seq_len: int) -> NDArray[np.uint64]:
    """Return a 64-bit random number for each cell of the rows, uint64 [cells]."""
    rows, columns = np.divmod(cells, seq_len)
    words = hash_indices(positions, key)[rows]
    words += (columns + 1).astype(np.uint64) * np.uint64(GOLDEN)
    return mix_in_place(words)


def _mask_with_loss(targets: Ids, token_indices: Ids, label_offset: int) -> NDArray[np.bool_]:
    """Return whether each token carries a loss.

    The label of a token is ``label_offset`` positions before it.
    """
    # Index -1 of the first token wraps to the last label, which as a shifted label has no loss.
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
    """Draw replacement ids by the low half of each word."""
    id_indices = ((words & _LOW_MASK) * np.uint64(augmentation.replacement_ids.size)) >> _HALF_BITS
    return augmentation.replacement_ids[id_indices.astype(np.int64)]
