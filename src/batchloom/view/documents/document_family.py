"""Copies of a document: equal and similar ones in the store, and removed ones."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from batchloom.core.errors import InputError
from batchloom.core.files import release_pages
from batchloom.preparation import read_report
from batchloom.store import Store, map_signature_file
from batchloom.store.format import DocumentProvenance, MinHashSignatures

_DOCUMENTS_PER_STEP = 1 << 16
_LISTED_COPIES = 100


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """An equal or similar document of the store.

    Attributes:
        number: its number.
        shared: MinHash bands that both documents share; None for an equal text.
        similarity: estimated Jaccard similarity of their shingles; 1 for an equal text.
    """

    number: int
    shared: int | None
    similarity: float


@dataclass(frozen=True, slots=True)
class CopySearch:
    """Copies in a range of documents of a store.

    Attributes:
        copies: the copies, those with the largest similarity first.
        bands: bands of the signature of the document; 0 if it has none.
        compared: documents of the range whose signatures were compared.
        next_document: where the search continues; None if the store was searched to its end.
    """

    copies: list[StoredCopy]
    bands: int
    compared: int
    next_document: int | None


@dataclass(frozen=True, slots=True)
class RemovedCopy:
    """A removed copy: its file, its record counted from 1, and its first words."""

    source: str
    record: int
    words: str


@dataclass(frozen=True, slots=True)
class RemovalRecord:
    """Content of the reports on removed copies.

    Attributes:
        counts: number of removed documents by reason; empty if no report can be read.
        copies: removed copies of the document that a report names.
        names_files: whether the reports name single files and records. They group the files of a large listing by
            folder, and count the records of a large file by part.
    """

    counts: dict[str, int]
    copies: list[RemovedCopy]
    names_files: bool = True


def can_search_copies(store: Store) -> bool:
    """Return whether a store has hashes of its documents in local files."""
    return store.manifest is not None and store.location.on_disk and not store.location.is_remote


def find_copies(store: Store, document: int, start: int = 0, *, seconds: float = 0.15) -> CopySearch:
    """Search the documents from a number on for copies of a document, in bounded time.

    Equal texts have the same hash. Similar ones share MinHash bands: two documents of similarity s share a band of r
    rows with probability s^r, so m of b shared bands estimate the similarity as (m / b)^(1 / r).

    Args:
        store: the store.
        document: the document.
        start: first searched document.
        seconds: time after which the search ends at the next step.

    Raises:
        InputError: the store is remote, or its documents have no recorded hashes.
        StoreError: a shard is missing or damaged.
    """
    if not can_search_copies(store):
        raise InputError("Copies are searched in local stores with hashes of their documents.")
    deadline = time.monotonic() + seconds
    bounds = store.shards.bounds
    shard = int(np.searchsorted(bounds, document, side="right")) - 1
    own_hash = store.provenance.shard(shard).hashes[document - bounds[shard]]
    own_signatures = _map_signatures(store, shard)
    own_keys, banding = np.zeros(0, np.uint64), None
    if own_signatures is not None and own_signatures.keys[document - bounds[shard]].any():
        own_keys, banding = own_signatures.keys[document - bounds[shard]].copy(), own_signatures.banding
    copies: list[StoredCopy] = []
    compared, position = 0, start
    for number, begin, stop in _iter_steps(bounds, start):
        rows = slice(begin - bounds[number], stop - bounds[number])
        hashes = store.provenance.shard(number).hashes[rows]
        equal = np.flatnonzero((hashes[:, 0] == own_hash[0]) & (hashes[:, 1] == own_hash[1])) + begin
        copies += [StoredCopy(other, None, 1.0) for other in equal.tolist() if other != document]
        signatures = _map_signatures(store, number) if banding is not None else None
        if banding is not None and signatures is not None and signatures.banding == banding:
            # Equal keys are compared only within a band, as keys of different bands differ.
            shared = (signatures.keys[rows] == own_keys).sum(axis=1)
            release_pages(signatures.keys)
            compared += stop - begin
            for index in np.flatnonzero(shared).tolist():
                other, count = begin + index, int(shared[index])
                if other != document and other not in equal:
                    copies.append(StoredCopy(other, count, (count / banding.bands) ** (1 / banding.rows)))
        position = stop
        if time.monotonic() > deadline:
            break
    copies.sort(key=lambda copy: (-copy.similarity, copy.number))
    next_document = position if position < len(store) else None
    return CopySearch(copies[:_LISTED_COPIES], len(own_keys), compared, next_document)


def _iter_steps(bounds: tuple[int, ...], start: int) -> Iterator[tuple[int, int, int]]:
    """Yield shard, first document and last document + 1 of each step of a search."""
    for shard, (first, end) in enumerate(pairwise(bounds)):
        for begin in range(max(first, start), end, _DOCUMENTS_PER_STEP):
            yield shard, begin, min(begin + _DOCUMENTS_PER_STEP, end)


def _map_signatures(store: Store, shard: int) -> MinHashSignatures | None:
    """Map the signatures of a shard; None if it has none."""
    entry = store.manifest.subsets[store.split].shards[shard] if store.manifest else None
    if entry is None or entry.bands is None:
        return None
    return map_signature_file(store.path / store.split / f"{entry.name}.bands", entry.documents)


def has_signatures(store: Store) -> bool:
    """Return whether any shard of a store has MinHash signatures."""
    shards = store.manifest.subsets[store.split].shards if store.manifest else ()
    return any(entry.bands is not None for entry in shards)


def read_removal_record(store: Store, provenance: DocumentProvenance) -> RemovalRecord:
    """Return the removed copies of a document that the reports of its store name.

    A report names the first few removed copies of each pair of files, and counts all of them.
    """
    counts: dict[str, int] = {}
    copies: list[RemovedCopy] = []
    if store.manifest is None:
        return RemovalRecord(counts, copies)
    sources = {source.name: len(source.parts) for source in store.manifest.sources}
    names_files = sources.get(provenance.source) == 1
    for generation in store.manifest.all_history:
        report = read_report(store.path, generation.number) if generation.has_inputs else None
        if report is None:
            continue
        for reason, count in report.counts.dropped.items():
            if reason.endswith("duplicate"):
                counts[reason] = counts.get(reason, 0) + count
        for pair in report.content.duplicates:
            if pair.kept_in == provenance.source and names_files:
                copies += [
                    RemovedCopy(pair.dropped_from, example.dropped_record + 1, example.words)
                    for example in pair.examples
                    if example.kept_record == provenance.record
                ]
            elif pair.dropped_from not in sources:
                names_files = False
    return RemovalRecord(counts, copies, names_files)
