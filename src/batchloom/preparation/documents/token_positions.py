"""Mapping of text offsets to tokens for full batches, by the bytes of each id."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CharacterRanges(NamedTuple):
    """Ranges of the texts of a batch.

    Attributes:
        text: index of the text of each range, ascending, int64 [ranges].
        start: start offset, in the unit of the token offsets, int64 [ranges].
        stop: end offset, exclusive, int64 [ranges].
    """

    text: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class TokenBytes(NamedTuple):
    """Offsets of the tokens of a batch of texts, counted over the complete batch.

    Attributes:
        starts: start of each token, ascending, int64 [tokens].
        stops: end of each token, ascending, int64 [tokens].
        base: start of each text, int64 [texts + 1].
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    base: NDArray[np.int64]


def token_byte_ranges(ids: NDArray[np.uint32], bounds: NDArray[np.int64], sizes: NDArray[np.int64]) -> TokenBytes:
    """Return the token offsets of texts whose ids decode to their own bytes.

    ``bounds`` are the offsets of the texts in ``ids`` [texts + 1], ``sizes`` the bytes of each id, -1 for no text.
    """
    lengths = np.maximum(sizes[ids], 0)
    stops = np.cumsum(lengths)
    base = np.concatenate([[0], stops])[bounds]
    return TokenBytes(stops - lengths, stops, base)


def mark_tokens(
    tokens: TokenBytes, ranges: CharacterRanges
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Mark the tokens that overlap ranges.

    Returns the mask [tokens] and, for each range, whether its first token begins before it and whether its last
    token ends after it.
    """
    shift = tokens.base[ranges.text]
    begin, end = ranges.start + shift, ranges.stop + shift
    first = np.searchsorted(tokens.stops, begin, side="right")
    last = np.searchsorted(tokens.starts, end, side="left")
    edges = np.zeros(tokens.stops.size + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    early, late = first < last, first < last
    early[early] = tokens.starts[first[early]] < begin[early]
    late[late] = tokens.stops[last[late] - 1] > end[late]
    return mask, early, late


def to_byte_offsets(text: str, character_offsets: Sequence[int]) -> list[int]:
    """Convert character offsets to UTF-8 byte offsets."""
    if text.isascii():
        return list(character_offsets)
    byte_offsets, previous_offset, byte_count = {0: 0}, 0, 0
    for character_offset in sorted(set(character_offsets)):
        byte_count += len(text[previous_offset:character_offset].encode())
        byte_offsets[character_offset] = byte_count
        previous_offset = character_offset
    return [byte_offsets[character_offset] for character_offset in character_offsets]


def find_misaligned_texts(
    tokens: TokenBytes, flagged: NDArray[np.bool_], bounds: NDArray[np.int64], expected: Sequence[Sequence[int]]
) -> NDArray[np.bool_]:
    """Flag texts whose flagged tokens begin at unexpected offsets, bool [texts]."""
    token_indices = np.flatnonzero(flagged)
    text_indices = np.searchsorted(bounds, token_indices, side="right") - 1
    counts = np.array([len(offsets) for offsets in expected], np.int64)
    misaligned: NDArray[np.bool_] = np.bincount(text_indices, minlength=len(expected)) != counts
    actual_starts = (tokens.starts[token_indices] - tokens.base[text_indices])[~misaligned[text_indices]]
    owner = np.repeat(np.arange(len(expected)), counts)
    expected_starts = np.fromiter(chain.from_iterable(expected), np.int64)
    comparable = ~misaligned[owner]
    misaligned[owner[comparable][actual_starts != expected_starts[comparable]]] = True
    return misaligned
