"""Attention masks for packed rows, for models that do not read ``position_ids``.

torch is imported late: flex_attention's mask is a torch type.
"""

from typing import Any, NamedTuple

import numpy as np

from batchloom.batches.assembly.batch_assembly import TOKEN_AXES, Batch
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import quote_value, suggest

_FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


class SlidingWindow(NamedTuple):
    size: int  # number of tokens that a token sees, including itself
    some_layers: bool  # whether other layers see the full document, so that each kind of layer takes its own mask


def get_sliding_window(config: Any) -> SlidingWindow | None:
    """Return the sliding window of a transformers config; None without one."""
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None)
    if not size or (layers is not None and "sliding_attention" not in layers):
        return None
    return SlidingWindow(int(size), some_layers=layers is not None)


def add_dense_mask(batch: Batch, *, additive: str | None = None, config: Any = None) -> Batch:
    """Return the batch with a causal mask within each span (padding is one more span).

    The mask has R x S x S elements: 2,048 x 2,048 x 32 are 128 MiB as bool. flex_attention and the varlen form
    need none.

    Args:
        batch: a batch of the rows form, R rows of S tokens, numpy arrays or tensors on any device.
        additive: None for bool; or the float type of the scores that the mask is added to, as in transformers'
            eager attention: ``float32``, ``bfloat16`` (tensors only), ``float16`` or ``float64``.
        config: ``model.config``, for a model with a sliding window (Mistral, Gemma 2 and 3, Qwen with
            ``use_sliding_window``): tokens outside the window are not seen.

    Returns:
        The same arrays, and ``attention_mask`` [R, 1, S, S]: True for tokens that are seen. With ``additive``
        these are 0 and all others the smallest number of the type. A config with ``layer_types`` gives a dict of two
        masks, ``full_attention`` and ``sliding_attention``. Such a batch cannot be split: call ``split`` first.

    Raises:
        SettingsError: an unknown type.
        PlanError: the batch is the slice of a context-parallel rank, or a plain dict of its arrays.
    """
    positions = _require_positions(batch, "add_dense_mask")
    window = get_sliding_window(config)
    mask: Any = _make_dense_mask(positions, additive)
    if window is not None:
        sliding = _make_dense_mask(positions, additive, window.size)
        mask = {"full_attention": mask, "sliding_attention": sliding} if window.some_layers else sliding
    return Batch({**batch, "attention_mask": mask}, batch.step, batch.origin, batch.layout)


def add_block_mask(batch: Batch) -> Batch:
    """Return the batch with the same mask as a flex_attention ``BlockMask``.

    It skips blocks without visible tokens. The mask covers all rows: call ``split`` first.

    Args:
        batch: a batch of the rows form, R rows of S tokens, as tensors.

    Returns:
        The same arrays, and ``attention_mask``: a ``torch.nn.attention.flex_attention.BlockMask`` of [R, 1, S, S] on
        their device.

    Raises:
        SettingsError: numpy arrays.
        PlanError: the batch is the slice of a context-parallel rank, or a plain dict of its arrays.
    """
    positions = batch["position_ids"]
    if isinstance(positions, np.ndarray):
        raise SettingsError(["output: 'numpy', but a BlockMask is made of tensors; give Loader(output='torch')"])
    from torch.nn.attention import flex_attention as flex

    spans = (_require_positions(batch, "add_block_mask") == 0).cumsum(1)

    def allowed(row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (spans[row, query] == spans[row, key]) & (query >= key)

    rows, seq_len = spans.shape
    mask = flex.create_block_mask(allowed, rows, None, seq_len, seq_len, device=spans.device)
    return Batch({**batch, "attention_mask": mask}, batch.step, batch.origin, batch.layout)


def add_image_masks(batch: Batch, sliding_window: int) -> Batch:
    """Return the batch with Gemma 3's masks: bidirectional in an image, else causal.

    transformers (5.23) misplaces the images of packed rows in the masks of sliding layers: a document that does
    not begin its row gets another loss than alone. These masks are correct.

    Args:
        batch: a batch of the rows form, R rows of S tokens, with ``token_type_ids``.
        sliding_window: window of the model's text config.

    Returns:
        The same arrays, and ``attention_mask``, a dict of bool [R, 1, S, S]: ``full_attention`` and
        ``sliding_attention``.

    Raises:
        PlanError: the batch is a plain dict of its arrays, or has no ``token_type_ids``.
    """
    positions = _require_positions(batch, "add_image_masks")
    if "token_type_ids" not in batch:
        raise PlanError("image_masks is for stores of Gemma 3's processor: the batch has no token_type_ids.")
    images = batch["token_type_ids"] == 1
    before = images[:, 1:] & images[:, :-1]
    # Number each image, and each other token.
    numbers = (positions >= 0).cumsum(1)
    numbers[:, 1:] -= before.cumsum(1)
    same_span, distance = _compare_tokens(positions)
    same_image = numbers[:, :, None] == numbers[:, None, :]
    visible = same_span & ((distance >= 0) | same_image)
    masks = {"full_attention": visible[:, None], "sliding_attention": (visible & (distance < sliding_window))[:, None]}
    return Batch({**batch, "attention_mask": masks}, batch.step, batch.origin, batch.layout)


def add_model_masks(batch: Batch, sliding_window: int | None) -> Batch:
    """Apply :func:`add_image_masks` to a batch of Gemma 3; return others unchanged.

    Args:
        batch: any batch of the rows form.
        sliding_window: window of the model's text config; None if it has none.
    """
    if "token_type_ids" not in batch:
        return batch
    return add_image_masks(batch, sliding_window or batch["input_ids"].shape[1])


def compute_visibility(positions: Any, window: int | None = None) -> Any:
    """Return which tokens of complete rows each token sees, bool [R, 1, S, S]."""
    same_span, distance = _compare_tokens(positions)
    visible = same_span & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    return visible[:, None]


def _compare_tokens(positions: Any) -> tuple[Any, Any]:
    """Return which tokens share a span, bool [R, S, S], and their distance, [1, S, S]."""
    spans = (positions == 0).cumsum(1)
    columns = (spans[:1] >= 0).cumsum(1)
    return spans[:, :, None] == spans[:, None, :], columns[:, :, None] - columns[:, None, :]


def _make_dense_mask(positions: Any, additive: str | None, window: int | None = None) -> Any:
    visible = compute_visibility(positions, window)
    return visible if additive is None else _to_additive_mask(visible, additive)


def _require_positions(batch: Batch, form: str) -> Any:
    if not isinstance(batch, Batch):
        raise make_missing_layout_error(form)
    if batch.layout is not None and batch.layout.sliced:
        raise make_whole_rows_error(form)
    positions = batch["position_ids"]
    # M-RoPE positions begin with those of the text.
    return positions[0] if positions.ndim > TOKEN_AXES else positions


def make_missing_layout_error(form: str) -> PlanError:
    return PlanError(
        f"A batch that was rebuilt from its arrays does not know its spans, which {form} needs: apply it to a batch "
        "of the Loader (or to a part that split gave), and move the result."
    )


def make_whole_rows_error(form: str) -> PlanError:
    return PlanError(
        f"{form} takes whole rows, but the batch is a context-parallel rank's slice of them: give "
        "Loader(form='varlen', align=...) for documents in slices, or a mesh without context."
    )


def _to_additive_mask(visible: Any, name: str) -> Any:
    """Return 0 for visible tokens, and the smallest number of the type for others."""
    numpy = isinstance(visible, np.ndarray)
    dtype_names = tuple(dtype_name for dtype_name in _FLOAT_DTYPES if not (numpy and dtype_name == "bfloat16"))
    if name not in dtype_names:
        raise SettingsError(
            [f"additive: {quote_value(name)} is none of {', '.join(dtype_names)}{suggest(str(name), dtype_names)}"]
        )
    if numpy:
        dtype = np.dtype(name)
        return np.where(visible, dtype.type(0), np.finfo(dtype).min)
    import torch

    kind = getattr(torch, name)
    hidden = torch.full((), torch.finfo(kind).min, dtype=kind, device=visible.device)
    return torch.where(visible, torch.zeros((), dtype=kind, device=visible.device), hidden)
