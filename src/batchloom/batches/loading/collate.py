"""Rows one by one, as samples of a data set, and batches of several of them, as a collator makes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchloom.batches.assembly import Batch, to_torch
from batchloom.batches.media import stack_by_row
from batchloom.media import get_model_traits, join_features
from batchloom.store import Store, StoreMedia
from batchloom.store.read import has_media

CollateRow = dict[str, Any]

_TOKEN_KEYS = ("input_ids", "labels", "position_ids", "token_type_ids")


def stacks_features_by_row(store: Store) -> bool:
    """Whether the model of a store's processor takes features as ``[rows, images, ...]``."""
    if not has_media(store):
        return False
    state = StoreMedia(store).processor
    return state is not None and get_model_traits(str(state["name"])).by_row


def take_single_row(batch: Batch, *, by_row: bool) -> CollateRow:
    """The row of a batch of one, without the axis of rows: what :func:`collate_rows` takes.

    Args:
        batch: of ``Loader(form="rows")``, with one row.
        by_row: as :func:`stacks_features_by_row` says.

    Returns:
        Arrays of tokens [S] (positions of M-RoPE [4, S]); features with their axis of media first, none where the
        row holds no medium.
    """
    return {
        name: value[..., 0, :] if name in _TOKEN_KEYS else value[0] if by_row else value
        for name, value in batch.items()
    }


def collate_rows(rows: Sequence[Mapping[str, Any]], *, by_row: bool) -> dict[str, Any]:
    """The batch of R rows, as ``Loader`` gives it: tokens stacked, features one behind the other in the order of rows.

    Args:
        rows: as :func:`take_single_row` gives them, of numpy arrays or of tensors in this process's memory.
        by_row: as :func:`stacks_features_by_row` says.

    Returns:
        Arrays of the same kind; a batch without media has no keys of features.
    """
    arrays = [{name: np.asarray(value) for name, value in row.items()} for row in rows]
    batch = {
        # Rows come before the axis of tokens.
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
