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


def subtract_intervals(wanted: Intervals, have: Intervals) -> Intervals:
    """The blocks of ``wanted`` that are not in ``have``."""
    near = have[mask_overlaps(have, wanted)]
    if not near.size or not wanted.size:
        return wanted
    points = np.concatenate([wanted[:, 0], wanted[:, 1], near[:, 0], near[:, 1]])
    begins, ends = np.ones(len(wanted), np.int64), -np.ones(len(wanted), np.int64)
    least = 2 * np.ones(len(near), np.int64)
    order = np.argsort(points, kind="stable")
    # 1 where wanted alone, 2 where there alone, 3 where both.
    state = np.cumsum(np.concatenate([begins, ends, least, -least])[order])[:-1]
    points = points[order]
    alone = state == 1
    return merge_intervals(points[:-1][alone], points[1:][alone])


def split_by_ranges(
    wanted: Intervals, starts: Any, stops: Any
) -> tuple[NDArray[np.int64], Intervals]:
    """What is wanted, cut where it goes from one stretch to the next: the stretch of each piece, and the pieces.

    Args:
        wanted: all of it lies in the stretches.
        starts: first block of each stretch, ascending.
        stops: last + 1 of each.
    """
    first = starts.searchsorted(wanted[:, 0], side="right") - 1
    counts = starts.searchsorted(wanted[:, 1], side="left") - first
    rows = np.repeat(first, counts)
    rows += np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(np.repeat(wanted[:, 0], counts), starts[rows])
    ends = np.minimum(np.repeat(wanted[:, 1], counts), stops[rows])
    return rows, np.stack([begins, ends], axis=1)


def mask_overlaps(extents: Intervals, others: Intervals) -> NDArray[np.bool_]:
    """For each of ``extents`` whether it shares a block with one of ``others``."""
    first = extents[:, 1].searchsorted(others[:, 0], side="right")
    stop = extents[:, 0].searchsorted(others[:, 1], side="left")
    marks = np.zeros(len(extents) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, np.maximum(stop, first), -1)
    found: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return found


def bridge_gaps(
    extents: Intervals, files: NDArray[np.int64], share: float, always: NDArray[np.int64]
) -> Intervals:
    """Extents with the smallest gaps between them filled, where a request costs more than a few blocks.

    Args:
        extents: what is wanted.
        files: the file of each; gaps between files stay.
        share: blocks of the filled gaps at most, as a share of those wanted.
        always: gaps of at most so many blocks behind each extent are filled whatever their share.
    """
    if len(extents) < 2:
        return extents
    gaps = extents[1:, 0] - extents[:-1, 1]
    alike = files[1:] == files[:-1]
    small = np.flatnonzero(alike & (gaps <= always[:-1]))
    same = np.flatnonzero(alike & (gaps > always[:-1]))
    same = same[np.argsort(gaps[same], kind="stable")]
    allowed = share * float((extents[:, 1] - extents[:, 0]).sum())
    chosen = np.concatenate([small, same[np.cumsum(gaps[same]) <= allowed]])
    return merge_intervals(
        np.concatenate([extents[:, 0], extents[chosen, 1]]),
        np.concatenate([extents[:, 1], extents[chosen + 1, 0]]),
    )


def split_intervals(extents: Intervals, most: int) -> Intervals:
    """The same blocks in extents of at most ``most`` blocks, which may touch."""
    sizes = extents[:, 1] - extents[:, 0]
    pieces = -(-sizes // most)
    starts = np.repeat(extents[:, 0], pieces)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = starts + number * most
    return np.stack([starts, np.minimum(starts + most, np.repeat(extents[:, 1], pieces))], axis=1)


def group_intervals(extents: Intervals, most: int) -> list[Intervals]:
    """Extents in groups of about ``most`` blocks, in order."""
    ends = np.cumsum(extents[:, 1] - extents[:, 0])
    bounds = np.flatnonzero(np.diff((ends - 1) // most)) + 1
    return [group for group in np.split(extents, bounds) if len(group)]


def count_interval_blocks(extents: Intervals) -> int:
    """How many blocks there are in extents."""
    return int((extents[:, 1] - extents[:, 0]).sum())
