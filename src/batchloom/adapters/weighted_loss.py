"""Loss of batches with ``loss_weights``.

It is the weighted sum over tokens, divided by the number of trained tokens. The divisor does not depend on the weights,
as in ms-swift. So a weight of 2 doubles the gradient of a token, whatever the weights of the other tokens are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from batchloom.batches import IGNORE_INDEX, are_next_tokens
from batchloom.core.errors import InputError


def sum_token_losses(
    scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return the weighted sum of the losses of tokens in nats: a float32 scalar.

    Args:
        scores: logits [N, vocabulary].
        targets: ids [N], -100 without loss.
        weights: loss weight of each target [N]; None if all are 1.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
    """
    if weights is None:
        return functional.cross_entropy(
            scores.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
        )
    losses = functional.cross_entropy(
        scores.float(), targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=label_smoothing
    )
    return (losses * weights.float()).sum()


def shift_left(values: Tensor, fill: float) -> Tensor:
    """Return the values of next tokens, [rows, seq_len]; ``fill`` for the last."""
    return functional.pad(values[:, 1:], (0, 1), value=fill)


def sum_next_token_losses(logits: Tensor, labels: Tensor, loss_weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum of the next-token losses of rows: a float32 scalar.

    Args:
        logits: [rows, seq_len, vocabulary].
        labels: aligned labels [rows, seq_len], as in a batch.
        loss_weights: aligned weights [rows, seq_len], as in a batch; None if all are 1.
    """
    targets = shift_left(labels, IGNORE_INDEX).flatten()
    weights = None if loss_weights is None else shift_left(loss_weights, 0).flatten()
    return sum_token_losses(logits.flatten(0, 1), targets, weights)


def compute_loss(model: Any, batch: Mapping[str, Any], trained_tokens: int) -> Tensor:
    """Return the loss of a batch under a causal model of transformers.

    It is computed from logits: models divide their own losses by different numbers, and ignore ``loss_weights``. The
    losses of the parts of a step add up to that of the step, over all ranks. Losses of routers are not in it.

    Args:
        model: the model; called without a cache, so that packed documents do not see each other.
        batch: a batch with aligned labels on the model's device, or a part of one.
        trained_tokens: those of the step over all ranks: ``loader.trained_tokens(batch.step)``.

    Raises:
        InputError: the labels are shifted already.
    """
    if are_next_tokens(batch["input_ids"], batch["labels"]):
        raise InputError(
            "The labels of this batch are next tokens already (labels='shifted'), and compute_loss would shift them "
            "again. Give Loader(labels='aligned')."
        )
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_weights")}
    logits = model(**inputs, use_cache=False).logits
    return sum_next_token_losses(logits, batch["labels"], batch.get("loss_weights")) / max(1, trained_tokens)


def apply_loss_weights(model: Any) -> None:
    """Make a causal model of transformers apply the ``loss_weights`` of a batch.

    Without it, ``model(**batch)`` ignores them. Afterwards its ``loss`` is the weighted sum over tokens, divided by
    ``num_items_in_batch``, or by the trained tokens of the call. Calls without ``loss_weights`` have the same loss as
    before.

    Raises:
        InputError: the model is none of transformers, or does not pass further arguments to its loss.
    """
    plain_loss = getattr(model, "loss_function", None)
    if plain_loss is None or not getattr(model, "accepts_loss_kwargs", True):
        raise InputError(
            f"{type(model).__name__} does not pass loss_weights on to its loss. Compute the loss from its logits: "
            "batchloom.adapters.sum_next_token_losses."
        )

    # The arguments are those that transformers passes to a loss, and other inputs of the model.
    def weighted_loss(
        *,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        **_: Any,
    ) -> Any:
        if loss_weights is None:
            return plain_loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
            )
        if shift_labels is None:
            total = sum_next_token_losses(logits, labels, loss_weights)
            targets = labels[:, 1:]
        else:
            # Weights of a loader with shifted labels are shifted, too.
            total = sum_token_losses(logits.flatten(0, 1), shift_labels.flatten(), loss_weights.flatten())
            targets = shift_labels
        count = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        return total / torch.as_tensor(count, device=total.device).clamp(min=1)

    model.loss_function = weighted_loss
