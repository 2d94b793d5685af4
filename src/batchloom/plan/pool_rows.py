"""From the documents of one pool to its rows: the one way of every order, of plans and of streams."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.core.keys import Key, keyed_hashes, shuffled
from batchloom.plan.pack import Packed, pack
from batchloom.plan.rows import Rows, reorder_rows
from batchloom.plan.spec import PlanSpec


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The keys of a pool.

    Attributes:
        spans: orders the spans inside each sequence.
        sequences: orders the sequences.
    """

    spans: Key
    sequences: Key


def fitted(lengths: NDArray[np.uint32], spec: PlanSpec) -> NDArray[np.int64]:
    """Lengths as they are packed: what ``overlong`` leaves of each document, int64 [N]."""
    found = lengths.astype(np.int64)
    if spec.overlong == "truncate":
        return np.minimum(found, spec.seq_len)
    if spec.overlong == "drop":
        found[found > spec.seq_len] = 0
    return found


def pool_rows(
    members: NDArray[np.int64], lengths: NDArray[np.int64], spec: PlanSpec, keys: PoolKeys
) -> Rows:
    """All rows of a pool, in the order of its sequences.

    Args:
        members: numbers of its documents in the order they are packed, int64 [N].
        lengths: of each as it is packed, int64 [N]; see :func:`fitted`.
        spec: seq_len, packing and shuffle are used.
        keys: of the pool.
    """
    packed = pack(lengths, spec.seq_len, spec.packing)
    order = _span_order(packed, spec, keys.spans)
    taken = packed.lengths[order]
    pointers = np.zeros(packed.count + 1, np.int64)
    np.cumsum(np.bincount(packed.sequences, minlength=packed.count), out=pointers[1:])
    begins = np.cumsum(taken) - taken
    first = begins[pointers[:-1]] if packed.count else begins
    rows = Rows(
        pointers=pointers,
        sources=np.zeros(len(order), np.int32),
        documents=members[packed.items[order]],
        starts=packed.starts[order],
        lengths=taken,
        places=begins - np.repeat(first, np.diff(pointers)),
    )
    return reorder_rows(rows, _row_order(rows, spec, keys.sequences))


def _span_order(packed: Packed, spec: PlanSpec, key: Key) -> NDArray[np.int64]:
    """Spans row by row; inside a row shuffled, or as in the store."""
    sequences, items = packed.sequences, packed.items
    if spec.packing == "wrap":
        return np.arange(len(sequences))
    if not spec.shuffle:
        return np.lexsort((packed.starts, items, sequences))
    # One sort of (row, hash, index) in a single integer is several times a lexsort. Two
    # pieces of one document never share a row, so the item's hash alone orders them.
    bits = max(len(sequences) - 1, 1).bit_length()
    row_bits = int(sequences.max(initial=0)).bit_length()
    hashes = keyed_hashes(items, key)
    free = 64 - bits - row_bits
    keys = (sequences.astype(np.uint64) << np.uint64(64 - row_bits)) if row_bits else np.uint64(0)
    keys = keys | ((hashes >> np.uint64(64 - free)) << np.uint64(bits))
    keys |= np.arange(len(sequences), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64((1 << bits) - 1)).astype(np.int64)


def _row_order(rows: Rows, spec: PlanSpec, key: Key) -> NDArray[np.int64]:
    if spec.shuffle:
        return shuffled(len(rows), key)
    first = rows.pointers[:-1]
    return np.lexsort((rows.starts[first], rows.documents[first]))
