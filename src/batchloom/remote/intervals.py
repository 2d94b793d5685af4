"""Interval arithmetic on block ranges: merge, subtract, split and group.

Intervals are int64 [N, 2]: first block and last block + 1 of each, ascending and disjoint.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

# Size of a block in bytes, the unit of verification, fetching and caching.
BLOCK_BYTES = 4096
NO_INTERVALS: Intervals = np.empty((0, 2), np.int64)


def merge_intervals(starts: Any, stops: Any) -> Intervals:
    """Merge block ranges, in any order and overlapping, into intervals."""
    starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    if not starts.size:
        return NO_INTERVALS
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], ends[last]], axis=1)


def subtract_intervals(intervals: Intervals, subtracted: Intervals) -> Intervals:
    """Return the blocks of ``intervals`` that are not in ``subtracted``."""
    overlapping = subtracted[mask_overlaps(subtracted, intervals)]
    if not overlapping.size or not intervals.size:
        return intervals
    points = np.concatenate([intervals[:, 0], intervals[:, 1], overlapping[:, 0], overlapping[:, 1]])
    begins, ends = np.ones(len(intervals), np.int64), -np.ones(len(intervals), np.int64)
    least = 2 * np.ones(len(overlapping), np.int64)
    order = np.argsort(points, kind="stable")
    # The state is 1 in ``intervals`` alone, 2 in ``subtracted`` alone and 3 in both.
    state = np.cumsum(np.concatenate([begins, ends, least, -least])[order])[:-1]
    points = points[order]
    is_remaining = state == 1
    return merge_intervals(points[:-1][is_remaining], points[1:][is_remaining])


def split_by_ranges(intervals: Intervals, starts: Any, stops: Any) -> tuple[NDArray[np.int64], Intervals]:
    """Split intervals at range boundaries; return range numbers and parts.

    Args:
        intervals: intervals that the ranges cover.
        starts: first block of each range, ascending.
        stops: last block + 1 of each range.
    """
    first = starts.searchsorted(intervals[:, 0], side="right") - 1
    counts = starts.searchsorted(intervals[:, 1], side="left") - first
    rows = np.repeat(first, counts)
    rows += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(np.repeat(intervals[:, 0], counts), starts[rows])
    ends = np.minimum(np.repeat(intervals[:, 1], counts), stops[rows])
    return rows, np.stack([begins, ends], axis=1)


def mask_overlaps(intervals: Intervals, other_intervals: Intervals) -> NDArray[np.bool_]:
    """Return, for each of ``intervals``, whether it overlaps ``other_intervals``."""
    first = intervals[:, 1].searchsorted(other_intervals[:, 0], side="right")
    stop = intervals[:, 0].searchsorted(other_intervals[:, 1], side="left")
    marks = np.zeros(len(intervals) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, np.maximum(stop, first), -1)
    overlaps: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return overlaps


def bridge_gaps(intervals: Intervals, files: NDArray[np.int64], share: float, always: NDArray[np.int64]) -> Intervals:
    """Fill the smallest gaps between intervals, since requests cost more than blocks.

    Args:
        intervals: requested intervals.
        files: file number of each interval; gaps between files are not filled.
        share: maximum number of blocks in filled gaps, as a share of the requested blocks.
        always: for each interval, the size in blocks up to which the gap after it is always filled.
    """
    if len(intervals) < 2:
        return intervals
    gaps = intervals[1:, 0] - intervals[:-1, 1]
    in_same_file = files[1:] == files[:-1]
    small_gaps = np.flatnonzero(in_same_file & (gaps <= always[:-1]))
    candidates = np.flatnonzero(in_same_file & (gaps > always[:-1]))
    candidates = candidates[np.argsort(gaps[candidates], kind="stable")]
    allowed = share * float((intervals[:, 1] - intervals[:, 0]).sum())
    bridged_gaps = np.concatenate([small_gaps, candidates[np.cumsum(gaps[candidates]) <= allowed]])
    return merge_intervals(
        np.concatenate([intervals[:, 0], intervals[bridged_gaps, 1]]),
        np.concatenate([intervals[:, 1], intervals[bridged_gaps + 1, 0]]),
    )


def split_intervals(intervals: Intervals, max_blocks: int) -> Intervals:
    """Split intervals into parts of at most ``max_blocks`` blocks, which may touch."""
    sizes = intervals[:, 1] - intervals[:, 0]
    part_counts = -(-sizes // max_blocks)
    starts = np.repeat(intervals[:, 0], part_counts)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(part_counts) - part_counts, part_counts)
    starts = starts + number * max_blocks
    return np.stack([starts, np.minimum(starts + max_blocks, np.repeat(intervals[:, 1], part_counts))], axis=1)


def group_intervals(intervals: Intervals, max_blocks: int) -> list[Intervals]:
    """Group intervals, in order, into groups of about ``max_blocks`` blocks."""
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    bounds = np.flatnonzero(np.diff((ends - 1) // max_blocks)) + 1
    return [group for group in np.split(intervals, bounds) if len(group)]


def count_interval_blocks(intervals: Intervals) -> int:
    """Return the total number of blocks in intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())
