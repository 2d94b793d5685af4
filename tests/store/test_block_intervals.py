"""Arithmetic on extents of blocks, against sets of numbers."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.remote import (
    bridge_gaps,
    count_interval_blocks,
    group_intervals,
    mask_overlaps,
    merge_intervals,
    split_intervals,
    subtract_intervals,
)

STRETCHES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda one: (one[0], sum(one))),
    max_size=12,
)


def extents(stretches):
    return merge_intervals([a for a, _ in stretches], [b for _, b in stretches])


def blocks(found):
    return {block for start, stop in np.asarray(found).tolist() for block in range(start, stop)}


@given(STRETCHES)
def test_stretches_are_joined(stretches):
    found = extents(stretches)
    assert blocks(found) == {n for a, b in stretches for n in range(a, b)}
    assert (found[:, 1] > found[:, 0]).all()
    assert (found[1:, 0] > found[:-1, 1]).all()
    assert count_interval_blocks(found) == len(blocks(found))


@given(STRETCHES, STRETCHES)
def test_what_is_missing_is_the_difference(wanted, have):
    wanted, have = extents(wanted), extents(have)
    assert blocks(subtract_intervals(wanted, have)) == blocks(wanted) - blocks(have)
    told = mask_overlaps(have, wanted).tolist()
    assert told == [bool(blocks([one]) & blocks(wanted)) for one in have.tolist()]


@given(STRETCHES, st.integers(1, 7))
def test_cutting_and_grouping_keep_the_blocks_in_order(stretches, most):
    found = extents(stretches)
    pieces = split_intervals(found, most)
    assert blocks(pieces) == blocks(found)
    assert count_interval_blocks(pieces) == count_interval_blocks(found)
    assert all(stop - start <= most for start, stop in pieces.tolist())
    groups = group_intervals(pieces, 2 * most)
    assert [one for group in groups for one in group.tolist()] == pieces.tolist()
    assert all(count_interval_blocks(group) < 3 * most for group in groups)


@given(STRETCHES, st.floats(0, 1))
def test_gaps_are_filled_up_to_a_share_and_never_between_files(stretches, share):
    found = extents(stretches)
    files = found[:, 0] // 20
    wide = bridge_gaps(found, files, share, np.zeros(len(found), int))
    assert blocks(wide) >= blocks(found)
    assert count_interval_blocks(wide) - count_interval_blocks(found) <= share * count_interval_blocks(found)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_smallest_gaps_are_filled_first(share):
    found = np.array([[0, 4], [5, 9], [12, 16], [40, 44]])
    assert bridge_gaps(found, np.zeros(4, int), share, np.zeros(4, int)).tolist() == (
        [[0, 16], [40, 44]] if share else found.tolist()
    )
    apart = np.array([0, 1, 2, 3])
    assert bridge_gaps(found, apart, 1.0, apart * 0 + 99).tolist() == found.tolist()
    always = bridge_gaps(found, apart * 0, 0.0, apart * 0 + 3)
    assert always.tolist() == [[0, 16], [40, 44]]
