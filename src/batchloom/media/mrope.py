"""Positions of tokens in time, height and width (M-RoPE of Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PatchGridShape = tuple[int, int, int]


def compute_mrope_positions(
    length: int, media: Sequence[tuple[int, int, PatchGridShape]], merge: int
) -> NDArray[np.int64]:
    """The positions of a document's tokens, as transformers' ``get_rope_index`` gives them, int64 [3, length].

    Text counts on alike in all three; a medium's tokens stand at the places of their patches, and what follows
    begins behind the longest side of it.

    Args:
        length: tokens of the document.
        media: (first token, tokens, patches in time, height and width) of each, in order.
        merge: patches a side that are one token.
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
