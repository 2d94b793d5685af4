"""Lower bound on the number of sequences."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.plan import compute_min_sequences, count_sequences
from tiers import examples


def count_fewest_sequences(lengths, seq_len):
    """Return the fewest sequences of any packing by exhaustive search."""

    @cache
    def search(remaining, rooms):
        if not remaining:
            return 0
        length, others = remaining[0], remaining[1:]
        fewest = 1 + search(others, tuple(sorted([*rooms, seq_len - length])))
        for index, room in enumerate(rooms):
            if room >= length:
                changed_rooms = [*rooms[:index], room - length, *rooms[index + 1 :]]
                fewest = min(fewest, search(others, tuple(sorted(changed_rooms))))
        return fewest

    return search(tuple(sorted(lengths, reverse=True)), ())


@given(lengths=st.lists(st.integers(0, 12), max_size=8), seq_len=st.integers(1, 12))
@settings(max_examples=examples(300))
def test_no_packing_is_better_than_the_bound(lengths, seq_len):
    lengths = [length % (seq_len + 1) for length in lengths]
    bound = compute_min_sequences(np.array(lengths, np.int64), seq_len)
    assert bound <= count_fewest_sequences([n for n in lengths if n], seq_len)
    assert bound * seq_len >= sum(lengths)


@given(lengths=st.lists(st.integers(0, 3000), max_size=200))
@settings(max_examples=examples(50))
def test_best_fit_respects_the_bound_with_long_documents(lengths):
    array = np.array(lengths, np.int64)
    assert compute_min_sequences(array, 512) <= count_sequences(array, 512, "best_fit")


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [([1100] * 10, 10), ([1500, 548] * 10, 10), ([2048] * 3, 3), ([4097], 3), ([], 0)],
)
def test_the_bound_of_simple_lengths(lengths, bound):
    assert compute_min_sequences(np.array(lengths, np.int64), 2048) == bound
