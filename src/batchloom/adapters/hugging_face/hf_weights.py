"""Check that a resumed trainer has loaded the weights of its checkpoint.

One number of each weight is saved in the checkpoint. Trainers of transformers load weights by name and skip, with a
line in the log, those with other names (5.23: Qwen2-VL and others, whose ``save_pretrained`` writes names of older
versions). Training would then continue from the initial weights.
"""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

from typing import Any

import torch

from batchloom.core.errors import TrainError

# One number of each weight, by its name.
WeightSamples = dict[str, float]


@torch.no_grad()
def sample_weights(model: Any) -> WeightSamples:
    """Return the middle element of each weight of a model except sharded ones."""
    weights = _get_local_weights(model)
    if not weights:
        return {}
    numbers = [weight.flatten()[weight.numel() // 2].double().cpu() for weight in weights.values()]
    return dict(zip(weights, torch.stack(numbers).tolist(), strict=True))


def _get_local_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for name, weight in model.named_parameters()
        if type(weight.data) is torch.Tensor and weight.numel() and not weight.is_meta
    }


def check_same_weights(model: Any, saved_samples: object, step: int) -> None:
    """Reject a model whose weights differ from those in its checkpoint.

    Saved values that are not of :func:`sample_weights` are ignored. Values of another dtype are compared after
    rounding.

    Raises:
        TrainError: weights differ; the error names them.
    """
    if not isinstance(saved_samples, dict):
        return
    samples, weights = sample_weights(model), _get_local_weights(model)
    differing_names = [
        name
        for name, number in samples.items()
        if name in saved_samples and torch.tensor(saved_samples[name], dtype=weights[name].dtype).item() != number
    ]
    if differing_names:
        raise TrainError(
            f"The trainer does not have the weights of its checkpoint of step {step}: "
            f"{', '.join(differing_names[:3])} ({len(differing_names)} of {len(samples)}) have other values than "
            "when it was saved. If its log reports missing keys, transformers has not loaded them: give the trainer "
            "the model of the checkpoint (from_pretrained(CHECKPOINT)), and resume from it again."
        )
