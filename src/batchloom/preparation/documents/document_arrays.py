"""Arrays of many documents: added control tokens, and duplicate keys."""

import numpy as np
from numpy.typing import NDArray

from batchloom.tokens import Tokenizer

# Answers of one text with different labels are no duplicates, so the bad label is XORed into the key.
BAD_LABEL = np.uint64(0x9E3779B97F4A7C15)


def make_duplicate_keys(hashes: NDArray[np.uint64], bad: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the keys that duplicates share: content hash and label, uint64 [D, 2].

    Args:
        hashes: content hashes, uint64 [D, 2].
        bad: True for answers labelled as bad, bool [D].
    """
    keys = hashes.copy()
    keys[bad, 0] ^= BAD_LABEL
    return keys


def add_control_tokens(
    ids: NDArray[np.generic], bounds: NDArray[np.int64], tokenizer: Tokenizer, dtype: np.dtype[np.generic]
) -> NDArray[np.generic]:
    """Concatenate documents with their end tokens and, if the model expects it, BOS.

    ``ids`` are the ids of all documents [tokens], ``bounds`` their offsets [documents + 1].
    """
    extra = 1 if tokenizer.bos_id is None else 2
    output = np.empty(len(ids) + extra * (len(bounds) - 1), dtype)
    write_with_control(ids, bounds, tokenizer, output)
    return output


def write_with_control(
    ids: NDArray[np.generic], bounds: NDArray[np.int64], tokenizer: Tokenizer, output: NDArray[np.generic]
) -> None:
    """Write the result of :func:`add_control_tokens` into ``output``."""
    extra = 1 if tokenizer.bos_id is None else 2
    numbers = np.arange(len(bounds) - 1)
    ends = bounds[1:] + extra * numbers + (extra - 1)
    plain = np.ones(len(output), bool)
    plain[ends] = False
    if tokenizer.bos_id is not None:
        begins = bounds[:-1] + extra * numbers
        plain[begins] = False
        output[begins] = tokenizer.bos_id
    output[ends] = tokenizer.end_id
    output[plain] = ids


def strip_control_tokens(
    ids: NDArray[np.generic], lengths: NDArray[np.int64], added: tuple[int, int]
) -> tuple[NDArray[np.generic], NDArray[np.uint32]]:
    """Remove ``added`` tokens before and after each document; return ids and lengths."""
    before, behind = added
    if not before + behind:
        return ids, lengths.astype(np.uint32)
    stops = np.cumsum(lengths)
    keep_mask = np.ones(len(ids), bool)
    for offset in range(before):
        keep_mask[stops - lengths + offset] = False
    for offset in range(behind):
        keep_mask[stops - 1 - offset] = False
    return ids[keep_mask], (lengths - (before + behind)).astype(np.uint32)
