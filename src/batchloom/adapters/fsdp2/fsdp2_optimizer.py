"""Optimizer and learning rate schedule of ``FSDP2SFTTrainer``."""

import math

import torch
from torch import nn

from batchloom.adapters.fsdp2.fsdp2_arguments import FSDP2Arguments


def make_adamw(model: nn.Module, args: FSDP2Arguments) -> torch.optim.Optimizer:
    """Make an AdamW without weight decay of norms and biases."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decayed_weights = [weight for weight in weights if weight.ndim > 1]
    undecayed_weights = [weight for weight in weights if weight.ndim <= 1]
    groups = [
        {"params": decayed_weights, "weight_decay": args.weight_decay},
        {"params": undecayed_weights, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        args.learning_rate,
        # torch rejects integer betas, and a beta of 0 may be one.
        betas=(float(args.adam_beta1), float(args.adam_beta2)),
        eps=args.adam_epsilon,
    )


def compute_lr_factor(args: FSDP2Arguments, step: int, steps: int) -> float:
    """Return the share of ``learning_rate`` at a step from 0, as in transformers."""
    warmup_setting = args.warmup_steps
    warmup_steps = int(warmup_setting) if warmup_setting >= 1 else math.ceil(steps * warmup_setting)
    kind = args.lr_scheduler_type
    if kind != "constant" and step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1 - progress)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * progress))) if kind == "cosine" else 1.0
