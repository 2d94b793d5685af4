"""Removal of documents in a new generation, and compaction to one generation.

After ``remove``, the documents read as untrained end tokens. ``compact`` rewrites the store without them, and deletes
the files of older generations.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.files import describe_missing_path, describe_os_error, read_regular_file, refuse_url
from batchloom.core.settings import quote_value, suggest
from batchloom.store.format.layout import SUBSETS, format_removed_name, format_shard_name, resolve_store_folder
from batchloom.store.format.manifest import (
    LayerEntry,
    Manifest,
    RemovedEntry,
    ShardEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    read_manifest,
)
from batchloom.store.format.media_index import ShardMedia, map_media
from batchloom.store.format.provenance import ProvenanceTable
from batchloom.store.format.shard_sidecars import PairIndex, map_signature_file
from batchloom.store.format.store_lengths import encode_removed, mask_removed
from batchloom.store.maintain.generations import (
    commit_manifest,
    delete_stale_files,
    lock_store,
    make_successor,
    next_shard_numbers,
    refuse_unfinished,
    write_generation_report,
)
from batchloom.store.read.document_walk import iter_document_ranges, read_remaining_lengths
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import LengthsWriter, ShardWriter, sync_folder, write_file

_BATCH_DOCUMENTS = 1024
_NUMBER_PATTERN = re.compile(rf"({'|'.join(SUBSETS)}):(\d{{1,18}})")
_HASH_PATTERN = re.compile(r"[0-9a-fA-F]{32}")
_RECORD_PATTERN = re.compile(r"(\S.*?)\s+(\d{1,18})")
_FORMS_HINT = (
    "a line is a document's number (train:17), its hash (32 hex digits), or the name of a source and a record of it, "
    "counted from 0 (wiki.jsonl 17)"
)
_MAX_LISTED = 10
_RECORD_BITS = 40
_REMOVED_REASON = "removed"


class SelectionLine(NamedTuple):
    """A line of a document list: its number and its text."""

    number: int
    text: str


@dataclass(slots=True)
class NamedDocuments:
    """Requested documents, by the way they are named.

    Attributes:
        sources: indices of sources whose documents are all selected.
        numbers: for each subset, document numbers with their lines.
        hashes: (high, low) halves of hashes with their lines.
        records: (source name, record) pairs with their lines.
    """

    sources: set[int] = field(default_factory=set)
    numbers: dict[str, dict[int, SelectionLine]] = field(default_factory=dict)
    hashes: dict[tuple[int, int], SelectionLine] = field(default_factory=dict)
    records: dict[tuple[str, int], SelectionLine] = field(default_factory=dict)


def add_named_sources(named_documents: NamedDocuments, patterns: Sequence[str], manifest: Manifest) -> None:
    """Add all documents of sources or data sets that match the names or globs."""
    # Most sources have no data set; an empty name must not match all of them.
    source_names = [[name for name in (source.name, source.dataset) if name] for source in manifest.sources]
    for pattern in patterns:
        matches = {n for n, names in enumerate(source_names) if pattern in names}
        matches = matches or {
            n for n, names in enumerate(source_names) if any(fnmatchcase(name, pattern) for name in names)
        }
        if not matches:
            hint = suggest(pattern, [name for names in source_names for name in names])
            raise InputError(
                f"sources: no source of the store is called {quote_value(pattern)}{hint or '.'} batchloom log "
                "--json lists them; * and ? stand for any characters."
            )
        named_documents.sources |= matches


def add_named_documents(named_documents: NamedDocuments, path: Path, manifest: Manifest) -> None:
    """Add the documents listed in a file; empty lines and lines with # are skipped."""
    try:
        text = read_regular_file(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        remedy = "name a file that lists documents"
        raise InputMissingError(describe_missing_path(str(path), remedy)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    problems: list[str] = []
    for count, raw in enumerate(text.splitlines(), 1):
        line = SelectionLine(count, raw.strip())
        if line.text and not line.text.startswith("#") and (fault := _add_line(named_documents, line, manifest)):
            problems.append(f"{path}:{count}: {fault}")
    if problems:
        more = f"\nand {len(problems) - _MAX_LISTED:,} more" if len(problems) > _MAX_LISTED else ""
        raise InputError("\n".join(problems[:_MAX_LISTED]) + more + f"\n{_FORMS_HINT}.")


def _add_line(named_documents: NamedDocuments, line: SelectionLine, manifest: Manifest) -> str:
    """Add the document of a line; return the fault of an invalid line, else ""."""
    if match := _NUMBER_PATTERN.fullmatch(line.text):
        subset, number = match[1], int(match[2])
        document_count = manifest.subsets[subset].documents if subset in manifest.subsets else 0
        if number >= document_count:
            return f"there is no document {line.text}: subset {subset} has {document_count:,}, numbered from 0"
        named_documents.numbers.setdefault(subset, {})[number] = line
    elif _HASH_PATTERN.fullmatch(line.text):
        value = int(line.text, 16)
        named_documents.hashes[value >> 64, value & 0xFFFFFFFFFFFFFFFF] = line
    elif match := _RECORD_PATTERN.fullmatch(line.text):
        named_documents.records[match[1], int(match[2])] = line
    else:
        return f"{quote_value(line.text)} names no document"
    return ""


@final
class DocumentSelection:
    """Matcher of named documents, shard by shard, that records which lines matched.

    ``manifest`` is that of the store.
    """

    def __init__(self, named_documents: NamedDocuments, manifest: Manifest) -> None:
        self._named_documents = named_documents
        part_selected: list[bool] = []
        records: dict[int, SelectionLine] = {}
        part_ranges: dict[str, list[tuple[int, int, int]]] = {}
        part = 0
        for number, source in enumerate(manifest.sources):
            first_record = 0
            for entry in source.parts:
                part_selected.append(number in named_documents.sources)
                part_ranges.setdefault(source.name, []).append((part, first_record, entry.records))
                first_record += entry.records
                part += 1
        for (name, record), line in named_documents.records.items():
            for part_index, first_record, count in part_ranges.get(name, ()):
                if first_record <= record < first_record + count:
                    records[part_index << _RECORD_BITS | record - first_record] = line
        # Unlisted parts are mapped to the last element, which is never selected.
        self._part_selected = np.array([*part_selected, False])
        self._numbers = {
            subset: np.array(sorted(numbers), np.int64) for subset, numbers in named_documents.numbers.items()
        }
        self._records = records
        self._keys = np.array(sorted(records), np.uint64)
        self._high = np.array(sorted({high for high, _ in named_documents.hashes}), np.uint64)
        self._matched_lines: set[SelectionLine] = set()

    def select_in_shard(self, subset: str, first: int, provenance: ProvenanceTable) -> NDArray[np.int64]:
        """Return the numbers of the named documents of a shard, ascending, int64.

        ``first`` is the number of the shard's first document, ``provenance`` that of its documents.
        """
        parts = provenance.parts.astype(np.int64)
        is_selected = self._part_selected[np.minimum(parts, len(self._part_selected) - 1)]
        if self._keys.size:
            keys = (parts.astype(np.uint64) << np.uint64(_RECORD_BITS)) | provenance.records
            for row in np.flatnonzero(np.isin(keys, self._keys)).tolist():
                is_selected[row] = True
                self._matched_lines.add(self._records[int(keys[row])])
        if self._high.size:
            for row in np.flatnonzero(np.isin(provenance.hashes[:, 1], self._high)).tolist():
                low, high = provenance.hashes[row].tolist()
                if line := self._named_documents.hashes.get((high, low)):
                    is_selected[row] = True
                    self._matched_lines.add(line)
        numbers = self._numbers.get(subset, np.zeros(0, np.int64))
        begin, end = numbers.searchsorted([first, first + len(provenance)])
        is_selected[numbers[begin:end] - first] = True
        return np.flatnonzero(is_selected) + first

    def list_absent(self) -> tuple[str, ...]:
        """List the lines that match no document and no record read, in file order."""
        lines: Iterable[SelectionLine] = (
            *self._named_documents.hashes.values(),
            *self._named_documents.records.values(),
        )
        return _list_line_texts({*lines} - self._matched_lines - {*self._records.values()})

    def list_left_out(self) -> tuple[str, ...]:
        """List the lines of records that were read but have no document, in file order."""
        return _list_line_texts({*self._records.values()} - self._matched_lines)


def _list_line_texts(lines: Iterable[SelectionLine]) -> tuple[str, ...]:
    return tuple(line.text for line in sorted(lines))


@dataclass(frozen=True, slots=True)
class RemovalResult:
    """Result of a removal or a dry run.

    Attributes:
        path: folder of the store.
        generation: number of the new generation; None if nothing was removed and for a
            dry run.
        documents: number of removed documents.
        tokens: number of their tokens.
        by_source: name, documents and tokens of each affected source, in store order.
        before: number of named documents that were removed before.
        absent: lines of the file that match nothing in the store.
        left_out: lines of the file that name records without a document in the store:
            they were duplicates, dropped, empty, bad or compacted away. A duplicate's text is stored under
            another record, and its hash selects it.
        emptied: whether no document remains.
    """

    path: Path
    generation: int | None
    documents: int
    tokens: int
    by_source: tuple[tuple[str, int, int], ...]
    before: int
    absent: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    emptied: bool = False


def remove_documents(
    path: str | os.PathLike[str],
    *,
    sources: Sequence[str] = (),
    documents_file: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
) -> RemovalResult:
    """Remove documents from a store in a new generation.

    They read as untrained end tokens, so that lengths, numbers and plans survive. Older generations and the shards
    hold the text until :func:`~batchloom.store.compact_store`. Both sides of a preference pair are removed.

    Args:
        path: folder of the store.
        sources: names or globs of sources or data sets.
        documents_file: a file with one document per line: ``train:17``, 32 hex digits of its hash, or the name of a
            source and a record number.
        dry_run: report the result without changing the store.

    Raises:
        SettingsError: neither ``sources`` nor ``documents_file`` is given.
        StoreMissingError, StoreError: there is no store, or it is damaged.
        StoreConflictError: another run is changing the store, or it has an unfinished job.
        InputError: a name matches nothing, or a line has an unknown form.
        OutputError: the store cannot be written.
    """
    refuse_url(path, "The store")
    folder = resolve_store_folder(path)
    base = read_manifest(folder)
    if not sources and documents_file is None:
        problem = "sources: missing; name sources (--source NAME), or a list of documents (--documents-file FILE)"
        raise SettingsError([problem])
    with nullcontext() if dry_run else lock_store(folder):
        base = read_manifest(folder)
        named_documents = NamedDocuments()
        add_named_sources(named_documents, sources, base)
        if documents_file is not None:
            add_named_documents(named_documents, Path(documents_file), base)
        selection = DocumentSelection(named_documents, base)
        selected_documents = {name: _select_documents(folder, name, base, selection) for name in base.subsets}
        documents_to_remove, already_removed = _split_already_removed(selected_documents)
        source_summary = _summarize_sources(documents_to_remove, base)
        new_generation = None
        if not dry_run and source_summary:
            refuse_unfinished(folder)
            new_generation = _commit_removal(folder, base, documents_to_remove, tuple(sources))
    return RemovalResult(
        folder,
        new_generation,
        sum(documents for _, documents, _ in source_summary),
        sum(tokens for _, _, tokens in source_summary),
        source_summary,
        already_removed,
        selection.list_absent(),
        selection.list_left_out(),
        _is_all_removed(selected_documents, documents_to_remove),
    )


_SelectedDocuments = dict[str, tuple[Store, NDArray[np.int64]]]


def _select_documents(
    folder: Path, name: str, base: Manifest, selection: DocumentSelection
) -> tuple[Store, NDArray[np.int64]]:
    """Return the open subset and the numbers of its named documents."""
    store = open_store(folder, name, generation=base.generation)
    numbers_by_shard = [
        selection.select_in_shard(name, store.shards.bounds[shard], store.provenance.shard(shard))
        for shard in range(len(store.shards))
    ]
    numbers = np.concatenate(numbers_by_shard)
    if base.preferences == "pairs":
        numbers = np.unique(np.concatenate([numbers & ~1, numbers | 1]))
    return store, numbers


def _split_already_removed(selected_documents: _SelectedDocuments) -> tuple[_SelectedDocuments, int]:
    """Return the documents to remove, and the number of those removed before."""
    documents_to_remove: _SelectedDocuments = {}
    already_removed = 0
    for name, (store, numbers) in selected_documents.items():
        is_removed = mask_removed(store.contents.removed, numbers)
        already_removed += int(np.count_nonzero(is_removed))
        if not is_removed.all():
            documents_to_remove[name] = store, numbers[~is_removed]
    return documents_to_remove, already_removed


def _is_all_removed(selected_documents: _SelectedDocuments, documents_to_remove: _SelectedDocuments) -> bool:
    """Return whether no document remains after the removal."""
    stores = [store for store, _ in selected_documents.values()]
    removed_count = sum(len(numbers) for _, numbers in documents_to_remove.values())
    return removed_count + sum(store.contents.removed.size for store in stores) == sum(map(len, stores))


def _summarize_sources(documents_to_remove: _SelectedDocuments, base: Manifest) -> tuple[tuple[str, int, int], ...]:
    """Return name, documents and tokens of each affected source."""
    source_by_part = np.repeat(np.arange(len(base.sources)), [len(source.parts) for source in base.sources])
    documents = np.zeros(len(base.sources), np.int64)
    tokens = np.zeros(len(base.sources), np.int64)
    for store, numbers in documents_to_remove.values():
        for shard in range(len(store.shards)):
            first, stop = store.shards.bounds[shard], store.shards.bounds[shard + 1]
            begin, end = numbers.searchsorted([first, stop])
            shard_documents = numbers[begin:end]
            source_indices = source_by_part[store.provenance.shard(shard).parts[shard_documents - first]]
            lengths = store.lengths.take(shard_documents).astype(np.int64)
            np.add.at(documents, source_indices, 1)
            np.add.at(tokens, source_indices, lengths)
    return tuple((base.sources[n].name, int(documents[n]), int(tokens[n])) for n in np.flatnonzero(documents).tolist())


def _commit_removal(
    folder: Path, base: Manifest, documents_to_remove: _SelectedDocuments, selected: tuple[str, ...]
) -> int:
    """Commit a generation with the documents removed; return its number."""
    number = base.generation + 1
    subsets = dict(base.subsets)
    for name, (store, numbers) in documents_to_remove.items():
        old = subsets[name].removed
        removed_documents = np.union1d(store.contents.removed, numbers)
        file = write_file(folder / name / format_removed_name(number), encode_removed(removed_documents))
        sync_folder(folder / name)
        tokens = int(store.lengths.take(numbers).sum(dtype=np.int64))
        entry = RemovedEntry(
            number,
            int(removed_documents.size),
            tokens + (old.tokens if old else 0),
            _count_trained_tokens(store, numbers) + (old.trained if old else 0),
            file,
        )
        subsets[name] = replace(subsets[name], removed=entry)
    write_generation_report(folder, number, {"removed": selected})
    commit_manifest(folder, base, make_successor(base, replace(base, subsets=subsets), "removed", selected))
    return number


def _count_trained_tokens(store: Store, numbers: NDArray[np.int64]) -> int:
    """Count the trained tokens of documents in bounded batches."""
    trained = 0
    for start in range(0, numbers.size, _BATCH_DOCUMENTS):
        batch = numbers[start : start + _BATCH_DOCUMENTS]
        lengths = store.lengths.take(batch).astype(np.int64)
        masks = store.mask(batch, np.zeros_like(batch), lengths)
        trained += sum(int(np.count_nonzero(mask)) for mask in masks)
    return trained


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
            read_remaining_lengths(store, *store.shards.bounds[shard : shard + 2]),
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
            writer.append(read_remaining_lengths(store, *store.shards.bounds[shard : shard + 2]))
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
            dropped[_REMOVED_REASON] += removed_count
        return replace(
            self._base.counts,
            documents=sum(entry.documents for entry in subsets.values()),
            tokens=sum(entry.tokens for entry in subsets.values()),
            dropped=dict(sorted(dropped.items())),
        )
