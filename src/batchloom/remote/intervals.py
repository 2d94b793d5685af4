"""Stretches of blocks as arithmetic: what is missing, what is asked for in one request, what is kept together.

Extents are int64 [N, 2]: first block and last + 1 of each, ascending, apart from each other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

# Bytes of a block, by which files are checked, fetched and cached.
BLOCK_BYTES = 4096
NO_INTERVALS: Intervals = np.empty((0, 2), np.int64)


def merge_intervals(starts: Any, stops: Any) -> Intervals:
    """The blocks of any stretches, in any order and overlapping, as extents."""
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
    """The blocks of ``intervals`` that are not in ``subtracted``."""
    overlapping = subtracted[mask_overlaps(subtracted, intervals)]
    if not overlapping.size or not intervals.size:
        return intervals
    points = np.concatenate([intervals[:, 0], intervals[:, 1], overlapping[:, 0], overlapping[:, 1]])
    begins, ends = np.ones(len(intervals), np.int64), -np.ones(len(intervals), np.int64)
    least = 2 * np.ones(len(overlapping), np.int64)
    order = np.argsort(points, kind="stable")
    # 1 where wanted alone, 2 where there alone, 3 where both.
    state = np.cumsum(np.concatenate([begins, ends, least, -least])[order])[:-1]
    points = points[order]
    is_remaining = state == 1
    return merge_intervals(points[:-1][is_remaining], points[1:][is_remaining])


def split_by_ranges(intervals: Intervals, starts: Any, stops: Any) -> tuple[NDArray[np.int64], Intervals]:
    """What is wanted, cut where it goes from one stretch to the next: the stretch of each piece, and the pieces.

    Args:
        intervals: all of it lies in the stretches.
        starts: first block of each stretch, ascending.
        stops: last + 1 of each.
    """
    first = starts.searchsorted(intervals[:, 0], side="right") - 1
    counts = starts.searchsorted(intervals[:, 1], side="left") - first
    rows = np.repeat(first, counts)
    rows += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(np.repeat(intervals[:, 0], counts), starts[rows])
    ends = np.minimum(np.repeat(intervals[:, 1], counts), stops[rows])
    return rows, np.stack([begins, ends], axis=1)


def mask_overlaps(intervals: Intervals, other_intervals: Intervals) -> NDArray[np.bool_]:
    """For each of ``intervals`` whether it shares a block with one of ``other_intervals``."""
    first = intervals[:, 1].searchsorted(other_intervals[:, 0], side="right")
    stop = intervals[:, 0].searchsorted(other_intervals[:, 1], side="left")
    marks = np.zeros(len(intervals) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, np.maximum(stop, first), -1)
    overlaps: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return overlaps


def bridge_gaps(intervals: Intervals, files: NDArray[np.int64], share: float, always: NDArray[np.int64]) -> Intervals:
    """Extents with the smallest gaps between them filled, where a request costs more than a few blocks.

    Args:
        intervals: what is wanted.
        files: the file of each; gaps between files stay.
        share: blocks of the filled gaps at most, as a share of those wanted.
        always: gaps of at most so many blocks behind each extent are filled whatever their share.
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
    """The same blocks in extents of at most ``max_blocks`` blocks, which may touch."""
    sizes = intervals[:, 1] - intervals[:, 0]
    part_counts = -(-sizes // max_blocks)
    starts = np.repeat(intervals[:, 0], part_counts)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(part_counts) - part_counts, part_counts)
    starts = starts + number * max_blocks
    return np.stack([starts, np.minimum(starts + max_blocks, np.repeat(intervals[:, 1], part_counts))], axis=1)


def group_intervals(intervals: Intervals, max_blocks: int) -> list[Intervals]:
    """Extents in groups of about ``max_blocks`` blocks, in order."""
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    bounds = np.flatnonzero(np.diff((ends - 1) // max_blocks)) + 1
    return [group for group in np.split(intervals, bounds) if len(group)]


def count_interval_blocks(intervals: Intervals) -> int:
    """How many blocks there are in extents."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())
