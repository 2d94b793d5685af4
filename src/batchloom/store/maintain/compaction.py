"""``compact``: one generation without removed documents, and the files of older ones gone."""

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
from batchloom.store.format import (
    LayerEntry,
    Manifest,
    PairIndex,
    ShardEntry,
    ShardMedia,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    format_shard_name,
    map_media,
    map_signature_file,
    read_manifest,
    resolve_store_folder,
)
from batchloom.store.maintain.generations import (
    commit_manifest,
    delete_stale_files,
    lock_store,
    make_successor,
    next_shard_numbers,
    refuse_unfinished,
    write_generation_report,
)
from batchloom.store.read import Store, iter_document_ranges, open_store
from batchloom.store.write import LengthsWriter, ShardWriter, sync_folder

REASON = "removed"


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What a compaction did.

    Attributes:
        path: the store.
        generation: its only generation from now on.
        made: whether there was something to do.
        documents: removed documents whose text is gone now.
        shards: shards that were written anew for that.
        files: files that were deleted.
        ended: numbers of the generations that can be opened no longer.
    """

    path: Path
    generation: int
    made: bool
    documents: int = 0
    shards: int = 0
    files: int = 0
    ended: tuple[int, ...] = ()


def compact_store(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> CompactionResult:
    """Make one generation of a store, without its removed documents; the older ones cannot be opened any more.

    Only shards that hold removed documents are written anew, under new numbers. Killed at any moment the
    store is as before or as after, and the same command finishes what is left.

    Args:
        path: the store's folder.
        progress: is called with the number of documents written since the last call.

    Raises:
        StoreMissingError, StoreError: there is no store, or it is damaged.
        StoreConflictError: another run is changing the store, or a job into it is unfinished.
        InputError: no document would be left.
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
                f"All documents of {folder} are removed: a store without any is none. Delete the folder instead."
            )
        changed, shards = _write_compacted(folder, base, progress or (lambda _: None))
        newest = make_successor(base, changed, "compacted")
        write_generation_report(folder, newest.generation, {"removed": removed_count})
        files += commit_manifest(folder, base, newest)
    return CompactionResult(
        folder,
        newest.generation,
        made=True,
        documents=removed_count,
        shards=shards,
        files=files,
        ended=base.readable,
    )


def _write_compacted(folder: Path, base: Manifest, tick: Callable[[int], None]) -> tuple[Manifest, int]:
    """The manifest without removed documents, whose new files are written; and how many shards these are."""
    numbers, rewritten = next_shard_numbers(base), 0
    subsets: dict[str, SubsetEntry] = {}
    removed_counts = _RemovedCounts(base)
    for name, entry in base.subsets.items():
        # Without it a flipped bit would get a checksum of its own.
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
        base,
        subsets=subsets,
        counts=removed_counts.counts(subsets),
        sources=removed_counts.sources(),
    ), rewritten


def _list_removed(store: Store, shard: int) -> NDArray[np.int64]:
    """Places of a shard's removed documents in it."""
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
    """A shard without these documents, under a new name."""
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
            ShardMedia(
                map_media(folder / f"{old.name}.media", old.documents),
                folder / f"{old.name}.blobs",
            ).take(remaining_documents)
            if old.media
            else None,
        )
    finally:
        writer.abandon()


def _make_subset_entry(store: Store, shards: list[ShardEntry], generation: int) -> SubsetEntry:
    """The entry of a subset whose shards are written: its lengths in one file again."""
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
    """Counts what each source loses."""

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
