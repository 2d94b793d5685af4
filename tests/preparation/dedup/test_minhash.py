"""MinHash over token ids: pinned keys, the promised curve, and independence."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import SettingsError
from batchloom.preparation.dedup import (
    NO_KEY,
    choose_banding,
    compute_signatures,
    match_probability,
    near_duplicates,
)
from tiers import examples


def compute_keys(documents, bands=14, rows=8, shingle=5, dtype=np.uint16):
    tokens = [token for document in documents for token in document]
    lengths = np.array([len(document) for document in documents], np.uint32)
    return compute_signatures(np.array(tokens, dtype), lengths, bands=bands, rows=rows, shingle=shingle)


PINNED = [[17819095896827779537, 16099745474224444948], [11436262228385781946, 4973283854735539699]]


def test_keys_are_pinned():
    # Stores contain these keys: other values need another MINHASH_VERSION.
    keys = compute_keys([range(100), [7]], bands=2)
    assert keys.tolist() == PINNED
    assert near_duplicates.MINHASH_VERSION == 1


def compute_sketches_in_plain_python(document, hashes, shingle):
    """Compute (round, hash) of each bin by the definition, a shingle at a time."""
    mask = 2**64 - 1

    def mix(value):
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
        return value ^ value >> 31

    padded = [token + 1 for token in document] + [0] * (shingle - len(document))
    values = set()
    for start in range(len(padded) - shingle + 1):
        value = 0
        for token in padded[start : start + shingle]:
            value = (value * 0x243F6A8885A308D3 + token) & mask
        values.add(value)
    bins = {}
    for round_ in range(2 * hashes):
        for value in values:
            hashed = mix((value + (round_ + 1) * 0x9E3779B97F4A7C15) & mask)
            bin_number = (hashed >> 32) * hashes >> 32 if round_ < hashes else round_ - hashes
            candidate = (round_, hashed & 0xFFFFFFFF)
            bins[bin_number] = min(bins.get(bin_number, candidate), candidate)
    return [round_ << 32 | low for round_, low in (bins[bin_number] for bin_number in range(hashes))]


DOCUMENT = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40)


@settings(max_examples=examples(40))
@given(st.lists(DOCUMENT, min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 12))
def test_sketches_are_what_the_definition_says(documents, shingle, hashes):
    ids = np.array([token for document in documents for token in document], np.uint16)
    lengths = np.array([len(document) for document in documents])
    sketches = near_duplicates._sketch(ids, lengths, hashes, shingle)
    assert sketches.tolist() == [compute_sketches_in_plain_python(document, hashes, shingle) for document in documents]


@settings(max_examples=examples(25))
@given(st.lists(st.lists(st.integers(0, 999), max_size=200), max_size=12), st.integers(1, 7))
def test_a_key_is_its_documents_alone(documents, shingle):
    expected = compute_keys(documents, shingle=shingle)
    separate_keys = [compute_keys([document], shingle=shingle, dtype=np.int32)[0] for document in documents]
    assert expected.tolist() == [keys.tolist() for keys in separate_keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "_BLOCK_TOKENS", 150)
        patch.setattr(near_duplicates, "_CHUNK_TOKENS", 50)
        assert compute_keys(documents, shingle=shingle).tolist() == expected.tolist()


def test_documents_without_tokens_have_no_key_and_short_ones_are_one_shingle():
    keys = compute_keys([[], [1, 2], [1, 2], [1, 2, 0], [0, 1, 2], []])
    assert (keys[[0, 5]] == NO_KEY).all()
    assert (keys[1:5] != NO_KEY).all()
    assert keys[1].tolist() == keys[2].tolist()
    assert not set(keys[1].tolist()) & set(keys[3].tolist())
    assert not set(keys[3].tolist()) & set(keys[4].tolist())


def make_pairs(similarity, size, count, seed):
    """Make pairs of documents of a Jaccard similarity; return the exact one too."""
    shared_tokens = round(2 * size * similarity / (1 + similarity))
    tokens = np.random.default_rng(seed).integers(0, 2**31 - 2, (count, 2 * size - shared_tokens))
    first, second = tokens[:, :size], np.hstack([tokens[:, :shared_tokens], tokens[:, size:]])
    return first, second, shared_tokens / (2 * size - shared_tokens)


@pytest.mark.parametrize("size", [15, 120, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("similarity", [0.4, 0.6, 0.75, 0.9])
def test_pairs_are_found_as_the_curve_says(similarity, size):
    count = 500
    first_documents, second_documents, actual_similarity = make_pairs(similarity, size, count, seed=size)
    first_keys, second_keys = (
        compute_keys(side, shingle=1, dtype=np.int32) for side in (first_documents, second_documents)
    )
    share_found = (first_keys == second_keys).any(axis=1).mean()
    expected = match_probability(actual_similarity, 14, 8)
    # Four standard deviations, plus the distance of small sets from the limit curve.
    assert abs(share_found - expected) < 4 * np.sqrt(max(expected * (1 - expected), 0.005) / count) + 0.02


def test_bins_agree_as_often_as_documents_are_alike():
    first_documents, second_documents, actual_similarity = make_pairs(0.5, 200, 300, seed=3)
    bins = [
        compute_keys(side, bands=112, rows=1, shingle=1, dtype=np.int32) for side in (first_documents, second_documents)
    ]
    shares = (bins[0] == bins[1]).mean(axis=1)
    assert abs(shares.mean() - actual_similarity) < 0.01
    # The spread is at most that of one permutation per bin.
    assert shares.std() < 1.1 * np.sqrt(actual_similarity * (1 - actual_similarity) / 112)


def test_the_chosen_banding_finds_nine_of_ten_with_the_most_rows():
    assert choose_banding(0.8) == (14, 8)
    for similarity in (0.3, 0.5, 0.7, 0.9, 0.99):
        bands, rows = choose_banding(similarity, 256)
        assert bands * rows <= 256
        assert match_probability(similarity, bands, rows) >= 0.9
        assert match_probability(similarity, 256 // (rows + 1), rows + 1) < 0.9


@pytest.mark.parametrize(
    ("similarity", "message"),
    [
        (0, "not a number above 0 and at most 1"),
        (1.1, "not a number above 0 and at most 1"),
        (0.01, "112 hashes per document do not find pairs with a similarity as low as 0.01; set a higher"),
    ],
)
def test_a_similarity_that_cannot_be_found_is_refused(similarity, message):
    with pytest.raises(SettingsError, match=f"dedup.similarity: .*{message}"):
        choose_banding(similarity)
