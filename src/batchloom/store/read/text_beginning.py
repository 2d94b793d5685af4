"""Decoded beginnings of documents, for display."""

import numpy as np
from numpy.typing import NDArray

from batchloom.tokens import Tokenizer

# A token repeated at least this often in a row, such as an image placeholder, is written once.
_MIN_RUN = 8
_MAX_DECODED = 1 << 24


def decode_beginning(tokenizer: Tokenizer, ids: NDArray[np.generic], max_tokens: int) -> str:
    """Decode the first tokens of a document; long runs appear as ``TOKEN[x64]``.

    Args:
        tokenizer: tokenizer of the document.
        ids: token ids of the document [N].
        max_tokens: maximum number of decoded tokens; a long run counts as one.
    """
    ids = ids[:_MAX_DECODED]
    if not len(ids):
        return ""
    firsts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    sizes = np.diff(np.append(firsts, len(ids)))
    long_runs = np.flatnonzero(sizes >= _MIN_RUN)
    texts, position, remaining_tokens = [], 0, max_tokens
    for run in long_runs.tolist():
        first, size = int(firsts[run]), int(sizes[run])
        texts.append(tokenizer.decode(ids[position : min(first, position + remaining_tokens)]))
        remaining_tokens -= first - position
        if remaining_tokens <= 0:
            return "".join(texts)
        texts.append(f"{tokenizer.decode(ids[first : first + 1])}[x{size}]")
        position, remaining_tokens = first + size, remaining_tokens - 1
    return "".join([*texts, tokenizer.decode(ids[position : position + remaining_tokens])])
