"""MinHash signatures over shingles of token ids, one key per band.

The sketch is Fast Similarity Sketching (Dahlgaard, Knudsen, Thorup; FOCS 2017). Each round
throws every shingle into one bin, until every bin of the document is filled. A bin keeps the
smallest (round, hash). Two documents agree in a bin with the probability of their Jaccard
similarity, as with one permutation per bin. A document costs two or three hashes per shingle
instead of one per bin and shingle.

MINHASH_VERSION fixes the result on every platform: the arithmetic uses 64-bit integers and the
constants below. Keys of different versions, bands, rows or shingle sizes are not comparable.
"""

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.keyed_hashing import GOLDEN, mix_in_place, mix_int

MINHASH_VERSION = 1

# Share of the pairs of the given similarity that the banding of choose_banding finds.
TARGET_RECALL = 0.9
NO_KEY = np.uint64(0)

# The first digits of the fractions of pi and e. They are odd, so multiplication by them is invertible.
_SHINGLE_SEED, _BAND_SEED = 0x243F6A8885A308D3, 0xB7E151628AED2A6B
_U64_MASK = (1 << 64) - 1
_EMPTY_BIN = np.uint64(_U64_MASK)
_U32, _LOW_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
# Tokens and bins per block: this fits into the L2 cache of a core.
_BLOCK_TOKENS = 1 << 16
# After this many rounds a document with empty bins is short or repetitive, so its shingles are deduplicated.
_MAX_ROUNDS = 8
_CHUNK_TOKENS = 1 << 20


def match_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents of a Jaccard similarity share a band."""
    return 1.0 - (1.0 - similarity**rows) ** bands


def choose_banding(similarity: float, hashes: int = 112) -> tuple[int, int]:
    """Return the (bands, rows) that find 9 of 10 pairs of a similarity.

    They have the most rows for which ``match_probability(similarity, hashes // rows, rows)`` is at
    least TARGET_RECALL, so that they find the fewest less similar pairs.

    Args:
        similarity: Jaccard similarity of the pairs to find, above 0 and at most 1.
        hashes: maximum number of hashes per document.

    Raises:
        SettingsError: so few hashes cannot find pairs of so low a similarity.
    """
    if not 0 < similarity <= 1:
        raise SettingsError([f"dedup.similarity: {similarity} is not a number above 0 and at most 1; try 0.8"])
    fitting_rows = [
        rows for rows in range(1, hashes + 1) if match_probability(similarity, hashes // rows, rows) >= TARGET_RECALL
    ]
    if not fitting_rows:
        problem = (
            f"dedup.similarity: {hashes} hashes per document do not find pairs with a similarity as low as "
            f"{similarity}; set a higher similarity"
        )
        raise SettingsError([problem])
    return hashes // fitting_rows[-1], fitting_rows[-1]


def compute_signatures(
    ids: NDArray[np.generic], lengths: NDArray[np.uint32], *, bands: int, rows: int, shingle: int
) -> NDArray[np.uint64]:
    """Return one key per band for each document, uint64 [D, bands].

    A document shorter than a shingle counts as one shingle. An empty document has NO_KEY in every band.

    Args:
        ids: token ids of all documents, concatenated [tokens].
        lengths: number of tokens of each document [D].
        bands: number of bands.
        rows: number of hashes per band.
        shingle: number of adjacent tokens per shingle.
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
    """Return document ranges of about _BLOCK_TOKENS tokens and bins."""
    most = max(1, _BLOCK_TOKENS // hashes)
    blocks, first, begin = [], 0, 0
    while first < len(stops):
        last = int(np.searchsorted(stops, begin + _BLOCK_TOKENS, "right"))
        last = min(max(last, first + 1), first + most)
        blocks.append((first, last))
        first, begin = last, int(stops[last - 1])
    return blocks


def _sketch_long(ids: NDArray[np.generic], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """Return the sketch of one long document, computed in chunks, uint64 [1, hashes].

    The sketch of a union is the elementwise minimum.
    """
    sketch = np.full((1, hashes), _EMPTY_BIN)
    for start in range(0, len(ids) - shingle + 1, _CHUNK_TOKENS):
        chunk = ids[start : start + _CHUNK_TOKENS + shingle - 1]
        np.minimum(sketch, _sketch(chunk, np.array([len(chunk)]), hashes, shingle), out=sketch)
    return sketch


def _sketch(ids: NDArray[np.generic], lengths: NDArray[np.int64], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """Return the smallest (round, hash) per bin and document, uint64 [D, hashes]."""
    values, counts = _hash_shingles(ids, lengths, shingle)
    bin_offsets = np.repeat(np.arange(len(lengths), dtype=np.uint64) * np.uint64(hashes), counts)
    sketches = np.full(len(lengths) * hashes, _EMPTY_BIN)
    round_, deduplicated = 0, False
    while len(values):
        if round_ >= _MAX_ROUNDS and not deduplicated:
            values, bin_offsets = _unique_shingles(values, bin_offsets)
            deduplicated = True
        # Later rounds change no filled bin, so a few remaining shingles go through many rounds at once.
        end = 2 * hashes if round_ >= hashes else hashes
        rounds = np.arange(round_, min(end, round_ + 1 + _BLOCK_TOKENS // 16 // len(values)), dtype="u8")
        round_hashes = mix_in_place(values + (rounds[:, None] + np.uint64(1)) * np.uint64(GOLDEN))
        bins = round_hashes >> _U32
        if round_ < hashes:
            bins *= np.uint64(hashes)
            bins >>= _U32
        else:
            # After as many random rounds as bins, every shingle goes into each bin in turn.
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
    """Return the distinct shingles of each document; repeats fall into the same bins."""
    order = np.lexsort((values, bin_offsets))
    values, bin_offsets = values[order], bin_offsets[order]
    new = np.ones(len(values), bool)
    new[1:] = (values[1:] != values[:-1]) | (bin_offsets[1:] != bin_offsets[:-1])
    return values[new], bin_offsets[new]


def _hash_shingles(
    ids: NDArray[np.generic], lengths: NDArray[np.int64], shingle: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a hash of each shingle and the number of shingles of each document [D].

    The hash is the polynomial of the ids + 1 in an odd constant modulo 2^64. A short document is
    padded with zeros, so it matches no document of another length.
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
    """Return one key per band from sketches [D, bands, rows]; no key is NO_KEY.

    Equal rows in different bands give different keys.
    """
    _, bands, rows = sketches.shape
    keys = np.zeros(sketches.shape[:2], np.uint64)
    for row in range(rows):
        keys += sketches[:, :, row] * np.uint64(pow(_BAND_SEED, row, 1 << 64))
        mix_in_place(keys)
    keys += np.array([mix_int(band + 1) for band in range(bands)], np.uint64)
    mix_in_place(keys)
    keys[keys == NO_KEY] = 1
    return keys
