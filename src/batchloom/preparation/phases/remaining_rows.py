"""Rows of a tokenized unit, each with the reason why it is dropped."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import release_pages
from batchloom.preparation.dedup.duplicate_search import read_unit_duplicates
from batchloom.preparation.phases.find_duplicates import DuplicateFiles
from batchloom.preparation.units.unit_rows import ROW, mark_first_of_records
from batchloom.preparation.units.work_folder import DROPPED_NAME, ROWS_NAME, translate_read_errors
from batchloom.store import CHOSEN

_CHUNK_ROWS = 1 << 16
# Dropped documents: number of the first document of their record in the unit, and the index of the reason.
DROPPED_ROW = np.dtype([("number", "<u4"), ("reason", "u1")])
DROP_REASONS = ("exact duplicate", "near duplicate")
# Returns the drops with numbers in [start, stop), in ascending order.
DropRangeReader = Callable[[int, int], NDArray[np.void]]


def open_search_drops(duplicate_files: DuplicateFiles, unit_number: int) -> DropRangeReader | None:
    """Return a reader of the drops that the search found; None without a search."""
    if not duplicate_files.exact and not duplicate_files.near:
        return None

    def read_drops(start: int, stop: int) -> NDArray[np.void]:
        drop_arrays = []
        for reason, files in enumerate((duplicate_files.exact, duplicate_files.near)):
            numbers = read_unit_duplicates(files, unit_number, start, stop)["number"]
            drops = np.zeros(len(numbers), DROPPED_ROW)
            drops["number"], drops["reason"] = numbers, reason
            drop_arrays.append(drops)
        return np.sort(np.concatenate(drop_arrays), order="number")

    return read_drops


def _open_recorded_drops(path: Path) -> DropRangeReader | None:
    """Return a reader of the drop list that was written; None for an empty list."""
    with translate_read_errors(path):
        if not path.stat().st_size:
            return None
        drops = np.memmap(path, DROPPED_ROW, "r").view(np.ndarray)

    def read_drops(start: int, stop: int) -> NDArray[np.void]:
        # searchsorted on the strided column would copy all of it.
        begin = bisect_left(drops, start, key=_drop_number)
        drops_in_range = drops[begin : bisect_left(drops, stop, begin, key=_drop_number)].copy()
        release_pages(drops)
        return drops_in_range

    return read_drops


def _drop_number(drop: np.void) -> int:
    return int(drop["number"])


def iter_unit_rows(folder: Path) -> Iterator[NDArray[np.void]]:
    """Yield the rows of a unit in bounded chunks; a preference pair is never split."""
    path = folder / ROWS_NAME
    with translate_read_errors(path), path.open("rb") as file:
        while (rows := np.fromfile(file, ROW, _CHUNK_ROWS)).size:
            if rows["side"][-1] == CHOSEN:
                rows = np.concatenate([rows, np.fromfile(file, ROW, 1)])
            yield rows


def iter_remaining_rows(folder: Path, resolution_folder: Path) -> Iterator[NDArray[np.void]]:
    """Yield the remaining rows of a unit in bounded chunks."""
    for rows, reason_codes in iter_rows_with_reasons(folder, resolution_folder):
        yield rows if reason_codes is None else rows[reason_codes == 0]


def iter_rows_with_reasons(
    folder: Path, resolution_folder: Path
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None]]:
    """Yield the rows of a unit in chunks, each with the drop reason of every row.

    A code is 0 for a kept row, else 1 plus the index in ``DROP_REASONS``. None means that all rows are kept.
    """
    for rows, reason_codes, _ in iter_rows_with_drops(folder, _open_recorded_drops(resolution_folder / DROPPED_NAME)):
        yield rows, reason_codes


def iter_rows_with_drops(
    folder: Path, read_drops: DropRangeReader | None
) -> Iterator[tuple[NDArray[np.void], NDArray[np.uint8] | None, NDArray[np.void]]]:
    """Yield the same with the drops of each chunk, at most one per document."""
    row_start = 0
    before = (-1, -1)
    group = -1
    for rows in iter_unit_rows(folder):
        reason_codes = None
        drops = np.zeros(0, DROPPED_ROW)
        if read_drops is not None:
            is_first = mark_first_of_records(rows, before)
            firsts = np.where(is_first, np.arange(row_start, row_start + len(rows)), -1)
            firsts[0] = max(int(firsts[0]), group)
            firsts = np.maximum.accumulate(firsts)
            drops = read_drops(int(firsts[0]), row_start + len(rows))
            before = (int(rows["part"][-1]), int(rows["record"][-1]))
            group = int(firsts[-1])
        if len(drops):
            drop_indices = np.searchsorted(drops["number"], firsts)
            drop_indices = np.minimum(drop_indices, len(drops) - 1)
            is_dropped = drops["number"][drop_indices] == firsts
            if is_dropped.any():
                reason_codes = np.where(is_dropped, drops["reason"][drop_indices] + 1, 0).astype(np.uint8)
        yield rows, reason_codes, drops
        row_start += len(rows)
