"""Optimizer step of ``batchloom train`` and ``FSDP2SFTTrainer``."""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchloom.adapters.rank_group import RankGroup
from batchloom.batches import Batch, find_unknown_id
from batchloom.core.errors import TrainError
from batchloom.core.wording import format_count


def update_weights(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    ranks: RankGroup,
    *,
    step: int,
    max_norm: float,
    divisor: float = 1.0,
) -> tuple[float, float]:
    """Run the backward passes of a step, and update the weights.

    Args:
        model: model whose gradients are clipped.
        optimizer: optimizer of its weights.
        losses: summed loss of each pass, computed when it is requested.
        ranks: rank group of this process.
        step: number of the step, from 0.
        max_norm: norm to which gradients are clipped.
        divisor: trained tokens of the step over all ranks; 1 for losses that are already divided.

    Returns:
        the mean loss over all ranks, and the gradient norm before clipping.

    Raises:
        TrainError: the loss or the gradient norm is not finite; the weights are unchanged.
    """
    total = torch.zeros((), device=ranks.device)
    for loss in losses:
        # Data-parallel models average gradients over ranks, but the loss needs their sum.
        with ranks.collective_errors():
            (loss * (ranks.world_size / divisor)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    mean = ranks.total(total.item())[0] / divisor
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm_value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not (math.isfinite(mean) and math.isfinite(norm_value)):
        raise make_divergence_error(f"The loss of step {step} is {mean} (gradient norm {norm_value})", optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm_value


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all weights."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def check_batch_ids(model: nn.Module, batch: Batch) -> None:
    """Reject ids outside the embedding of a model.

    The lookup would otherwise end in a traceback, or in an unusable GPU.
    """
    if (unknown_id := find_unknown_id(model, batch["input_ids"])) is not None:
        number, rows = unknown_id
        valid_ids = f" (ids 0 to {rows - 1:,})" if rows else ""
        raise TrainError(
            f"Step {batch.step} of {batch.origin} holds token id {number}, which is outside the model's "
            f"embedding{valid_ids}. Use the model that the data was prepared for, or enlarge it: "
            "resize_token_embeddings, or for the GPT of batchloom train model.vocab_size in its --config-file."
        )


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup, steps_done: int) -> None:
    """Reject weights and moments that are not finite; every rank calls it.

    The loss is computed before the update and does not show its effect.
    """
    moments = (moment for state in optimizer.state.values() for moment in state.values())
    nonfinite_count = torch.zeros((), device=ranks.device)
    for tensor in (*model.parameters(), *moments):
        # On a GPU this waits only once, for the sum.
        local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        nonfinite_count += (~local_tensor.detach().isfinite()).any().to(ranks.device)
    if ranks.total(nonfinite_count.item())[0]:
        raise make_divergence_error(
            f"Weights or moments are not finite after {format_count(steps_done, 'step')}", optimizer
        )


def make_divergence_error(fact: str, optimizer: torch.optim.Optimizer) -> TrainError:
    """Return the error of a run whose numbers are not finite."""
    return TrainError(
        f"{fact} at a learning rate of {optimizer.param_groups[0]['lr']:.3g}: the run diverged. Lower the learning "
        "rate (--lr, learning_rate), then resume from the newest checkpoint or start again."
    )


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: weight decay on matrices, none on gains and biases."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
