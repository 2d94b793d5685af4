"""Rows of a plan as flat arrays."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, hash_indices, shuffle_range
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.strategies import CUTTING_STRATEGIES, PackingResult, pack

T = TypeVar("T", np.int32, np.int64)
Ints = NDArray[np.int64]


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


def set_source(rows: Rows, source: int) -> Rows:
    if not source:
        return rows
    return replace(rows, sources=np.full(len(rows.sources), source, np.int32))


def align_lengths(lengths: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Round each length up to a multiple of ``align``."""
    return lengths if align == 1 else -(-lengths // align) * align


def slice_rows(rows: Rows, start: int, stop: int) -> Rows:
    """Return rows ``start`` to ``stop - 1``, as views of the same arrays."""
    first = int(rows.pointers[start])
    last = int(rows.pointers[stop])
    return Rows(
        rows.pointers[start : stop + 1] - first,
        rows.sources[first:last],
        rows.documents[first:last],
        rows.starts[first:last],
        rows.lengths[first:last],
        rows.row_offsets[first:last],
        banned=None if rows.banned is None else rows.banned[first:last],
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
        banned=None if rows.banned is None else rows.banned[span_indices],
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
    banned = None
    if any(part.banned is not None for part in row_slices):
        banned = np.concatenate([np.zeros(len(p.sources), bool) if p.banned is None else p.banned for p in row_slices])
    return Rows(
        pointers,
        _concatenate([row_slice.sources for row_slice in row_slices], np.int32),
        _concatenate([row_slice.documents for row_slice in row_slices], np.int64),
        _concatenate([row_slice.starts for row_slice in row_slices], np.int64),
        _concatenate([row_slice.lengths for row_slice in row_slices], np.int64),
        _concatenate([row_slice.row_offsets for row_slice in row_slices], np.int64),
        banned=banned,
    )


def _concatenate(arrays: list[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def fit_lengths(lengths: NDArray[np.uint32], spec: PlanSpec) -> Ints:
    """Return the lengths that remain of documents under ``overlong``, int64 [N]."""
    fitted_lengths = lengths.astype(np.int64)
    if spec.overlong == "truncate":
        return np.minimum(fitted_lengths, spec.seq_len)
    if spec.overlong == "drop":
        fitted_lengths[fitted_lengths > spec.seq_len] = 0
    return fitted_lengths


def pack_rows(documents: Ints, firsts: Ints, lengths: Ints, spec: PlanSpec, keys: tuple[HashKey, HashKey]) -> Rows:
    """Pack token ranges of documents, and sort spans and rows by their keyed hashes.

    Args:
        documents: document of each token range [N].
        firsts: first token of each range inside its document [N].
        lengths: tokens of each range [N].
        spec: ``seq_len``, ``packing``, ``align`` and ``shuffle``; without ``shuffle`` spans and rows are sorted
            by document.
        keys: keys of the order of spans inside a row, and of the order of rows.
    """
    aligned_lengths = align_lengths(lengths, spec.align)
    packed = pack(aligned_lengths, spec.seq_len, spec.packing)
    sequence_order = shuffle_range(packed.count, keys[1]) if spec.shuffle else np.arange(packed.count)
    order = _order_spans(packed, sequence_order, spec, keys[0])
    item_indices = packed.items[order]
    starts = packed.starts[order]
    sizes = packed.lengths[order]
    pointers = np.zeros(packed.count + 1, np.int64)
    np.cumsum(np.bincount(packed.sequences, minlength=packed.count)[sequence_order], out=pointers[1:])
    begins = np.cumsum(sizes) - sizes
    first = begins[pointers[:-1]] if packed.count else begins
    rows = Rows(
        pointers=pointers,
        sources=np.zeros(len(order), np.int32),
        documents=documents[item_indices],
        starts=starts + firsts[item_indices],
        # The last span of a range occupies more of its row than it has tokens, because of the alignment.
        lengths=sizes if aligned_lengths is lengths else np.minimum(sizes, lengths[item_indices] - starts),
        row_offsets=begins - np.repeat(first, np.diff(pointers)),
    )
    if spec.shuffle:
        return rows
    first = rows.pointers[:-1]
    return reorder_rows(rows, np.lexsort((rows.starts[first], rows.documents[first])))


def repack_rows(remaining_rows: Rows, name: str, spec: PlanSpec, pool_location: tuple[int, ...]) -> Rows:
    """Repack the remaining rows of a pool under another spec.

    Adjacent spans of a document are joined first. ``overlong`` does not apply, because the remaining tokens of a
    pool are always served.
    """
    order = np.lexsort((remaining_rows.starts, remaining_rows.documents))
    documents = remaining_rows.documents[order]
    starts = remaining_rows.starts[order]
    lengths = remaining_rows.lengths[order]
    continues_previous = (documents[1:] == documents[:-1]) & (starts[1:] == starts[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(len(order), 1), bool), ~continues_previous]))
    sizes = np.add.reduceat(lengths, first) if len(first) else lengths
    keys = [derive_key(spec.seed, name, purpose, *pool_location) for purpose in ("rest spans", "rest sequences")]
    return pack_rows(documents[first], starts[first], sizes, spec, (keys[0], keys[1]))


def _order_spans(packed: PackingResult, sequence_order: Ints, spec: PlanSpec, key: HashKey) -> Ints:
    items = packed.items
    inverse_order = np.empty(packed.count, np.int64)
    inverse_order[sequence_order] = np.arange(packed.count)
    rows = inverse_order[packed.sequences]
    if not spec.shuffle:
        return np.lexsort((packed.starts, items, rows))
    # numpy's stable sort of 16-bit integers is a radix sort, and it is also fast on nearly sorted input.
    row_bits = int(rows.max(initial=0)).bit_length()
    spans_by_row = np.argsort(rows.astype(np.uint16) if row_bits <= 16 else rows, kind="stable")
    if spec.packing in CUTTING_STRATEGIES:
        return spans_by_row
    # Sorting (row, hash, index) as a single integer is several times faster than a lexsort. Two spans of one
    # document never share a row, so the item's hash alone orders them.
    bits = max(len(rows) - 1, 1).bit_length()
    hashes = hash_indices(items, key)
    free = 64 - bits - row_bits
    keys = (rows.astype(np.uint64) << np.uint64(64 - row_bits)) if row_bits else np.uint64(0)
    keys = keys | ((hashes >> np.uint64(64 - free)) << np.uint64(bits))
    keys |= np.arange(len(rows), dtype=np.uint64)
    keys = keys[spans_by_row]
    keys.sort(kind="stable")
    return (keys & np.uint64((1 << bits) - 1)).astype(np.int64)
