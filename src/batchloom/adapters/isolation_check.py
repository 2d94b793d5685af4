"""Check that a model isolates packed documents, for the adapters."""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchloom.batches import (
    Batch,
    DocumentRows,
    Loader,
    ScoreFunction,
    accepts_argument,
    allow_model_calls,
    get_sliding_window,
    is_leaking,
    measure_batch_leakage,
    measure_leakage,
    select_probe_documents,
    to_varlen,
)
from batchloom.batches.loading import get_first_store
from batchloom.core.errors import TrainError

Collator = Callable[[list[Batch]], Mapping[str, Any]]
# Dimensions of a padding mask, [rows, tokens].
_TOKEN_MASK_NDIM = 2


def check_no_leak(model: Any, loader: Loader, collator: Collator, rows: int, *, half: bool = False) -> None:
    """Reject a model that lets packed documents of the store attend to each other.

    Every rank calls it: a sharded model needs all of them for a pass.

    Args:
        model: model as the trainer calls it.
        loader: loader of the documents.
        collator: converts a list of one batch to the model's inputs.
        rows: rows of a pass.
        half: whether the model computes in half precision whatever the dtype of its weights.

    Raises:
        TrainError: documents are not isolated, or the model rejects the inputs; the error names the change to make.
    """
    seq_len = loader.plan.spec.seq_len
    varlen = loader.spec.form == "varlen" and not loader.holds_media
    if loader.holds_media and (misfit := DocumentRows(loader).describe_media_mismatch(model, seq_len)):
        raise TrainError(f"The trainer's model is {misfit}.")
    if loader.plan.spec.packing == "none":
        return
    weight = next(model.parameters())
    training = model.training

    def compute_logits(batch: Batch) -> Tensor:
        model_inputs = dict(collator([to_varlen(batch) if varlen else batch]))
        model_inputs.pop("labels", None)
        _check_model_arguments(model, model_inputs)
        return get_logits(model(**_move_to_device(model_inputs, weight.device)))

    model.eval()
    try:
        if not loader.holds_media:
            _check_sliding_window(model, collator, seq_len)
        packed, mixed = measure_isolation(compute_logits, loader, rows)
    finally:
        model.train(training)
    if not math.isfinite(packed):
        raise TrainError(
            f"{type(model).__name__} has losses that are not finite before its first step: its weights are damaged, "
            "or the form= of its batches leaves tokens that attend to nothing."
        )
    if is_leaking(packed, mixed, half=half or weight.dtype != torch.float32):
        raise TrainError(
            f"{type(model).__name__} lets packed documents see each other: a token's loss is {packed:.2g} nats from "
            f"that of the document alone, and {mixed:.2g} if nothing separates them. Give a model that reads "
            "position_ids, without a mask of ones and without a cache, and attn_implementation='sdpa', 'eager' or "
            "'flex_attention'; or, for a model that reads a mask, batches with the mask of "
            "batchloom.batches.add_dense_mask (make_trainer_parts(form=add_dense_mask); for 'eager': "
            "partial(add_dense_mask, additive='float32')); or Loader(packing='none')."
        )


@allow_model_calls()  # The caller explains what is measured.
def measure_isolation(
    compute_logits: Callable[[Batch], Tensor],
    loader: Loader,
    rows: int,
    *,
    documents: Sequence[Tensor] = (),
    compute_scores: ScoreFunction | None = None,
) -> tuple[float, float]:
    """Return the loss differences of packed and of mixed documents from single ones.

    Args:
        compute_logits: function that returns the logits of a batch.
        loader: loader of the documents.
        rows: rows of a pass.
        documents: documents without media; empty for some of the loader's first store.
        compute_scores: function for documents with media that need not hold all logits; None uses ``compute_logits``.
    """
    seq_len = loader.plan.spec.seq_len
    if not loader.holds_media:
        probes = [*documents] or select_probe_documents(get_first_store(loader.plan.stores), seq_len)
        return measure_leakage(compute_logits, probes, rows) if probes else (0.0, 0.0)

    def select_logits(batch: Batch) -> Callable[[int, slice], Tensor]:
        logits = compute_logits(batch)
        return lambda row, part: logits[row, part]

    document_rows = DocumentRows(loader)
    numbers = document_rows.few(seq_len)
    orders = [numbers, numbers[::-1]][: min(rows, 2)]
    single_batches = [document_rows.batch([[number]]) for order in orders for number in order]
    return measure_batch_leakage(compute_scores or select_logits, document_rows.batch(orders), single_batches)


def _check_sliding_window(model: Any, collator: Collator, seq_len: int) -> None:
    """Reject a mask without the model's sliding window, tested on one long document."""
    window = get_sliding_window(getattr(model, "config", None))
    if window is None or window.size >= seq_len:
        return
    positions = torch.arange(window.size + 1)[None]
    zeros = torch.zeros_like(positions)
    arrays = {"input_ids": zeros, "labels": zeros, "position_ids": positions}
    mask = collator([Batch(arrays)]).get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim <= _TOKEN_MASK_NDIM:
        return
    # The last token is one position outside the window of the first.
    if window.some_layers or mask[0, 0, -1, 0] == mask[0, 0, -1, -1]:
        raise TrainError(
            f"{type(model).__name__} has a sliding window of {window.size:,} tokens, which is missing from the mask "
            "it is given: add_dense_mask(batch, config=model.config) has it, as does form=partial(add_dense_mask, "
            "config=model.config)."
        )


def _check_model_arguments(model: Any, model_inputs: dict[str, Any]) -> None:
    unsupported_names = [name for name in model_inputs if not accepts_argument(model, name)]
    if unsupported_names:
        raise TrainError(
            f"{type(model).__name__} takes no {', '.join(unsupported_names)}, but the collator gives them: give a "
            "model that takes position_ids, which separate packed documents; or give make_trainer_parts(form=) a "
            "function that gives the arguments of this model, such as batchloom.batches.add_dense_mask for a mask; "
            "or Loader(packing='none')."
        )


def _move_to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _move_to_device(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def get_logits(outputs: Any) -> Tensor:
    """Return the logits [R, S, vocabulary] of model outputs: by name, or the first."""
    scores: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return scores
