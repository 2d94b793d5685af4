"""Arrays of many documents: control tokens around each, and the keys that duplicates share."""

import numpy as np
from numpy.typing import NDArray

from batchloom.tokens import Tokenizer

# Two answers of one text with other labels are no duplicates: the lesser label is folded into the key.
BAD_LABEL = np.uint64(0x9E3779B97F4A7C15)


def make_duplicate_keys(hashes: NDArray[np.uint64], bad: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """What duplicates share: the hash of the content, with the label of a labelled answer, uint64 [D, 2].

    Args:
        hashes: of the content [D, 2].
        bad: which are answers of the lesser label [D].
    """
    keys = hashes.copy()
    keys[bad, 0] ^= BAD_LABEL
    return keys


def add_control_tokens(
    ids: NDArray[np.generic],
    bounds: NDArray[np.int64],
    tokenizer: Tokenizer,
    dtype: np.dtype[np.generic],
) -> NDArray[np.generic]:
    """Documents' ids back to back, each with its end token and, where models expect it, BOS.

    Args:
        ids: ids of all documents [tokens].
        bounds: where each begins, and the end [documents + 1].
        tokenizer: names the control tokens.
        dtype: of a token on disk.
    """
    extra = 1 if tokenizer.bos_id is None else 2
    output = np.empty(len(ids) + extra * (len(bounds) - 1), dtype)
    write_with_control(ids, bounds, tokenizer, output)
    return output


def write_with_control(
    ids: NDArray[np.generic],
    bounds: NDArray[np.int64],
    tokenizer: Tokenizer,
    output: NDArray[np.generic],
) -> None:
    """What :func:`add_control_tokens` gives, put into ``output``."""
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
    """Documents' ids back to back without so many at the beginning and at the end of each, and their lengths."""
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
