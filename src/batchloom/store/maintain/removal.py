"""Removal of documents in a new generation, and compaction to one generation.

After ``remove``, the documents read as untrained end tokens. ``compact`` rewrites the store without them, and deletes
the files of older generations.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
    SubsetEntry,
    read_manifest,
)
from batchloom.store.format.media_index import ShardMedia, map_media
from batchloom.store.format.shard_sidecars import PairIndex, ProvenanceTable, map_fields, map_signature_file
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
from batchloom.store.read.subset_reader import count_trained_tokens
from batchloom.store.write.store_writer import LengthsWriter, ShardWriter, sync_folder, write_file

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
    number: int
    text: str


@final
class DocumentSelection:
    """Documents named by their sources or by a list, and the lines that matched."""

    def __init__(self, manifest: Manifest, patterns: Sequence[str], documents_file: Path | None) -> None:
        self._sources = _find_sources(manifest, patterns)
        self._numbers: dict[str, set[int]] = {}
        self._hashes: dict[tuple[int, int], SelectionLine] = {}
        # Lines of records by part and record, as one number; and lines whose record was not read.
        self._records: dict[int, SelectionLine] = {}
        self._unread: set[SelectionLine] = set()
        self._matched_lines: set[SelectionLine] = set()
        # For each source name: number of each part, and the records before and in it.
        self._part_ranges: dict[str, list[tuple[int, int, int]]] = {}
        # Unlisted parts are mapped to the last element, which is never selected.
        self._part_selected = np.zeros(sum(len(source.parts) for source in manifest.sources) + 1, bool)
        part = 0
        for number, source in enumerate(manifest.sources):
            first_record = 0
            for entry in source.parts:
                self._part_selected[part] = number in self._sources
                self._part_ranges.setdefault(source.name, []).append((part, first_record, entry.records))
                first_record = first_record + entry.records
                part += 1
        if documents_file is not None:
            self._add_file(documents_file, manifest)
        self._sorted_numbers = {
            subset: np.array(sorted(numbers), np.int64) for subset, numbers in self._numbers.items()
        }
        self._keys = np.array(sorted(self._records), np.uint64)
        self._high = np.array(sorted({high for high, _ in self._hashes}), np.uint64)

    def _add_file(self, path: Path, manifest: Manifest) -> None:
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
            if line.text and not line.text.startswith("#") and (fault := self._add_line(line, manifest)):
                problems.append(f"{path}:{count}: {fault}")
        if problems:
            more = f"\nand {len(problems) - _MAX_LISTED:,} more" if len(problems) > _MAX_LISTED else ""
            raise InputError("\n".join(problems[:_MAX_LISTED]) + more + f"\n{_FORMS_HINT}.")

    def _add_line(self, line: SelectionLine, manifest: Manifest) -> str:
        """Add the document of a line; return the fault of an invalid line, else ""."""
        if match := _NUMBER_PATTERN.fullmatch(line.text):
            subset = match[1]
            number = int(match[2])
            document_count = manifest.subsets[subset].documents if subset in manifest.subsets else 0
            if number >= document_count:
                return f"there is no document {line.text}: subset {subset} has {document_count:,}, numbered from 0"
            self._numbers.setdefault(subset, set()).add(number)
        elif _HASH_PATTERN.fullmatch(line.text):
            value = int(line.text, 16)
            self._hashes[value >> 64, value & 0xFFFFFFFFFFFFFFFF] = line
        elif match := _RECORD_PATTERN.fullmatch(line.text):
            record = int(match[2])
            keys = [
                part << _RECORD_BITS | record - first
                for part, first, count in self._part_ranges.get(match[1], ())
                if first <= record < first + count
            ]
            self._records |= dict.fromkeys(keys, line)
            if not keys:
                self._unread.add(line)
        else:
            return f"{quote_value(line.text)} names no document"
        return ""

    def select_in_shard(self, subset: str, first: int, provenance: ProvenanceTable) -> NDArray[np.int64]:
        """Return the numbers of the named documents of a shard, ascending, int64."""
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
                if line := self._hashes.get((high, low)):
                    is_selected[row] = True
                    self._matched_lines.add(line)
        if (numbers := self._sorted_numbers.get(subset)) is not None:
            begin, end = numbers.searchsorted([first, first + len(provenance)])
            is_selected[numbers[begin:end] - first] = True
        return np.flatnonzero(is_selected) + first

    def list_numbered(self, other_than: str = "") -> list[str]:
        """List the lines that number documents, of other subsets than one."""
        return [
            f"{subset}:{number}"
            for subset, numbers in self._sorted_numbers.items()
            if subset != other_than
            for number in numbers.tolist()
        ]

    def list_absent(self) -> tuple[str, ...]:
        """List the lines that match no document and no record read, in file order."""
        return tuple(line.text for line in sorted(self._unread | {*self._hashes.values()} - self._matched_lines))

    def list_left_out(self) -> tuple[str, ...]:
        """List the lines of records that were read but have no document, in file order."""
        return tuple(line.text for line in sorted({*self._records.values()} - self._matched_lines))


def _find_sources(manifest: Manifest, patterns: Sequence[str]) -> set[int]:
    """Return the indices of sources that match names or globs, also of data sets."""
    # Most sources have no data set; an empty name must not match all of them.
    source_names = [[name for name in (source.name, source.dataset) if name] for source in manifest.sources]
    selected_sources: set[int] = set()
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
        selected_sources |= matches
    return selected_sources


def find_listed_documents(
    stores: Mapping[str, Store], documents_file: Path
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Find the documents that a list names, as ``remove_documents`` takes it.

    Returns:
        The documents of each store that has some, ascending, and the lines of the list that name none.

    Raises:
        InputError: a line has an unknown form, or the number of a document of several stores; or a store does not
            know where its documents came from.
    """
    numbers: dict[str, NDArray[np.int64]] = {}
    absent: list[tuple[str, ...]] = []
    for name, store in stores.items():
        if store.manifest is None:
            raise InputError(f"{store.location.name} is no store that knows where its documents came from.")
        selection = DocumentSelection(store.manifest, (), documents_file)
        if len(stores) > 1 and (numbered := selection.list_numbered()):
            raise InputError(
                f"{documents_file} has the line {numbered[0]}, a number in one of {len(stores)} stores: give hashes, "
                "or sources and records."
            )
        numbers[name] = _select_in_store(store, selection)
        absent.append((*selection.list_absent(), *selection.list_left_out(), *selection.list_numbered(store.split)))
    return (
        {name: documents for name, documents in numbers.items() if documents.size},
        tuple(line for line in absent[0] if all(line in others for others in absent[1:])),
    )


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
        selection = DocumentSelection(base, sources, None if documents_file is None else Path(documents_file))
        documents_to_remove: _SelectedDocuments = {}
        counts = _SelectedCounts(base)
        already_removed = remaining_count = 0
        for name in base.subsets:
            store, numbers = _select_documents(folder, name, base, selection)
            is_removed = mask_removed(store.contents.removed, numbers)
            already_removed += int(np.count_nonzero(is_removed))
            numbers = numbers[~is_removed]
            remaining_count += len(store) - store.contents.removed.size - len(numbers)
            if numbers.size:
                documents_to_remove[name] = store, numbers
                counts.add(store, numbers)
        source_summary = counts.list_by_source()
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
        emptied=not remaining_count,
    )


def _select_in_store(store: Store, selection: DocumentSelection) -> NDArray[np.int64]:
    return np.concatenate(
        [
            selection.select_in_shard(store.split, store.shards.bounds[shard], store.provenance.shard(shard))
            for shard in range(len(store.shards))
        ]
    )


_SelectedDocuments = dict[str, tuple[Store, NDArray[np.int64]]]


def _select_documents(
    folder: Path, name: str, base: Manifest, selection: DocumentSelection
) -> tuple[Store, NDArray[np.int64]]:
    store = open_store(folder, name, generation=base.generation)
    numbers = _select_in_store(store, selection)
    if base.objective == "pairs":
        numbers = np.unique(np.concatenate([numbers & ~1, numbers | 1]))
    return store, numbers


@final
class _SelectedCounts:
    """Number of selected documents and tokens of each part of a store."""

    def __init__(self, base: Manifest) -> None:
        self._base = base
        parts = sum(len(source.parts) for source in base.sources)
        self._documents = np.zeros(parts, np.int64)
        self._tokens = np.zeros(parts, np.int64)

    def add(self, store: Store, numbers: NDArray[np.int64]) -> None:
        for shard, first in enumerate(store.shards.bounds[:-1]):
            begin, end = numbers.searchsorted([first, store.shards.bounds[shard + 1]])
            if begin < end:
                parts = store.provenance.shard(shard).parts[numbers[begin:end] - first]
                np.add.at(self._documents, parts, 1)
                np.add.at(self._tokens, parts, store.lengths.take(numbers[begin:end]).astype(np.int64))

    def list_by_source(self) -> tuple[tuple[str, int, int], ...]:
        documents, tokens = self._sum_by_source()
        return tuple((self._base.sources[n].name, documents[n], tokens[n]) for n in np.flatnonzero(documents).tolist())

    def subtract(self, subsets: dict[str, SubsetEntry]) -> Manifest:
        """Return the manifest without the counted documents, with the given subsets."""
        base, (documents, tokens) = self._base, self._sum_by_source()
        dropped = Counter(base.counts.dropped)
        if removed_count := sum(documents):
            dropped[_REMOVED_REASON] += removed_count
        counts = replace(
            base.counts,
            documents=sum(entry.documents for entry in subsets.values()),
            tokens=sum(entry.tokens for entry in subsets.values()),
            dropped=dict(sorted(dropped.items())),
        )
        sources = tuple(
            replace(source, documents=source.documents - documents[n], tokens=source.tokens - tokens[n])
            for n, source in enumerate(base.sources)
        )
        return replace(base, subsets=subsets, counts=counts, sources=sources)

    def _sum_by_source(self) -> tuple[list[int], list[int]]:
        part_ends = np.cumsum([len(source.parts) for source in self._base.sources], dtype=np.int64)
        documents, tokens = (
            np.diff(np.concatenate([[0], np.cumsum(column)])[part_ends], prepend=0).tolist()
            for column in (self._documents, self._tokens)
        )
        return documents, tokens


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
            count_trained_tokens(store.reader.flags, store.lengths, numbers) + (old.trained if old else 0),
            file,
        )
        subsets[name] = replace(subsets[name], removed=entry)
    write_generation_report(folder, number, {"removed": selected})
    commit_manifest(folder, base, make_successor(base, replace(base, subsets=subsets), "removed", selected))
    return number


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """Result of a compaction."""

    path: Path  # folder of the store
    generation: int  # number of its only remaining generation
    made: bool  # whether a new generation was made
    documents: int = 0  # number of removed documents whose text was deleted
    shards: int = 0  # number of rewritten shards
    files: int = 0  # number of deleted files
    ended: tuple[int, ...] = ()  # numbers of the generations that can no longer be opened


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
    numbers = next_shard_numbers(base)
    rewritten = 0
    subsets: dict[str, SubsetEntry] = {}
    counts = _SelectedCounts(base)
    for name, entry in base.subsets.items():
        # Without verification, a flipped bit would be copied and get a valid checksum.
        store = open_store(folder, name, generation=base.generation, verify="first-read")
        removed = store.contents.removed
        if not removed.size and len(entry.all_layers) == 1:
            subsets[name] = entry
            continue
        counts.add(store, removed)
        shards: list[ShardEntry] = []
        for shard, old in enumerate(entry.shards):
            bounds = store.shards.bounds[shard : shard + 2]
            begin, end = removed.searchsorted(bounds)
            if begin == end:
                shards.append(old)
            elif end - begin < old.documents:
                stem = folder / name / format_shard_name(numbers[name])
                shards.append(_write_compacted_shard(store, old, shard, removed[begin:end] - bounds[0], stem, tick))
                numbers[name] += 1
                rewritten += 1
        if shards:
            subsets[name] = _make_subset_entry(store, shards, base.generation + 1)
    return counts.subtract(subsets), rewritten


def _write_compacted_shard(
    store: Store,
    old: ShardEntry,
    shard: int,
    removed_documents: NDArray[np.int64],
    stem: Path,
    tick: Callable[[int], None],
) -> ShardEntry:
    """Write a shard without its removed documents, under a new name."""
    writer = ShardWriter(stem, store.dtype)
    folder = store.path / store.split
    try:
        for document_range in iter_document_ranges(store, shard):
            writer.append(document_range.ids, document_range.flags)
            tick(len(document_range.lengths))
        provenance = store.provenance.shard(shard)
        remaining_documents = np.delete(np.arange(len(provenance)), removed_documents)
        sides = store.shards.sides(shard) if store.contents.objective else None
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
            map_fields(folder / f"{old.name}.fields", old.documents).take(remaining_documents) if old.fields else None,
            store.shards.columns(shard, remaining_documents),
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
