"""Whether a trainer that goes on has the weights of its checkpoint: some numbers of them are kept beside the step.

Trainers of transformers load checkpoints by names and leave out, with a line in the log, what is called otherwise there
(5.23: Qwen2-VL and others, whose ``save_pretrained`` writes names of older versions): training would go on from the
weights that a run began with.
"""

from batchloom.adapters.requirements import TORCH, require

require(TORCH)

from typing import Any

import torch

from batchloom.core.errors import TrainError

_WEIGHTS, _NUMBERS = 16, 4

# Numbers of some weights, by their names.
Seen = dict[str, list[float]]


@torch.no_grad()
def weights_seen(model: Any) -> Seen:
    """A few numbers of a few weights, spread over a model; of what is sharded none."""
    held = [
        (name, weight)
        for name, weight in model.named_parameters()
        if type(weight.data) is torch.Tensor and weight.numel() and not weight.is_meta
    ]
    chosen = held[:: max(1, len(held) // _WEIGHTS)]
    return {
        name: weight.flatten()[:: max(1, weight.numel() // _NUMBERS)][:_NUMBERS].double().tolist()
        for name, weight in chosen
    }


def refuse_other_weights(model: Any, kept: object, step: int) -> None:
    """Refuse a model that has not the weights that it was saved with.

    Args:
        model: after the checkpoint was loaded.
        kept: what :func:`weights_seen` gave when it was made; anything else for nothing.
        step: of the checkpoint.

    Raises:
        TrainError: names weights that differ.
    """
    if not isinstance(kept, dict):
        return
    now = weights_seen(model)
    other = [name for name, numbers in now.items() if name in kept and kept[name] != numbers]
    if other:
        raise TrainError(
            f"The trainer has not the weights of its checkpoint of step {step}: {', '.join(other[:3])} "
            f"({len(other)} of {len(now)} that were looked at) have other values than when it was made. Where its log "
            "tells of missing keys, transformers has not loaded them: give the trainer the model of the checkpoint "
            "(from_pretrained(CHECKPOINT)), and resume from it again."
        )
