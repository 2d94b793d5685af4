"""Loss of batches with ``loss_weights``: the weighted sum over tokens, divided by the number of trained tokens.

The divisor does not depend on the weights, as in ms-swift. So a weight of 2 doubles the gradient of a token, whatever
the weights of the other tokens are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from batchloom.batches import IGNORE_INDEX
from batchloom.core.errors import InputError


def sum_token_losses(
    scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return the weighted sum of the cross-entropy of tokens, in nats: a float32 scalar.

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
    """Return the value of the next token of each row, [rows, seq_len]; ``fill`` for the last."""
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


def apply_loss_weights(model: Any) -> None:
    """Make a causal language model of transformers apply the ``loss_weights`` of a batch.

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
            "batchloom.adapters.weighted_loss.sum_next_token_losses."
        )

    def weighted_loss(*, logits: Tensor, labels: Tensor | None = None, **arguments: Any) -> Any:
        weights = arguments.pop("loss_weights", None)
        if weights is None:
            return plain_loss(logits=logits, labels=labels, **arguments)
        shifted_labels = arguments.get("shift_labels")
        if shifted_labels is not None:
            # Weights of a loader with shifted labels are shifted, too.
            labels = shifted_labels
            total = sum_token_losses(logits.flatten(0, 1), shifted_labels.flatten(), weights.flatten())
        elif labels is not None:
            total = sum_next_token_losses(logits, labels, weights)
            labels = labels[:, 1:]
        count = arguments.get("num_items_in_batch")
        if count is None and labels is not None:
            count = torch.ne(labels, IGNORE_INDEX).sum()
        return total / torch.as_tensor(count, device=total.device).clamp(min=1)

    model.loss_function = weighted_loss
