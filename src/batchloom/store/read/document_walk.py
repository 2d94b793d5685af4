"""Sequential iteration over the documents of an open store."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.store.format.shard_sidecars import PairIndex
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.store_reader import Store

_MAX_DOCUMENTS = 1 << 14
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """Adjacent documents of one shard.

    Attributes:
        lengths: tokens of each document, int64 [n].
        ids: token ids of all documents back to back, in the store's dtype.
        trained: trained flag of each token; None in a store without masks.
        sources: index of each document's source in the manifest, int64 [n]; None for a bare prefix.
        records: number of each document's record in its source, int64 [n]; None for a bare prefix.
        sides: pair and side of each document; None without preferences.
    """

    lengths: NDArray[np.int64]
    ids: NDArray[Any]
    trained: NDArray[np.bool_] | None
    sources: NDArray[np.int64] | None
    records: NDArray[np.int64] | None
    sides: PairIndex | None = None


def iter_document_ranges(store: Store, shard: int | None = None) -> Iterator[DocumentRange]:
    """Yield the documents of a store or of one shard, without removed ones.

    Raises:
        StoreError: a shard is missing, damaged, or contradicts the manifest.
    """
    parts = _map_parts(store)
    bounds = store.shards.bounds
    for number in range(len(store.shards)) if shard is None else (shard,):
        provenance = None if parts is None else _read_provenance(store, number, *parts)
        sides = store.shards.sides(number) if store.contents.preferences else None
        first, stop = bounds[number], bounds[number + 1]
        for start, end in _iter_cuts(store, first, stop):
            numbers = np.arange(start, end)
            numbers = numbers[~mask_removed(store.contents.removed, numbers)]
            if not numbers.size:
                continue
            lengths = store.lengths.take(numbers).astype(np.int64)
            zeros = np.zeros(len(numbers), np.int64)
            trained = None
            if store.masked:
                trained = np.concatenate(store.mask(numbers, zeros, lengths))
            shard_rows = numbers - first
            yield DocumentRange(
                lengths,
                np.concatenate(store.read(numbers, zeros, lengths)),
                trained,
                None if provenance is None else provenance[0][shard_rows],
                None if provenance is None else provenance[1][shard_rows],
                None if sides is None else PairIndex(sides.pairs[shard_rows], sides.sides[shard_rows]),
            )


def _iter_cuts(store: Store, start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        lengths = store.lengths.slice(start, min(start + _MAX_DOCUMENTS, stop))
        token_ends = np.cumsum(lengths, dtype=np.int64)
        count = max(1, int(np.searchsorted(token_ends, _MAX_TOKENS, side="right")))
        yield start, start + count
        start += count


def _map_parts(store: Store) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the source index of each part, and the source's records before it."""
    if store.manifest is None:
        return None
    sources, preceding_records = [], []
    for number, source in enumerate(store.manifest.sources):
        record_count = 0
        for part in source.parts:
            sources.append(number)
            preceding_records.append(record_count)
            record_count += part.records
    return np.array(sources, np.int64), np.array(preceding_records, np.int64)


def _read_provenance(
    store: Store, shard: int, sources: NDArray[np.int64], preceding_records: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    provenance = store.provenance.shard(shard)
    return sources[provenance.parts], preceding_records[provenance.parts] + provenance.records.astype(np.int64)


def to_int32(ids: NDArray[Any]) -> NDArray[np.int32]:
    """Convert ids to int32 [n]."""
    if ids.size and ids.dtype.itemsize > 4 and int(np.abs(ids).max()) >= 2**31:
        raise InputError(
            f"Id {int(ids[np.abs(ids).argmax()])} does not fit into int32: no vocabulary is that large, so the "
            "prefix does not hold tokens."
        )
    return ids.astype(np.int32)
