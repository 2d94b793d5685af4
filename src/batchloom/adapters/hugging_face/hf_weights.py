"""Whether a trainer that goes on has the weights of its checkpoint: a number of each is kept beside the step.

Trainers of transformers load checkpoints by names and leave out, with a line in the log, what is called otherwise there
(5.23: Qwen2-VL and others, whose ``save_pretrained`` writes names of older versions): training would go on from the
weights that a run began with.
"""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

from typing import Any

import torch

from batchloom.core.errors import TrainError

# A number of each weight, by its name.
WeightSamples = dict[str, float]


@torch.no_grad()
def sample_weights(model: Any) -> WeightSamples:
    """The number in the middle of each weight of a model; of what is sharded none."""
    held = _local_weights(model)
    if not held:
        return {}
    numbers = [weight.flatten()[weight.numel() // 2].double().cpu() for weight in held.values()]
    return dict(zip(held, torch.stack(numbers).tolist(), strict=True))


def _local_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for name, weight in model.named_parameters()
        if type(weight.data) is torch.Tensor and weight.numel() and not weight.is_meta
    }


def check_same_weights(model: Any, kept: object, step: int) -> None:
    """Refuse a model that has not the weights that it was saved with.

    Args:
        model: after the checkpoint was loaded.
        kept: what :func:`sample_weights` gave when it was made; anything else for nothing. Of a model that was given
            another dtype the same after rounding.
        step: of the checkpoint.

    Raises:
        TrainError: names weights that differ.
    """
    if not isinstance(kept, dict):
        return
    now, held = sample_weights(model), _local_weights(model)
    other = [
        name
        for name, number in now.items()
        if name in kept and torch.tensor(kept[name], dtype=held[name].dtype).item() != number
    ]
    if other:
        raise TrainError(
            f"The trainer has not the weights of its checkpoint of step {step}: {', '.join(other[:3])} "
            f"({len(other)} of {len(now)}) have other values than when it was made. Where its log "
            "tells of missing keys, transformers has not loaded them: give the trainer the model of the checkpoint "
            "(from_pretrained(CHECKPOINT)), and resume from it again."
        )
