"""Arithmetic on extents of blocks, against sets of numbers."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.remote import blocks_of, bridged, cut, grouped, joined, minus, touching

STRETCHES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda one: (one[0], sum(one))),
    max_size=12,
)


def extents(stretches):
    return joined([a for a, _ in stretches], [b for _, b in stretches])


def blocks(found):
    return {block for start, stop in np.asarray(found).tolist() for block in range(start, stop)}


@given(STRETCHES)
def test_stretches_are_joined(stretches):
    found = extents(stretches)
    assert blocks(found) == {n for a, b in stretches for n in range(a, b)}
    assert (found[:, 1] > found[:, 0]).all()
    assert (found[1:, 0] > found[:-1, 1]).all()
    assert blocks_of(found) == len(blocks(found))


@given(STRETCHES, STRETCHES)
def test_what_is_missing_is_the_difference(wanted, have):
    wanted, have = extents(wanted), extents(have)
    assert blocks(minus(wanted, have)) == blocks(wanted) - blocks(have)
    told = touching(have, wanted).tolist()
    assert told == [bool(blocks([one]) & blocks(wanted)) for one in have.tolist()]


@given(STRETCHES, st.integers(1, 7))
def test_cutting_and_grouping_keep_the_blocks_in_order(stretches, most):
    found = extents(stretches)
    pieces = cut(found, most)
    assert blocks(pieces) == blocks(found)
    assert blocks_of(pieces) == blocks_of(found)
    assert all(stop - start <= most for start, stop in pieces.tolist())
    groups = grouped(pieces, 2 * most)
    assert [one for group in groups for one in group.tolist()] == pieces.tolist()
    assert all(blocks_of(group) < 3 * most for group in groups)


@given(STRETCHES, st.floats(0, 1))
def test_gaps_are_filled_up_to_a_share_and_never_between_files(stretches, share):
    found = extents(stretches)
    files = found[:, 0] // 20
    wide = bridged(found, files, share, np.zeros(len(found), int))
    assert blocks(wide) >= blocks(found)
    assert blocks_of(wide) - blocks_of(found) <= share * blocks_of(found)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_smallest_gaps_are_filled_first(share):
    found = np.array([[0, 4], [5, 9], [12, 16], [40, 44]])
    assert bridged(found, np.zeros(4, int), share, np.zeros(4, int)).tolist() == (
        [[0, 16], [40, 44]] if share else found.tolist()
    )
    apart = np.array([0, 1, 2, 3])
    assert bridged(found, apart, 1.0, apart * 0 + 99).tolist() == found.tolist()
    always = bridged(found, apart * 0, 0.0, apart * 0 + 3)
    assert always.tolist() == [[0, 16], [40, 44]]
