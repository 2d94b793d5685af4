"""M-RoPE positions in time, height and width (Qwen2-VL, arXiv 2409.12191, 2.1)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PatchGridShape = tuple[int, int, int]


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
