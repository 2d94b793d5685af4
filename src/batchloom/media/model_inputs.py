"""Model inputs and batch layouts by processor class, and M-RoPE positions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PatchGridShape = tuple[int, int, int]


class ModelTraits(NamedTuple):
    """Differences in the batches of a model with media.

    Attributes:
        mrope: whether positions add time, height and width (M-RoPE) after those of the text.
        by_row: whether image features are grouped by row, ``[rows, images, ...]``.
        token_types: whether ``token_type_ids`` mark the image tokens.
        internal_outputs: processor outputs that no model takes.
    """

    mrope: bool = False
    by_row: bool = False
    token_types: bool = False
    internal_outputs: tuple[str, ...] = ()


_TRAITS_BY_PROCESSOR: dict[str, ModelTraits] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), ModelTraits(mrope=True)),
    **dict.fromkeys(
        ("Idefics3Processor", "SmolVLMProcessor"),
        ModelTraits(by_row=True, internal_outputs=("rows", "cols")),
    ),
    "Gemma3Processor": ModelTraits(token_types=True, internal_outputs=("num_crops",)),
}


def get_model_traits(name: str) -> ModelTraits:
    """Return the traits of a transformers processor class; defaults for unknown ones."""
    return _TRAITS_BY_PROCESSOR.get(name, ModelTraits())


def compute_mrope_positions(
    length: int, media: Sequence[tuple[int, int, PatchGridShape]], merge: int
) -> NDArray[np.int64]:
    """Return M-RoPE positions as transformers' ``get_rope_index``, int64 [3, length].

    Text counts up equally in all three rows. A medium's tokens have the positions of their patches, and the next
    text continues after the medium's longest side.

    Args:
        length: tokens of the document.
        media: (first token, tokens, patches in time, height and width) of each medium, in order.
        merge: side, in patches, of the square that is one token.
    """
    positions = np.empty((3, length), np.int64)
    next_token = next_position = 0
    for start, tokens, (time, rows, columns) in media:
        positions[:, next_token:start] = np.arange(next_position, next_position + start - next_token)
        next_position += start - next_token
        shape = (time, rows // merge, columns // merge)
        positions[:, start : start + tokens] = np.indices(shape).reshape(3, -1) + next_position
        next_position += max(shape[1:])
        next_token = start + tokens
    positions[:, next_token:] = np.arange(next_position, next_position + length - next_token)
    return positions
