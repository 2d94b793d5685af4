"""Conversions of a batch to forms that the loader does not make itself.

Each function takes a batch of ``Loader(form="rows")``, or a part from ``split``, of numpy arrays or
tensors on any device, and returns a new one with the same ``step`` and ``origin``. All forms train the same tokens.
Masks are in :mod:`batchloom.batches.masks`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import IGNORE_INDEX
from batchloom.batches.assembly.batch_assembly import TOKEN_AXES, Batch, BatchLayout
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.masks import compute_visibility, make_missing_layout_error, make_whole_rows_error
from batchloom.batches.shifted_labels import note_shifted_labels
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan.packing import align_lengths

# Arrays of tokens that a form takes over unchanged.
_CONTENT_KEYS = ("input_ids", "labels", "loss_weights")


def to_padded(batch: Batch, *, multiple_of: int = 8) -> Batch:
    """Return single-document rows (``packing="none"``), cut to the longest.

    Args:
        batch: R rows.
        multiple_of: L is the longest document rounded up to a multiple of it, and at most ``seq_len``.

    Returns:
        ``input_ids``, ``labels`` and ``loss_weights``, unchanged; ``attention_mask`` (1 on the document, 0 on
        padding) and ``position_ids`` (0, 1, 2, ... in every row), each int64 [R, L]. A row without a document (at
        the end of a run) attends to one token of padding, since a softmax over no token is NaN; it has no loss.

    Raises:
        PlanError: a row holds several documents, which the mask would let see each other; or a batch that was
            rebuilt.
        SettingsError: an invalid ``multiple_of``.
    """
    step = as_int(multiple_of)
    if step is None or step < 1:
        raise SettingsError([f"multiple_of: {quote_value(multiple_of)} is not a whole number of at least 1"])
    layout = _require_whole_rows(batch, "to_padded")
    documents = np.diff(layout.pointers)
    if (documents > 1).any():
        raise PlanError(
            f"A row of step {batch.step} holds {int(documents.max())} documents, but to_padded gives one mask per "
            "row, with which they would see each other. Pack one document per row: Loader(packing='none', "
            "group_by_length=True); or use to_varlen, add_dense_mask or add_block_mask for packed "
            "rows."
        )
    lengths = np.ones(len(documents), np.int64)
    lengths[documents == 1] = layout.lengths
    width = min(-(-int(lengths.max()) // step) * step, batch["input_ids"].shape[1])
    columns = np.arange(width)
    mask = (columns < lengths[:, None]).astype(np.int64)
    positions = np.tile(columns, (len(lengths), 1))
    like = batch["input_ids"]
    return _derive_batch(
        batch,
        {
            # The addition copies, so that the wide rows can be freed.
            **{name: batch[name][:, :width] + 0 for name in _CONTENT_KEYS if name in batch},
            "attention_mask": _convert_like(like, mask),
            "position_ids": _convert_like(like, positions),
        },
        replace(layout, align=1),
    )


def to_shifted(batch: Batch) -> Batch:
    """Return the batch with next-token targets, as ``Loader(labels="shifted")`` does.

    Use it with a loss that does not shift.

    Returns:
        The same arrays, with other ``labels``: int64 of the same shape, -100 at each span's last token and wherever
        the next token carries no loss.

    Raises:
        PlanError: a batch that was rebuilt.
    """
    layout = _require_layout(batch, "to_shifted")
    note_shifted_labels()
    return _derive_batch(batch, {**batch, **_make_next_token_arrays(batch, layout)}, replace(layout, labels="shifted"))


def to_varlen(batch: Batch) -> Batch:
    """Return the spans without padding, as ``Loader(form="varlen")`` does.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` int64 [1, T]; ``seq_idx`` int32 [1, T]; ``cu_seq_lens_q`` and
        ``cu_seq_lens_k`` int32 [N + 1]; ``max_length_q`` and ``max_length_k`` (int); see
        :func:`batchloom.batches.assembly.assemble_varlen`. Rows without any span give one token of padding.

    Raises:
        PlanError: a batch that was rebuilt, or the slice of a context-parallel rank.
    """
    layout = _require_whole_rows(batch, "to_varlen")
    like = batch["input_ids"]
    rows, seq_len = like.shape
    begins = np.repeat(np.arange(rows) * seq_len, np.diff(layout.pointers)) + layout.offsets
    lengths = align_lengths(layout.lengths, layout.align)
    if not len(lengths):
        begins = np.zeros(1, np.int64)
        lengths = np.array([layout.align])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    token_indices = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], lengths)
    index = _convert_like(like, token_indices)
    names = [name for name in (*_CONTENT_KEYS, "position_ids") if name in batch]
    tokens = {name: batch[name].reshape(-1)[index][None] for name in names}
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    longest = int(lengths.max())
    flat = {
        **tokens,
        "seq_idx": _convert_like(like, numbers),
        "cu_seq_lens_q": _convert_like(like, bounds.astype(np.int32)),
        "cu_seq_lens_k": _convert_like(like, bounds.astype(np.int32)),
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return _derive_batch(batch, flat, layout)


def to_megatron(batch: Batch, *, attention_mask: bool = False) -> Batch:
    """Return the arrays of Megatron-core's ``GPTDataset``, stacked.

    Args:
        batch: R rows.
        attention_mask: whether to add one, as ``create_attention_mask`` does. Packed rows need it, or ``to_varlen``
            and ``packed_seq_params``, to keep documents apart.

    Returns:
        ``tokens`` and ``labels`` int64 [R, S]; ``loss_mask`` float32 [R, S], the loss weight of each token, 1 without
        weights, 0 without loss;
        ``position_ids`` int64 [R, S], restarting with each span as under ``reset_position_ids``. Labels are
        next-token targets, and 0 without a loss: Megatron indexes scores by them before it masks.
        ``attention_mask`` bool [R, 1, S, S] is True for tokens that must *not* be seen, as in Megatron.

    Raises:
        PlanError: a batch that was rebuilt.
    """
    layout = _require_layout(batch, "to_megatron")
    if attention_mask and layout.sliced:
        raise make_whole_rows_error("attention_mask")
    targets = _make_next_token_arrays(batch, layout)
    arrays = make_megatron_arrays(
        batch["input_ids"], targets["labels"], batch["position_ids"], attention_mask=attention_mask
    )
    if "loss_weights" in targets:
        arrays["loss_mask"] = targets["loss_weights"]
    return _derive_batch(batch, arrays)


def make_megatron_arrays(tokens: Any, labels: Any, positions: Any, *, attention_mask: bool) -> dict[str, Any]:
    """Rename ids, next-token labels and positions of rows as in :func:`to_megatron`.

    Each array is [R, S].
    """
    trained = labels != IGNORE_INDEX
    arrays = {
        "tokens": tokens,
        "labels": labels * trained,
        "loss_mask": trained.astype(np.float32) if isinstance(trained, np.ndarray) else trained.float(),
        "position_ids": positions,
    }
    return arrays | ({"attention_mask": ~compute_visibility(positions)} if attention_mask else {})


def _make_next_token_arrays(batch: Batch, layout: BatchLayout) -> dict[str, Any]:
    """Return next-token targets, and their loss weights if any, in new arrays."""
    arrays = {}
    for name, padding in (("labels", IGNORE_INDEX), ("loss_weights", 0)):
        if name not in batch:
            continue
        values = batch[name]
        following = arrays[name] = values + 0
        if layout.labels != "shifted":
            # A span's first token has no label, so no span takes a label from the next one.
            following[:, :-1] = values[:, 1:]
            following[:, -1] = padding
    return arrays


def _require_layout(batch: Batch, form: str) -> BatchLayout:
    layout = getattr(batch, "layout", None)
    if layout is None:
        raise make_missing_layout_error(form)
    if layout.media or batch["position_ids"].ndim > TOKEN_AXES:
        raise PlanError(
            f"{form} makes arrays of tokens only, but the batch holds images or audio: give the model the batch "
            "itself, or Loader(form='varlen')."
        )
    batch_layout: BatchLayout = layout
    return batch_layout


def _require_whole_rows(batch: Batch, form: str) -> BatchLayout:
    """Return the layout of a batch of complete rows."""
    layout = _require_layout(batch, form)
    if "cu_seq_lens_q" in batch:
        raise PlanError(f"{form} takes rows, but the batch is varlen: give Loader(form='rows').")
    if layout.sliced:
        raise make_whole_rows_error(form)
    return layout


def _derive_batch(batch: Batch, arrays: dict[str, Any], layout: BatchLayout | None = None) -> Batch:
    return Batch(arrays, batch.step, batch.origin, layout)


def _convert_like(array: Any, values: NDArray[Any]) -> Any:
    """Convert numpy values to the kind of ``array``: numpy, or a tensor on its device."""
    if isinstance(array, np.ndarray):
        return values
    return to_torch({"": values})[""].to(array.device)
