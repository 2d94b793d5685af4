"""Conversion of packed items to rows in serving order."""

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey, hash_indices, shuffle_range
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.rows import Rows, align_lengths, reorder_rows
from batchloom.plan.packing.strategies import CUTTING_STRATEGIES, PackingResult, pack

Ints = NDArray[np.int64]


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
    item_indices, starts, sizes = packed.items[order], packed.starts[order], packed.lengths[order]
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

    Args:
        remaining_rows: rows not served yet.
        name: name of the source.
        spec: the new settings.
        pool_location: epoch and slot of the next pool, and the lane if there are several.
    """
    order = np.lexsort((remaining_rows.starts, remaining_rows.documents))
    documents, starts, lengths = (
        remaining_rows.documents[order],
        remaining_rows.starts[order],
        remaining_rows.lengths[order],
    )
    continues_previous = (documents[1:] == documents[:-1]) & (starts[1:] == starts[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(len(order), 1), bool), ~continues_previous]))
    sizes = np.add.reduceat(lengths, first) if len(first) else lengths
    keys = [derive_key(spec.seed, name, purpose, *pool_location) for purpose in ("rest spans", "rest sequences")]
    return pack_rows(documents[first], starts[first], sizes, spec, (keys[0], keys[1]))


def _order_spans(packed: PackingResult, sequence_order: Ints, spec: PlanSpec, key: HashKey) -> Ints:
    """Return the order of spans by row in serving order.

    Spans inside a row are shuffled, or in store order without ``shuffle``.
    """
    items, inverse_order = packed.items, np.empty(packed.count, np.int64)
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
