"""The ``remove`` command: take documents out of a store in a new generation.

Removed documents read as untrained end tokens.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.files import refuse_url
from batchloom.store.format.generation_history import RemovedEntry
from batchloom.store.format.layout import format_removed_name
from batchloom.store.format.manifest import Manifest, read_manifest
from batchloom.store.format.missing_store import resolve_store_folder
from batchloom.store.format.removed_documents import encode_removed, mask_removed
from batchloom.store.maintain.generations import (
    commit_manifest,
    lock_store,
    make_successor,
    refuse_unfinished,
    write_generation_report,
)
from batchloom.store.maintain.selection import (
    DocumentSelection,
    NamedDocuments,
    add_named_documents,
    add_named_sources,
)
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import sync_folder, write_file

_BATCH_DOCUMENTS = 1024


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


def _split_already_removed(
    selected_documents: _SelectedDocuments,
) -> tuple[_SelectedDocuments, int]:
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
