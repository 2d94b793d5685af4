"""Images and audio for ``FSDP2SFTTrainer``: all ranks run media encoders, or none."""

from batchloom.adapters.requirements import TORCH, require_installed

require_installed(TORCH)

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from batchloom.batches import IGNORE_INDEX, Batch, DocumentRows, Loader, add_model_masks
from batchloom.core.errors import InputError

_TOKEN_KEYS = ("input_ids", "labels", "position_ids", "token_type_ids")


@final
class MediaPasses:
    """Adds rows to passes so that all ranks run the media encoders together.

    Sharded layers wait for all ranks. If one rank has media in a pass, the ranks without get one more row: a
    document of the store with media and no trained tokens. It adds zeros to their gradients.

    Args:
        loader: loader of stores with media.
        model: model to train.
        collated: whether a ``data_collator`` makes the passes.

    Raises:
        InputError: ``collated`` is true, or the model does not fit the data.
    """

    def __init__(self, loader: Loader, model: nn.Module, *, collated: bool) -> None:
        self._examples = DocumentRows(loader)
        if collated:
            raise InputError(
                "data_collator takes single sequences, and the data holds images or audio, which belong to complete "
                "passes: leave it out."
            )
        if not hasattr(model, "config"):
            raise InputError(
                f"{type(model).__name__} is not a transformers model, which data with images or audio requires. "
                "Write the loop: examples/fsdp2.py."
            )
        if misfit := self._examples.describe_media_mismatch(model, loader.plan.spec.seq_len):
            raise InputError(f"The model is {misfit}.")
        config: Any = model.config
        self._window: int | None = getattr(config.get_text_config(), "sliding_window", None)
        self._extra_rows: Batch | None = None

    def add_extra_rows(self, parts: Sequence[Batch], device: torch.device) -> list[Batch]:
        """Add a row to passes without media if other ranks have media; all ranks call it.

        ``device`` is the device of the collectives.
        """
        seq_len = parts[0]["input_ids"].shape[1]
        extra_rows = self._get_extra_rows(seq_len)
        if extra_rows is None or not dist.is_initialized():
            return list(parts)
        names = [name for name in extra_rows if name not in _TOKEN_KEYS]
        has_media = torch.tensor([[name in part for name in names] for part in parts], device=device)
        has_media_anywhere = has_media.int()
        dist.all_reduce(has_media_anywhere, dist.ReduceOp.MAX)
        missing = ((has_media_anywhere > 0) & ~has_media).any(1).tolist()
        return [
            concat_rows(part, extra_rows) if is_missing else part
            for part, is_missing in zip(parts, missing, strict=True)
        ]

    def add_masks(self, part: Batch, device: torch.device) -> Batch:
        """Move a pass to a device and add the attention masks that its model needs."""
        part.update({name: value.to(device, non_blocking=True) for name, value in part.items()})
        return add_model_masks(part, self._window)

    def _get_extra_rows(self, seq_len: int) -> Batch | None:
        """Return untrained rows with all kinds of media; None if none fit into a row."""
        if self._extra_rows is None or self._extra_rows["input_ids"].shape[1] != seq_len:
            numbers = self._examples.with_media(seq_len)
            if not numbers:
                return None
            self._extra_rows = self._examples.batch([[number] for number in numbers], seq_len)
            self._extra_rows["labels"].fill_(IGNORE_INDEX)
        return self._extra_rows


def concat_rows(part: Batch, extra_rows: Batch) -> Batch:
    """Concatenate the rows of two batches."""
    tensors = {}
    media = extra_rows.layout.media if extra_rows.layout is not None else {}
    for name, value in extra_rows.items():
        second = value.to(part["input_ids"].device)
        first = part.get(name)
        if name not in media:
            # Multimodal positions (time, height, width) have these as their first axis.
            tensors[name] = torch.cat((part[name], second), second.ndim - 2)
        elif first is not None:
            tensors[name] = torch.cat(_pad_to_same_shape(first, second))
        elif media[name].axis:
            # These features have one entry per row. Rows without media get zeros.
            padding = second.new_zeros((len(part["input_ids"]), *second.shape[1:]))
            tensors[name] = torch.cat((padding, second))
        else:
            tensors[name] = second
    return Batch(tensors, part.step, part.origin)


def _pad_to_same_shape(first: Tensor, second: Tensor) -> list[Tensor]:
    """Pad both tensors with zeros to the larger size on all axes but the first."""
    sizes = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    return [
        functional.pad(
            tensor,
            [
                side
                for size, current_size in zip(sizes[::-1], tensor.shape[:0:-1], strict=True)
                for side in (0, size - current_size)
            ],
        )
        for tensor in (first, second)
    ]


def compute_divided_loss(scores: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the summed loss of a pass divided by ``count``.

    Multimodal models divide their own loss by the tokens of the pass.
    """
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    total = functional.cross_entropy(scores.flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / count
