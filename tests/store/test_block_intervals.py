"""Arithmetic on intervals of blocks, compared with sets of block numbers."""

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

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def merge(pairs):
    return merge_intervals([a for a, _ in pairs], [b for _, b in pairs])


def list_blocks(intervals):
    return {block for start, stop in np.asarray(intervals).tolist() for block in range(start, stop)}


@given(INTERVALS)
def test_overlapping_intervals_are_merged(pairs):
    merged = merge(pairs)
    assert list_blocks(merged) == {n for a, b in pairs for n in range(a, b)}
    assert (merged[:, 1] > merged[:, 0]).all()
    assert (merged[1:, 0] > merged[:-1, 1]).all()
    assert count_interval_blocks(merged) == len(list_blocks(merged))


@given(INTERVALS, INTERVALS)
def test_missing_blocks_are_the_difference(needed, cached):
    needed, cached = merge(needed), merge(cached)
    assert list_blocks(subtract_intervals(needed, cached)) == list_blocks(needed) - list_blocks(cached)
    overlaps = mask_overlaps(cached, needed).tolist()
    assert overlaps == [bool(list_blocks([interval]) & list_blocks(needed)) for interval in cached.tolist()]


@given(INTERVALS, st.integers(1, 7))
def test_splitting_and_grouping_keep_the_blocks_in_order(pairs, max_blocks):
    merged = merge(pairs)
    parts = split_intervals(merged, max_blocks)
    assert list_blocks(parts) == list_blocks(merged)
    assert count_interval_blocks(parts) == count_interval_blocks(merged)
    assert all(stop - start <= max_blocks for start, stop in parts.tolist())
    groups = group_intervals(parts, 2 * max_blocks)
    assert [interval for group in groups for interval in group.tolist()] == parts.tolist()
    assert all(count_interval_blocks(group) < 3 * max_blocks for group in groups)


@given(INTERVALS, st.floats(0, 1))
def test_gaps_are_filled_up_to_a_share_and_never_between_files(pairs, share):
    merged = merge(pairs)
    files = merged[:, 0] // 20
    bridged = bridge_gaps(merged, files, share, np.zeros(len(merged), int))
    assert list_blocks(bridged) >= list_blocks(merged)
    assert count_interval_blocks(bridged) - count_interval_blocks(merged) <= share * count_interval_blocks(merged)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_smallest_gaps_are_filled_first(share):
    intervals = np.array([[0, 4], [5, 9], [12, 16], [40, 44]])
    assert bridge_gaps(intervals, np.zeros(4, int), share, np.zeros(4, int)).tolist() == (
        [[0, 16], [40, 44]] if share else intervals.tolist()
    )
    files = np.array([0, 1, 2, 3])
    assert bridge_gaps(intervals, files, 1.0, files * 0 + 99).tolist() == intervals.tolist()
    bridged = bridge_gaps(intervals, files * 0, 0.0, files * 0 + 3)
    assert bridged.tolist() == [[0, 16], [40, 44]]
