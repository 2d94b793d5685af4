"""Rows of a plan as flat arrays."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Spans of consecutive sequences (rows): R rows with N spans in total.

    Attributes:
        pointers: row r holds the spans pointers[r] to pointers[r + 1] - 1, int64 [R + 1].
        sources: number of each span's source in the plan, int32 [N].
        documents: number of the document in its source, int64 [N].
        starts: first token of the span inside its document, int64 [N].
        lengths: tokens of the span, at least 1, int64 [N].
        row_offsets: offset of the span inside its row, int64 [N]. A span is followed by padding up to the next
            multiple of the plan's ``align``.
        banned: whether the span's document is banned and served as padding, bool [N]; None without bans.
    """

    pointers: NDArray[np.int64]
    sources: NDArray[np.int32]
    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    banned: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.pointers) - 1

    def with_banned(self, banned: NDArray[np.bool_]) -> "Rows":
        """Return a copy with another ``banned`` mask."""
        return replace(self, banned=banned)


def set_source(rows: Rows, source: int) -> Rows:
    """Return the rows with all spans assigned to this source."""
    if not source:
        return rows
    return replace(rows, sources=np.full(len(rows.sources), source, np.int32))


def align_lengths(lengths: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Round each length up to a multiple of ``align``."""
    return lengths if align == 1 else -(-lengths // align) * align


def slice_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Return rows ``start`` to ``stop - 1``, as views of the same arrays."""
    first, last = int(rows.pointers[start]), int(rows.pointers[stop])
    return Rows(
        rows.pointers[start : stop + 1] - first,
        rows.sources[first:last],
        rows.documents[first:last],
        rows.starts[first:last],
        rows.lengths[first:last],
        rows.row_offsets[first:last],
        None if rows.banned is None else rows.banned[first:last],
    )


def reorder_rows(rows: Rows, order: NDArray[np.int64]) -> Rows:
    """Return the rows in another order: row r of the result is row order[r]."""
    sizes = np.diff(rows.pointers)[order]
    pointers = np.zeros(len(order) + 1, np.int64)
    np.cumsum(sizes, out=pointers[1:])
    span_indices = np.repeat(rows.pointers[:-1][order] - pointers[:-1], sizes)
    span_indices += np.arange(len(span_indices))
    return Rows(
        pointers,
        rows.sources[span_indices],
        rows.documents[span_indices],
        rows.starts[span_indices],
        rows.lengths[span_indices],
        rows.row_offsets[span_indices],
        None if rows.banned is None else rows.banned[span_indices],
    )


def join_rows(row_slices: list[Rows], count: int) -> Rows:
    """Concatenate row slices, then append empty rows up to ``count``."""
    if len(row_slices) == 1 and len(row_slices[0]) == count:
        return row_slices[0]
    pointers = np.zeros(count + 1, np.int64)
    row = 0
    for row_slice in row_slices:
        pointers[row + 1 : row + len(row_slice) + 1] = pointers[row] + row_slice.pointers[1:]
        row += len(row_slice)
    pointers[row + 1 :] = pointers[row]
    return Rows(
        pointers,
        _concatenate([row_slice.sources for row_slice in row_slices], np.int32),
        _concatenate([row_slice.documents for row_slice in row_slices], np.int64),
        _concatenate([row_slice.starts for row_slice in row_slices], np.int64),
        _concatenate([row_slice.lengths for row_slice in row_slices], np.int64),
        _concatenate([row_slice.row_offsets for row_slice in row_slices], np.int64),
        _join_bans(row_slices),
    )


def _join_bans(row_slices: list[Rows]) -> NDArray[np.bool_] | None:
    if all(row_slice.banned is None for row_slice in row_slices):
        return None
    return np.concatenate([np.zeros(len(p.sources), bool) if p.banned is None else p.banned for p in row_slices])


def _concatenate(arrays: list[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
