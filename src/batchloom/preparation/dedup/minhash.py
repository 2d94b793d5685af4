"""Which documents are alike: MinHash over shingles of token ids, as one key a band.

The sketch is Fast Similarity Sketching (Dahlgaard, Knudsen, Thorup; FOCS 2017): every shingle is
thrown into one of the bins, round after round, until each bin of the document holds one; a bin
keeps the smallest (round, hash). Two documents agree in a bin with the probability of their
Jaccard similarity, as with a permutation a bin, and a document costs two or three hashes a
shingle in place of one a bin and shingle.

What is computed is fixed by MINHASH_VERSION, on every platform: whole numbers of 64 bits and the
constants below. Keys of two versions, or of other bands, rows or shingles, say nothing of each other.
"""

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.keyed_hashing import GOLDEN, mix_in_place, mix_int

MINHASH_VERSION = 1

# What choose_banding promises to find, of pairs of the similarity it is given.
TARGET_RECALL = 0.9
NO_KEY = np.uint64(0)

# The first digits of the fractions of pi and of e, odd: a product with them loses nothing.
_SHINGLE_SEED, _BAND_SEED = 0x243F6A8885A308D3, 0xB7E151628AED2A6B
_U64_MASK = (1 << 64) - 1
_EMPTY_BIN = np.uint64(_U64_MASK)
_U32, _LOW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
# Tokens and bins that are worked on together: what fits into a core's second cache.
_BLOCK_TOKENS = 1 << 16
# A longer document is sketched in pieces; the sketch of a union is the smaller of each bin.
# Rounds after which documents that still have empty bins must be short, or repeat themselves.
_MAX_ROUNDS = 8
_CHUNK_TOKENS = 1 << 20


def match_probability(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents of a Jaccard similarity agree in some band."""
    return 1.0 - (1.0 - similarity**rows) ** bands


def choose_banding(similarity: float, hashes: int = 112) -> tuple[int, int]:
    """The bands and rows that find 9 of 10 pairs of a similarity, and as few of the less alike as they can.

    That is the most rows with which ``match_probability(similarity, hashes // rows, rows)`` is still at
    least TARGET_RECALL.

    Args:
        similarity: of pairs that are to be found, above 0 and at most 1.
        hashes: of a document, at most.

    Raises:
        SettingsError: so few hashes cannot find pairs that little alike.
    """
    if not 0 < similarity <= 1:
        raise SettingsError([f"dedup.similarity: {similarity} is no share above 0 and at most 1; try 0.8"])
    fitting_rows = [
        rows for rows in range(1, hashes + 1) if match_probability(similarity, hashes // rows, rows) >= TARGET_RECALL
    ]
    if not fitting_rows:
        problem = (
            f"dedup.similarity: {hashes} hashes a document do not find pairs as little alike as {similarity}; "
            "ask for a higher similarity"
        )
        raise SettingsError([problem])
    return hashes // fitting_rows[-1], fitting_rows[-1]


def compute_signatures(
    ids: NDArray[np.generic],
    lengths: NDArray[np.uint32],
    *,
    bands: int,
    rows: int,
    shingle: int,
) -> NDArray[np.uint64]:
    """One key a band for each document, uint64 [D, bands].

    A document shorter than a shingle is one shingle; one without tokens has NO_KEY in each band.

    Args:
        ids: token ids of all documents back to back [tokens].
        lengths: tokens of each document [D].
        bands: groups of hashes.
        rows: hashes of a band.
        shingle: neighbouring tokens that are hashed together.
    """
    keys = np.empty((len(lengths), bands), np.uint64)
    stops = np.cumsum(lengths, dtype=np.int64)
    starts = stops - lengths
    for first, last in _split_blocks(stops, bands * rows):
        if last - first == 1 and lengths[first] > _CHUNK_TOKENS:
            sketches = _sketch_long(ids[starts[first] : stops[first]], bands * rows, shingle)
        else:
            block = ids[starts[first] : stops[last - 1]]
            sketches = _sketch(block, lengths[first:last].astype(np.int64), bands * rows, shingle)
        keys[first:last] = _hash_signatures(sketches.reshape(-1, bands, rows))
        keys[first:last][lengths[first:last] == 0] = NO_KEY
    return keys


def _split_blocks(stops: NDArray[np.int64], hashes: int) -> list[tuple[int, int]]:
    """Stretches of documents of about _BLOCK_TOKENS tokens and bins; a long document is alone."""
    most = max(1, _BLOCK_TOKENS // hashes)
    blocks, first, begin = [], 0, 0
    while first < len(stops):
        last = int(np.searchsorted(stops, begin + _BLOCK_TOKENS, "right"))
        last = min(max(last, first + 1), first + most)
        blocks.append((first, last))
        first, begin = last, int(stops[last - 1])
    return blocks


def _sketch_long(ids: NDArray[np.generic], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """The sketch of one long document, piece by piece, uint64 [1, hashes]."""
    sketch = np.full((1, hashes), _EMPTY_BIN)
    for start in range(0, len(ids) - shingle + 1, _CHUNK_TOKENS):
        chunk = ids[start : start + _CHUNK_TOKENS + shingle - 1]
        np.minimum(sketch, _sketch(chunk, np.array([len(chunk)]), hashes, shingle), out=sketch)
    return sketch


def _sketch(ids: NDArray[np.generic], lengths: NDArray[np.int64], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """The smallest (round, hash) of each bin of each document, uint64 [D, hashes]."""
    values, counts = _hash_shingles(ids, lengths, shingle)
    bin_offsets = np.repeat(np.arange(len(lengths), dtype=np.uint64) * np.uint64(hashes), counts)
    sketches = np.full(len(lengths) * hashes, _EMPTY_BIN)
    round_, deduplicated = 0, False
    while len(values):
        if round_ >= _MAX_ROUNDS and not deduplicated:
            values, bin_offsets = _unique_shingles(values, bin_offsets)
            deduplicated = True
        # Later rounds change no bin that is filled, so where little is left many are thrown at once.
        end = 2 * hashes if round_ >= hashes else hashes
        rounds = np.arange(round_, min(end, round_ + 1 + _BLOCK_TOKENS // 16 // len(values)), dtype="u8")
        round_hashes = mix_in_place(values + (rounds[:, None] + np.uint64(1)) * np.uint64(GOLDEN))
        bins = round_hashes >> _U32
        if round_ < hashes:
            bins *= np.uint64(hashes)
            bins >>= _U32
        else:
            # After as many rounds of chance as bins, every shingle goes into each bin in its turn.
            bins[:] = rounds[:, None] - np.uint64(hashes)
        bins += bin_offsets
        round_hashes &= _LOW_MASK
        round_hashes |= rounds[:, None] << _U32
        np.minimum.at(sketches, bins.ravel().view(np.int64), round_hashes.ravel())
        empty = (sketches.reshape(-1, hashes) == _EMPTY_BIN).any(axis=1)
        unfilled = empty[bin_offsets // np.uint64(hashes)]
        values, bin_offsets = values[unfilled], bin_offsets[unfilled]
        round_ += len(rounds)
    return sketches.reshape(-1, hashes)


def _unique_shingles(
    values: NDArray[np.uint64], bin_offsets: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The different shingles of each document: thrown twice, one falls where it fell."""
    order = np.lexsort((values, bin_offsets))
    values, bin_offsets = values[order], bin_offsets[order]
    new = np.ones(len(values), bool)
    new[1:] = (values[1:] != values[:-1]) | (bin_offsets[1:] != bin_offsets[:-1])
    return values[new], bin_offsets[new]


def _hash_shingles(
    ids: NDArray[np.generic], lengths: NDArray[np.int64], shingle: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A hash of each shingle of each document, and how many each document has [D].

    The hash is the polynomial of the ids + 1 in an odd constant modulo 2^64; a short document is
    padded with zeros, so it is like no document of another length.
    """
    padded_ids = ids.astype(np.uint64)
    padded_ids += np.uint64(1)
    padded = np.where(lengths, np.maximum(lengths, shingle), 0)
    if (padded != lengths).any():
        room = np.zeros(int(padded.sum()), np.uint64)
        shifts = np.cumsum(padded - lengths) - (padded - lengths)
        room[np.arange(len(padded_ids)) + np.repeat(shifts, lengths)] = padded_ids
        padded_ids = room
    values = np.zeros(max(0, len(padded_ids) - shingle + 1), np.uint64)
    for offset in range(shingle):
        values *= np.uint64(_SHINGLE_SEED)
        values += padded_ids[offset : offset + len(values)]
    inside = np.ones(len(padded_ids), bool)
    stops = np.cumsum(padded)[padded > 0]
    for back in range(1, shingle):
        inside[stops - back] = False
    return values[inside[: len(values)]], np.maximum(padded - shingle + 1, 0)


def _hash_signatures(sketches: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One key a band from sketches [D, bands, rows]; never NO_KEY, and another one in each band."""
    _, bands, rows = sketches.shape
    keys = np.zeros(sketches.shape[:2], np.uint64)
    for row in range(rows):
        keys += sketches[:, :, row] * np.uint64(pow(_BAND_SEED, row, 1 << 64))
        mix_in_place(keys)
    keys += np.array([mix_int(band + 1) for band in range(bands)], np.uint64)
    mix_in_place(keys)
    keys[keys == NO_KEY] = 1
    return keys
