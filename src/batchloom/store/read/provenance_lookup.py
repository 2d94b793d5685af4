"""Where many documents came from, and which documents came from a place: origins read by shard."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.settings import nearest, shown
from batchloom.store.format import Origin, StoreLengths, places_of
from batchloom.store.read.filtered_lengths import ChosenLengths
from batchloom.store.read.remote_lengths import FarLengths
from batchloom.store.read.store_reader import Store

# Documents that are looked at together, in a search and one after the other.
_PROBES, _MANY = 16, 1 << 16
# Records of a part are fewer than 2 to the power of so many.
_RECORD = 40


def origins_of(store: Store, documents: Sequence[int]) -> list[Origin | None]:
    """The origin of each document; None of a bare prefix, which does not say.

    Raises:
        StoreError: a shard's ``.docs`` is missing or damaged.
    """
    if store.manifest is None:
        return [None] * len(documents)
    places, bounds = places_of(store.manifest.sources), np.array(store.shards.bounds, np.int64)
    wanted = np.array(documents, np.int64)
    shards = bounds.searchsorted(wanted, side="right") - 1
    found: list[Origin | None] = [None] * len(documents)
    for shard in np.unique(shards).tolist():
        at = np.flatnonzero(shards == shard)
        mine = store.provenance.rows(shard, wanted[at] - bounds[shard])
        for place, origin in zip(at.tolist(), places.named(mine), strict=True):
            found[place] = origin
    return found


def source_named(store: Store, name: str) -> list[str]:
    """Names of the input files that are called so, or that belong to the data set of this name."""
    sources = store.manifest.sources if store.manifest else ()
    found = [source.name for source in sources if source.name == name]
    return found or [source.name for source in sources if source.dataset == name]


def documents_of(store: Store, file: str, record: int) -> list[int]:
    """Numbers of the documents of a record; none where it was left out.

    Documents stand in the order of their records, so that a few are looked at.

    Args:
        store: an open store.
        file: name of an input file of it.
        record: counted from 0 in the file.

    Raises:
        InputError: the store does not say where documents came from, has no such file, or that no such record.
        StoreError: a shard's ``.docs`` is missing or damaged.
    """
    if store.manifest is None or not store.location.on_disk:
        raise InputError(
            f"{store.path} does not say which records its documents came from; ask by the number of a document."
        )
    places = places_of(store.manifest.sources)
    names = [source.name for source in places.sources]
    if file not in names:
        raise InputError(
            f"{store.path} has no input called {shown(file)}{nearest(file, names) or '.'} batchloom log --json "
            "lists them."
        )
    number = names.index(file)
    records = sum(part.records for part in places.sources[number].parts)
    if not 0 <= record < records:
        raise InputError(
            f"There is no record {record} of {file}: {records:,} were read, numbered from 0."
        )
    parts = np.flatnonzero((places.numbers == number) & (places.before <= record))
    part = int(parts[places.before[parts] == places.before[parts].max()][-1])
    local = record - int(places.before[part])
    layers, wanted = _layers(store), (part << _RECORD) + local
    found: list[int] = []
    for start, stop in pairwise(layers):
        found += _numbers_of(store, start, stop, wanted)
    return found


def _layers(store: Store) -> list[int]:
    """Where the documents that each generation added begin, and documents at the end."""
    lengths = store.lengths
    if isinstance(lengths, StoreLengths | FarLengths | ChosenLengths):
        return [0, *np.cumsum(lengths.layers).tolist()]
    return [0, lengths.size]


def _numbers_of(store: Store, start: int, stop: int, wanted: int) -> list[int]:
    """Numbers of the documents of a record among those that a generation added."""
    low, high, step = start, stop, 2 * _PROBES
    ordered = True
    while ordered and high - low > _PROBES:
        at = np.linspace(low, high - 1, _PROBES).astype(np.int64)
        records = _records_of(store, at)
        first = int(records.searchsorted(wanted))
        high = int(at[first]) if first < len(at) else high
        low = int(at[first - 1]) + 1 if first else low
        ordered = bool((records[1:] >= records[:-1]).all())
    if not ordered:
        # Nothing of ours writes them so: then all are looked at.
        low, step = start, _MANY
    found: list[int] = []
    while low < stop:
        at = np.arange(low, min(low + step, stop))
        records = _records_of(store, at)
        found += at[records == wanted].tolist()
        if ordered and records[-1] > wanted:
            break
        low = int(at[-1]) + 1
    return found


def _records_of(store: Store, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Part and record of documents, as one number each, int64 [N]."""
    bounds = np.array(store.shards.bounds, np.int64)
    shards = bounds.searchsorted(documents, side="right") - 1
    found = np.empty(len(documents), np.int64)
    for shard in np.unique(shards).tolist():
        at = np.flatnonzero(shards == shard)
        rows = store.provenance.rows(shard, documents[at] - bounds[shard])
        found[at] = (rows.parts.astype(np.int64) << _RECORD) + rows.records.astype(np.int64)
    return found
