"""The ``compact`` command: rewrite a store as one generation.

Removed documents and the files of older generations are deleted.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.files import refuse_url
from batchloom.store.format.layout import format_shard_name, resolve_store_folder
from batchloom.store.format.manifest import (
    LayerEntry,
    Manifest,
    ShardEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    read_manifest,
)
from batchloom.store.format.media_index import ShardMedia, map_media
from batchloom.store.format.shard_sidecars import PairIndex, map_signature_file
from batchloom.store.maintain.generations import (
    commit_manifest,
    delete_stale_files,
    lock_store,
    make_successor,
    next_shard_numbers,
    refuse_unfinished,
    write_generation_report,
)
from batchloom.store.read.document_walk import iter_document_ranges
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import LengthsWriter, ShardWriter, sync_folder

REASON = "removed"


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """Result of a compaction.

    Attributes:
        path: folder of the store.
        generation: number of its only remaining generation.
        made: whether a new generation was made.
        documents: number of removed documents whose text was deleted.
        shards: number of rewritten shards.
        files: number of deleted files.
        ended: numbers of the generations that can no longer be opened.
    """

    path: Path
    generation: int
    made: bool
    documents: int = 0
    shards: int = 0
    files: int = 0
    ended: tuple[int, ...] = ()


def compact_store(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> CompactionResult:
    """Rewrite a store as one generation without its removed documents.

    Older generations can no longer be opened. Only shards that hold removed documents are rewritten, under new numbers.
    After a crash the store is in the old or in the new state, and the same command completes the work.

    Args:
        path: folder of the store.
        progress: called with the number of documents written since the last call.

    Raises:
        StoreMissingError, StoreError: there is no store, or it is damaged.
        StoreConflictError: another run is changing the store, or it has an unfinished job.
        InputError: no document would remain.
        OutputError: the store cannot be written.
    """
    refuse_url(path, "The store")
    folder = resolve_store_folder(path)
    read_manifest(folder)
    with lock_store(folder):
        base = read_manifest(folder)
        refuse_unfinished(folder)
        # An earlier compaction may have been killed before its last files were deleted.
        files = delete_stale_files(folder, base)
        removed_count = sum(entry.removed.documents for entry in base.subsets.values() if entry.removed)
        if len(base.readable) == 1 and not removed_count:
            return CompactionResult(folder, base.generation, made=False, files=files)
        if removed_count == sum(entry.documents for entry in base.subsets.values()):
            raise InputError(
                f"All documents of {folder} are removed, and a store cannot be empty. Delete the folder instead."
            )
        changed, shards = _write_compacted(folder, base, progress or (lambda _: None))
        newest = make_successor(base, changed, "compacted")
        write_generation_report(folder, newest.generation, {"removed": removed_count})
        files += commit_manifest(folder, base, newest)
    return CompactionResult(
        folder, newest.generation, made=True, documents=removed_count, shards=shards, files=files, ended=base.readable
    )


def _write_compacted(folder: Path, base: Manifest, tick: Callable[[int], None]) -> tuple[Manifest, int]:
    """Write the compacted shards; return the manifest and the number of new shards."""
    numbers, rewritten = next_shard_numbers(base), 0
    subsets: dict[str, SubsetEntry] = {}
    removed_counts = _RemovedCounts(base)
    for name, entry in base.subsets.items():
        # Without verification, a flipped bit would be copied and get a valid checksum.
        store = open_store(folder, name, generation=base.generation, verify="first-read")
        if not store.contents.removed.size and len(entry.all_layers) == 1:
            subsets[name] = entry
            continue
        shards: list[ShardEntry] = []
        for shard, old in enumerate(entry.shards):
            removed_documents = _list_removed(store, shard)
            if not removed_documents.size:
                shards.append(old)
                continue
            removed_counts.count(store, shard, removed_documents)
            if removed_documents.size < old.documents:
                stem = folder / name / format_shard_name(numbers[name])
                shards.append(_write_compacted_shard(store, entry, shard, removed_documents, stem, tick))
                numbers[name] += 1
                rewritten += 1
        if shards:
            subsets[name] = _make_subset_entry(store, shards, base.generation + 1)
    return replace(
        base, subsets=subsets, counts=removed_counts.counts(subsets), sources=removed_counts.sources()
    ), rewritten


def _list_removed(store: Store, shard: int) -> NDArray[np.int64]:
    """Return the rows of a shard's removed documents."""
    bounds = store.shards.bounds[shard : shard + 2]
    begin, end = store.contents.removed.searchsorted(bounds)
    return store.contents.removed[begin:end] - bounds[0]


def _read_remaining_lengths(store: Store, shard: int) -> NDArray[np.uint32]:
    lengths = store.lengths.slice(*store.shards.bounds[shard : shard + 2])
    return np.delete(lengths, _list_removed(store, shard))


def _write_compacted_shard(
    store: Store,
    entry: SubsetEntry,
    shard: int,
    removed_documents: NDArray[np.int64],
    stem: Path,
    tick: Callable[[int], None],
) -> ShardEntry:
    """Write a shard without its removed documents, under a new name."""
    writer = ShardWriter(stem, store.dtype)
    old, folder = entry.shards[shard], store.path / store.split
    try:
        for document_range in iter_document_ranges(store, shard):
            writer.append(document_range.ids, document_range.trained)
            tick(len(document_range.lengths))
        provenance = store.provenance.shard(shard)
        remaining_documents = np.delete(np.arange(len(provenance)), removed_documents)
        sides = store.shards.sides(shard) if store.contents.preferences else None
        return writer.finish(
            _read_remaining_lengths(store, shard),
            provenance.take(remaining_documents),
            PairIndex(sides.pairs[remaining_documents], sides.sides[remaining_documents]) if sides else None,
            map_signature_file(folder / f"{old.name}.bands", old.documents).take(remaining_documents)
            if old.bands
            else None,
            ShardMedia(map_media(folder / f"{old.name}.media", old.documents), folder / f"{old.name}.blobs").take(
                remaining_documents
            )
            if old.media
            else None,
        )
    finally:
        writer.abandon()


def _make_subset_entry(store: Store, shards: list[ShardEntry], generation: int) -> SubsetEntry:
    """Write the lengths of a compacted subset in one file and return its entry."""
    folder = store.path / store.split
    writer = LengthsWriter(folder, generation)
    try:
        for shard in range(len(store.shards)):
            writer.append(_read_remaining_lengths(store, shard))
        lengths, header_checksum = writer.finish()
    finally:
        writer.abandon()
    sync_folder(folder)
    documents = sum(shard.documents for shard in shards)
    return SubsetEntry(
        documents=documents,
        tokens=sum(shard.tokens for shard in shards),
        lengths=lengths,
        shards=tuple(shards),
        layers=(LayerEntry(generation, documents, lengths, header_checksum),),
        sums=header_checksum,
    )


class _RemovedCounts:
    """Removed documents and tokens per part, and the manifest counts without them."""

    def __init__(self, base: Manifest) -> None:
        self._base = base
        parts = sum(len(source.parts) for source in base.sources)
        self._documents, self._tokens = np.zeros(parts, np.int64), np.zeros(parts, np.int64)

    def count(self, store: Store, shard: int, removed_documents: NDArray[np.int64]) -> None:
        parts = store.provenance.shard(shard).parts[removed_documents]
        lengths = store.lengths.take(removed_documents + store.shards.bounds[shard]).astype(np.int64)
        np.add.at(self._documents, parts, 1)
        np.add.at(self._tokens, parts, lengths)

    def sources(self) -> tuple[SourceEntry, ...]:
        updated_sources, part = [], 0
        for source in self._base.sources:
            part_slice = slice(part, part := part + len(source.parts))
            updated_sources.append(
                replace(
                    source,
                    documents=source.documents - int(self._documents[part_slice].sum()),
                    tokens=source.tokens - int(self._tokens[part_slice].sum()),
                )
            )
        return tuple(updated_sources)

    def counts(self, subsets: dict[str, SubsetEntry]) -> StoreCounts:
        dropped = Counter(self._base.counts.dropped)
        if removed_count := int(self._documents.sum()):
            dropped[REASON] += removed_count
        return replace(
            self._base.counts,
            documents=sum(entry.documents for entry in subsets.values()),
            tokens=sum(entry.tokens for entry in subsets.values()),
            dropped=dict(sorted(dropped.items())),
        )
