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


def update_weights(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    ranks: RankGroup,
    *,
    lr: float,
    max_norm: float,
    divisor: float = 1.0,
) -> tuple[float, float]:
    """Run the backward passes of a step, and update the weights.

    The weights stay unchanged if the loss or the gradient norm is not finite.

    Args:
        model: model whose gradients are clipped.
        optimizer: optimizer of its weights.
        losses: summed loss of each pass, computed when it is requested.
        ranks: rank group of this process.
        lr: learning rate.
        max_norm: norm to which gradients are clipped.
        divisor: trained tokens of the step over all ranks; 1 for losses that are already divided.

    Returns:
        the mean loss over all ranks, and the gradient norm before clipping.
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
    if math.isfinite(mean) and math.isfinite(norm_value):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm_value


def has_only_finite(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup) -> bool:
    """Return whether all weights and moments are finite; every rank calls it.

    The loss is computed before the update and does not show its effect.
    """
    moments = (moment for state in optimizer.state.values() for moment in state.values())
    nonfinite_count = torch.zeros((), device=ranks.device)
    for tensor in (*model.parameters(), *moments):
        # On a GPU this waits only once, for the sum.
        local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        nonfinite_count += (~local_tensor.detach().isfinite()).any().to(ranks.device)
    return not ranks.total(nonfinite_count.item())[0]


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: weight decay on matrices, none on gains and biases."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
