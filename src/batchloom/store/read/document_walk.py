"""All documents of an open store in order, a bounded number at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.store.format import Sides, are_removed
from batchloom.store.read.store_reader import Store

_DOCUMENTS = 1 << 14
_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring documents of one shard.

    Attributes:
        lengths: tokens of each, int64 [n].
        ids: the ids of all back to back, in the store's dtype.
        trained: for each of ``ids`` whether it is trained; None in a store without masks.
        sources: number of each document's source in the manifest, int64 [n]; None for a bare prefix.
        records: number of each document's record in its source, int64 [n]; None for a bare prefix.
        sides: pair and side of each document; None where they are no preferences.
    """

    lengths: NDArray[np.int64]
    ids: NDArray[Any]
    trained: NDArray[np.bool_] | None
    sources: NDArray[np.int64] | None
    records: NDArray[np.int64] | None
    sides: Sides | None = None


def walk(store: Store, shard: int | None = None) -> Iterator[Stretch]:
    """The documents of a store, or of one of its shards; removed ones are left out.

    Raises:
        StoreError: a shard is missing, damaged, or contradicts the manifest.
    """
    parts = _parts(store)
    bounds = store.shards.bounds
    for number in range(len(store.shards)) if shard is None else (shard,):
        origins = None if parts is None else _origins(store, number, *parts)
        sides = store.shards.sides(number) if store.contents.preferences else None
        first, stop = bounds[number], bounds[number + 1]
        for start, end in _cuts(store, first, stop):
            numbers = np.arange(start, end)
            numbers = numbers[~are_removed(store.contents.removed, numbers)]
            if not numbers.size:
                continue
            lengths = store.lengths.take(numbers).astype(np.int64)
            zeros = np.zeros(len(numbers), np.int64)
            trained = None
            if store.masked:
                trained = np.concatenate(store.mask(numbers, zeros, lengths))
            mine = numbers - first
            yield Stretch(
                lengths,
                np.concatenate(store.read(numbers, zeros, lengths)),
                trained,
                None if origins is None else origins[0][mine],
                None if origins is None else origins[1][mine],
                None if sides is None else Sides(sides.pairs[mine], sides.sides[mine]),
            )


def _cuts(store: Store, start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        lengths = store.lengths.slice(start, min(start + _DOCUMENTS, stop))
        sums = np.cumsum(lengths, dtype=np.int64)
        count = max(1, int(np.searchsorted(sums, _TOKENS, side="right")))
        yield start, start + count
        start += count


def _parts(store: Store) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Of each part its source's number, and the records of that source before it."""
    if store.manifest is None:
        return None
    sources, before = [], []
    for number, source in enumerate(store.manifest.sources):
        earlier = 0
        for part in source.parts:
            sources.append(number)
            before.append(earlier)
            earlier += part.records
    return np.array(sources, np.int64), np.array(before, np.int64)


def _origins(
    store: Store, shard: int, sources: NDArray[np.int64], before: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    found = store.provenance.shard(shard)
    return sources[found.parts], before[found.parts] + found.records.astype(np.int64)


def int32_ids(ids: NDArray[Any]) -> NDArray[np.int32]:
    """Ids as int32 [n].

    Raises:
        InputError: one does not fit, which only a bare prefix can hold.
    """
    if ids.size and ids.dtype.itemsize > 4 and int(np.abs(ids).max()) >= 2**31:
        raise InputError(
            f"Id {int(ids[np.abs(ids).argmax()])} does not fit into int32: no vocabulary is that large, so that the "
            "prefix holds something else than tokens."
        )
    return ids.astype(np.int32)
