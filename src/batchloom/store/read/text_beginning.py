"""What a document begins with, for people."""

import numpy as np
from numpy.typing import NDArray

from batchloom.tokens import Tokenizer

# A token that stands so often in a row, as of an image, is written once.
_MIN_RUN = 8
_MAX_DECODED = 1 << 24


def decode_beginning(tokenizer: Tokenizer, ids: NDArray[np.generic], most: int) -> str:
    """The text of the first tokens of a document; those that stand many times in a row as ``TOKEN[x64]``.

    Args:
        tokenizer: that made them.
        ids: of the document [N].
        most: tokens that are decoded, of a run one.
    """
    ids = ids[:_MAX_DECODED]
    if not len(ids):
        return ""
    firsts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    sizes = np.diff(np.append(firsts, len(ids)))
    long = np.flatnonzero(sizes >= _MIN_RUN)
    pieces, at, left = [], 0, most
    for run in long.tolist():
        first, size = int(firsts[run]), int(sizes[run])
        pieces.append(tokenizer.decode(ids[at : min(first, at + left)]))
        left -= first - at
        if left <= 0:
            return "".join(pieces)
        pieces.append(f"{tokenizer.decode(ids[first : first + 1])}[x{size}]")
        at, left = first + size, left - 1
    return "".join([*pieces, tokenizer.decode(ids[at : at + left])])
