"""Iteration over the documents of a store, and lookup by record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.settings import quote_value, suggest
from batchloom.core.wording import format_count
from batchloom.store.format.shard_sidecars import (
    DocumentFields,
    DocumentProvenance,
    PairIndex,
)
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.store_reader import Store

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_DOCUMENTS = 1 << 14
_MAX_TOKENS = 1 << 20
# Documents per step of a search, and per step of a sequential scan.
_SEARCH_POINTS = 16
_SCAN_DOCUMENTS = 1 << 16
# A part has fewer than 2**40 records.
_RECORD_BITS = 40


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """Adjacent documents of one shard.

    Attributes:
        lengths: tokens of each document, int64 [n].
        ids: token ids of all documents back to back, in the store's dtype.
        flags: loss flags of the tokens.
        sources: index of each document's source in the manifest, int64 [n]; None for a bare prefix.
        records: number of each document's record in its source, int64 [n]; None for a bare prefix.
        sides: pair and side of each document; None without an objective.
        fields: columns that the documents carry; None if they carry none.
        columns: columns of their records; None if the shard has none.
    """

    lengths: NDArray[np.int64]
    ids: NDArray[Any]
    flags: LossFlags
    sources: NDArray[np.int64] | None
    records: NDArray[np.int64] | None
    sides: PairIndex | None = None
    fields: DocumentFields | None = None
    columns: "pa.Table | None" = None


def iter_document_ranges(store: Store, shard: int | None = None) -> Iterator[DocumentRange]:
    """Yield the documents of a store or of one shard, without removed ones.

    Raises:
        StoreError: a shard is missing, damaged, or contradicts the manifest.
    """
    part_table = None if store.manifest is None else store.reader.part_table
    bounds = store.shards.bounds
    for number in range(len(store.shards)) if shard is None else (shard,):
        first = bounds[number]
        stop = bounds[number + 1]
        sources = records = None
        if part_table is not None:
            provenance = store.provenance.shard(number)
            sources = part_table.numbers[provenance.parts]
            records = part_table.preceding_records[provenance.parts] + provenance.records.astype(np.int64)
        sides = store.shards.sides(number) if store.contents.objective else None
        fields = store.shards.fields(number)
        columns = store.shards.columns(number)
        for start, end in _iter_cuts(store, first, stop):
            numbers = np.arange(start, end)
            numbers = numbers[~mask_removed(store.contents.removed, numbers)]
            if not numbers.size:
                continue
            lengths = store.lengths.take(numbers).astype(np.int64)
            zeros = np.zeros(len(numbers), np.int64)
            rows = numbers - first
            ids = np.concatenate(store.read(numbers, zeros, lengths))
            flags = LossFlags.all_trained(ids.size)
            if store.masked or store.reader.weighted:
                flags = LossFlags.join(store.reader.flags(numbers, zeros, lengths))
            yield DocumentRange(
                lengths,
                ids,
                flags,
                None if sources is None else sources[rows],
                None if records is None else records[rows],
                None if sides is None else PairIndex(sides.pairs[rows], sides.sides[rows]),
                None if fields is None else fields.take(rows),
                None if columns is None else columns.take(rows),
            )


def _iter_cuts(store: Store, start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        lengths = store.lengths.slice(start, min(start + _MAX_DOCUMENTS, stop))
        token_ends = np.cumsum(lengths, dtype=np.int64)
        count = max(1, int(np.searchsorted(token_ends, _MAX_TOKENS, side="right")))
        yield start, start + count
        start += count


def read_remaining_lengths(store: Store, start: int, stop: int) -> NDArray[np.uint32]:
    """Return the lengths of documents ``start`` to ``stop - 1`` that are not removed."""
    lengths = store.lengths.slice(start, stop)
    first, last = store.contents.removed.searchsorted([start, stop])
    return np.delete(lengths, store.contents.removed[first:last] - start) if first < last else lengths


def to_int32(ids: NDArray[Any]) -> NDArray[np.int32]:
    if ids.size and ids.dtype.itemsize > 4 and int(np.abs(ids).max()) >= 2**31:
        raise InputError(
            f"Id {int(ids[np.abs(ids).argmax()])} does not fit into int32: no vocabulary is that large, so the "
            "prefix does not hold tokens."
        )
    return ids.astype(np.int32)


def find_provenance(store: Store, documents: Sequence[int]) -> list[DocumentProvenance | None]:
    """Return the provenance of each document; None for a bare prefix."""
    if store.manifest is None or not documents:
        return [None] * len(documents)
    provenance: dict[int, DocumentProvenance] = {}
    for shard, own, rows in _split_by_shard(store, np.array(documents, np.int64)):
        provenance |= zip(own.tolist(), store.provenance.rows(shard, rows), strict=True)
    return [provenance[index] for index in range(len(documents))]


def _split_by_shard(
    store: Store, documents: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield each shard, the indices of its documents, and their rows in it."""
    bounds = np.array(store.shards.bounds, np.int64)
    shards = bounds.searchsorted(documents, side="right") - 1
    for shard in np.unique(shards).tolist():
        own = np.flatnonzero(shards == shard)
        yield shard, own, documents[own] - bounds[shard]


def find_source_names(store: Store, name: str) -> list[str]:
    """Return the names of input files with this name or of the data set of this name."""
    sources = store.manifest.sources if store.manifest else ()
    names = [source.name for source in sources if source.name == name]
    return names or [source.name for source in sources if source.dataset == name]


def find_documents(store: Store, file: str, record: int) -> list[int]:
    """Return the numbers of the documents of a record; empty if it was left out.

    Documents are in the order of their records, so that a search reads only a few.

    Args:
        store: an open store.
        file: name of an input file of the store.
        record: 0-based number of the record in the file.

    Raises:
        InputError: the store has no provenance, no such file, or the file no such record.
        StoreError: a shard's ``.docs`` is missing or damaged.
    """
    if store.manifest is None or not store.location.on_disk:
        raise InputError(
            f"{store.path} does not say which records its documents came from; ask by the number of a document."
        )
    part_table = store.reader.part_table
    names = [source.name for source in part_table.sources]
    if file not in names:
        raise InputError(
            f"{store.path} has no input called {quote_value(file)}{suggest(file, names) or '.'} batchloom log --json "
            "lists them."
        )
    number = names.index(file)
    records = sum(part.records for part in part_table.sources[number].parts)
    if not 0 <= record < records:
        place = f"record {record:,} (line or row {record + 1:,})"
        raise InputError(f"{file} has no {place}: {format_count(records, 'record')} of it were read.")
    parts = np.flatnonzero((part_table.numbers == number) & (part_table.preceding_records <= record))
    part = int(parts[part_table.preceding_records[parts] == part_table.preceding_records[parts].max()][-1])
    part_record = record - int(part_table.preceding_records[part])
    record_key = (part << _RECORD_BITS) + part_record
    documents: list[int] = []
    for start, stop in pairwise([0, *np.cumsum(store.lengths.layers).tolist()]):
        documents += _find_in_layer(store, start, stop, record_key)
    return documents


def _find_in_layer(store: Store, start: int, stop: int, record_key: int) -> list[int]:
    low = start
    high = stop
    step = 2 * _SEARCH_POINTS
    is_ordered = True
    while is_ordered and high - low > _SEARCH_POINTS:
        candidates = np.linspace(low, high - 1, _SEARCH_POINTS).astype(np.int64)
        records = _read_record_keys(store, candidates)
        first = int(records.searchsorted(record_key))
        high = int(candidates[first]) if first < len(candidates) else high
        low = int(candidates[first - 1]) + 1 if first else low
        is_ordered = bool((records[1:] >= records[:-1]).all())
    if not is_ordered:
        # Batchloom writes records in ascending order; any other layer is scanned completely.
        low = start
        step = _SCAN_DOCUMENTS
    documents: list[int] = []
    while low < stop:
        candidates = np.arange(low, min(low + step, stop))
        records = _read_record_keys(store, candidates)
        documents += candidates[records == record_key].tolist()
        if is_ordered and records[-1] > record_key:
            break
        low = int(candidates[-1]) + 1
    return documents


def _read_record_keys(store: Store, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read part and record of documents, combined into one number each, int64 [N]."""
    keys = np.empty(len(documents), np.int64)
    for shard, own, rows in _split_by_shard(store, documents):
        table = store.reader.provenance(shard, rows)
        keys[own] = (table.parts.astype(np.int64) << _RECORD_BITS) + table.records.astype(np.int64)
    return keys
