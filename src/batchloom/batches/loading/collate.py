"""Single rows as data set samples, and their collation into batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.media.batch_media import stack_by_row
from batchloom.media import get_model_traits, join_features
from batchloom.store import Store, StoreMedia
from batchloom.store.read import has_media

CollateRow = dict[str, Any]

_TOKEN_KEYS = ("input_ids", "labels", "position_ids", "token_type_ids")


def stacks_features_by_row(store: Store) -> bool:
    """Return whether a store's model takes features as ``[rows, images, ...]``."""
    if not has_media(store):
        return False
    state = StoreMedia(store).processor
    return state is not None and get_model_traits(str(state["name"])).by_row


def take_single_row(batch: Batch, *, by_row: bool) -> CollateRow:
    """Return the row of a one-row batch as a sample for :func:`collate_rows`.

    Returns:
        Arrays of tokens [S] (positions of M-RoPE [4, S]); features with media as their first axis, or none if the
        row holds no medium.
    """
    return {
        name: value[..., 0, :] if name in _TOKEN_KEYS else value[0] if by_row else value
        for name, value in batch.items()
    }


def collate_rows(rows: Sequence[Mapping[str, Any]], *, by_row: bool) -> dict[str, Any]:
    """Collate R samples into a batch as ``Loader`` makes it.

    Tokens are stacked; features are concatenated in the order of rows.

    Returns:
        Arrays of the same kind; a batch without media has no feature keys.
    """
    arrays = [{name: np.asarray(value) for name, value in row.items()} for row in rows]
    batch = {
        # The axis of rows precedes the axis of tokens.
        name: np.stack([row[name] for row in arrays], axis=value.ndim - 1)
        for name, value in arrays[0].items()
        if name in _TOKEN_KEYS
    }
    holding = [number for number, row in enumerate(arrays) if len(row) > len(batch)]
    features = [{name: value for name, value in arrays[number].items() if name not in batch} for number in holding]
    if features and by_row:
        alone = [{name: value[None] for name, value in row_features.items()} for row_features in features]
        batch |= stack_by_row(alone, np.array(holding), len(rows))
    elif features:
        batch |= join_features(features)
    return batch if isinstance(rows[0]["input_ids"], np.ndarray) else to_torch(batch)
