"""Copies of a document: equal and similar stored ones, and dropped duplicates."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import release_pages
from batchloom.preparation import ReportedSource, read_report, read_source_texts
from batchloom.store import REPORT_NAME, Store, map_signature_file
from batchloom.store.format import (
    CHECK_REMEDY,
    DROPPED_ROW,
    EQUAL,
    DroppedDuplicates,
    GenerationEntry,
    MinHashSignatures,
    ProvenanceTable,
    compute_pair_numbers,
    format_generation_file_name,
    map_dropped_duplicates,
    split_pair_numbers,
)

_DOCUMENTS_PER_STEP = 1 << 16
_LISTED_COPIES = 100
DROPPED_COPIES_PER_PAGE = 50
# Texts of dropped duplicates are read in this time, and their first characters are shown. Reports up to this size are
# read.
_TEXT_SECONDS = 0.1
_SHOWN_CHARACTERS = 240
_MAX_REPORT_BYTES = 8 << 20


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
        is_full: whether the search ended because it found as many copies as it lists.
    """

    copies: list[StoredCopy]
    bands: int
    compared: int
    next_document: int | None
    is_full: bool


@dataclass(frozen=True, slots=True)
class DroppedCopy:
    """A duplicate that preparation dropped.

    Attributes:
        source: name of its file.
        position: its line or row, such as ``line 3``.
        similarity: estimated similarity to the document; 1 for an equal text; None if it is not recorded.
        words: its first words; empty if they cannot be read.
        fault: why they cannot be read; empty if they can.
    """

    source: str
    position: str
    similarity: float | None
    words: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class DroppedCopies:
    """Duplicates of a document that preparation dropped.

    Attributes:
        counts: number of dropped duplicates of the store by reason.
        copies: dropped duplicates of the document.
        total: their number, including those of other pages.
        next_start: number of the first copy of the next page; None on the last page.
        is_complete: whether the store records all dropped duplicates: no file of them was deleted.
    """

    counts: dict[str, int]
    copies: list[DroppedCopy]
    total: int
    next_start: int | None
    is_complete: bool


def can_search_copies(store: Store) -> bool:
    """Return whether a store has hashes of its documents in local files."""
    return store.manifest is not None and store.location.on_disk and not store.location.is_remote


def find_copies(store: Store, document: int, start: int = 0, *, seconds: float = 0.15) -> CopySearch:
    """Search the documents from a number on for copies of a document, in bounded time.

    Equal texts have the same hash. Similar ones share MinHash bands.

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
    own_keys = np.zeros(0, np.uint64)
    banding = None
    if own_signatures is not None and own_signatures.keys[document - bounds[shard]].any():
        own_keys = own_signatures.keys[document - bounds[shard]].copy()
        banding = own_signatures.banding
    copies: list[StoredCopy] = []
    compared = 0
    position = start
    for number, begin, stop in _iter_steps(bounds, start):
        rows = slice(begin - bounds[number], stop - bounds[number])
        hashes = store.provenance.shard(number).hashes[rows]
        is_equal = (hashes[:, 0] == own_hash[0]) & (hashes[:, 1] == own_hash[1])
        shared = np.zeros(stop - begin, np.int64)
        signatures = _map_signatures(store, number) if banding is not None else None
        is_comparable = signatures is not None and signatures.banding == banding
        if signatures is not None and is_comparable:
            # Equal keys are compared only within a band, as keys of different bands differ.
            shared = (signatures.keys[rows] == own_keys).sum(axis=1)
            release_pages(signatures.keys)
        found = np.flatnonzero(is_equal | (shared > 0))
        found = found[found != document - begin]
        position = stop
        if len(found) > _LISTED_COPIES - len(copies):
            found = found[: _LISTED_COPIES - len(copies)]
            position = begin + int(found[-1]) + 1
        for index in found.tolist():
            count = None if is_equal[index] else int(shared[index])
            similarity = banding.estimate_similarity(count) if banding is not None and count is not None else 1.0
            copies.append(StoredCopy(begin + index, count, similarity))
        compared += position - begin if is_comparable else 0
        if len(copies) == _LISTED_COPIES or time.monotonic() > deadline:
            break
    copies.sort(key=lambda copy: (-copy.similarity, copy.number))
    next_document = position if position < len(store) else None
    return CopySearch(copies, len(own_keys), compared, next_document, len(copies) == _LISTED_COPIES)


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


def read_dropped_copies(store: Store, document: int, start: int = 0) -> DroppedCopies:
    """Return the dropped duplicates of a document, from one of them on.

    Args:
        store: a store on disk.
        document: the document.
        start: number of the first copy.

    Raises:
        StoreError: a file of dropped duplicates is damaged.
    """
    manifest = store.manifest
    if manifest is None:
        return DroppedCopies({}, [], 0, None, is_complete=True)
    shard = int(np.searchsorted(store.shards.bounds, document, side="right")) - 1
    provenance = store.provenance.shard(shard).take(np.array([document - store.shards.bounds[shard]]))
    kept = int(compute_pair_numbers(provenance.parts, provenance.records)[0])
    stop = start + DROPPED_COPIES_PER_PAGE
    deadline = time.monotonic() + _TEXT_SECONDS
    copies = list[DroppedCopy]()
    total = 0
    is_complete = True
    for generation in manifest.all_history:
        if not generation.has_inputs:
            continue
        duplicates = map_dropped_duplicates(store.path, generation.number)
        if duplicates is None:
            # No duplicates were dropped, or the file was deleted.
            report = read_report(store.path, generation.number)
            is_complete &= report is not None and not report.content.duplicates
            continue
        rows = [np.zeros(0, DROPPED_ROW)]
        for run_rows in duplicates.list_copies(kept):
            rows.append(run_rows[max(start - total, 0) : max(stop - total, 0)])
            total += len(run_rows)
        if any(map(len, rows)):
            copies += _DroppedCopyReader(store, generation, duplicates, deadline).read_copies(np.concatenate(rows))
    counts = {reason: count for reason, count in manifest.counts.dropped.items() if reason.endswith("duplicate")}
    return DroppedCopies(counts, copies, total, stop if stop < total else None, is_complete)


@final
class _DroppedCopyReader:
    """Reader of dropped duplicates, with texts of their files while time is left."""

    def __init__(
        self, store: Store, generation: GenerationEntry, duplicates: DroppedDuplicates, deadline: float
    ) -> None:
        self._table = store.reader.part_table
        self._generation = generation
        self._duplicates = duplicates
        self._deadline = deadline
        sources = store.manifest.list_sources_of(generation) if store.manifest else ()
        self._first_source = generation.sources - len(sources)
        self._reported = _list_reported_sources(store, generation)

    def read_copies(self, rows: NDArray[np.void]) -> list[DroppedCopy]:
        """Return the dropped duplicates of some rows."""
        parts, records = split_pair_numbers(rows["dropped"])
        if (parts >= len(self._table.records)).any() or (records >= self._table.records[parts]).any():
            raise StoreError(f"{self._duplicates.path} names records that the store did not read. {CHECK_REMEDY}")
        texts = dict[tuple[int, int], str]()
        faults = dict[int, str]()
        for part in np.unique(parts).tolist():
            offsets = dict(zip(records[parts == part].tolist(), rows["offset"][parts == part].tolist(), strict=True))
            try:
                part_texts = self._read_texts(part, offsets)
            except InputError as error:
                faults[part] = str(error)
            else:
                texts |= {(part, record): text for record, text in part_texts.items()}
        hashes = np.zeros((len(rows), 2), np.uint64)
        positions = self._table.resolve_provenance(ProvenanceTable(hashes, records, rows["offset"], parts))
        keys = zip(parts.tolist(), records.tolist(), strict=True)
        return [
            DroppedCopy(
                position.source,
                position.position,
                self._estimate_similarity(shared),
                " ".join(texts.get(key, "")[:_SHOWN_CHARACTERS].split()),
                "" if key in texts else faults.get(key[0], "It is too far inside its file to be read here."),
            )
            for position, key, shared in zip(positions, keys, rows["shared"].tolist(), strict=True)
        ]

    def _estimate_similarity(self, shared: int) -> float | None:
        banding = self._duplicates.banding
        return 1.0 if shared == EQUAL else banding.estimate_similarity(shared) if banding else None

    def _read_texts(self, part: int, offsets: Mapping[int, int]) -> dict[int, str]:
        """Return the texts of records of a part, whose byte offsets are given."""
        number = int(self._table.numbers[part])
        if number - self._first_source >= len(self._reported):
            raise InputError("The report of the store does not name its file.")
        if time.monotonic() > self._deadline:
            raise InputError("Its text is not read, as the page would take too long.")
        source = self._table.sources[number]
        return read_source_texts(
            self._reported[number - self._first_source],
            source,
            source.parts[part - int(np.searchsorted(self._table.numbers, number))],
            offsets,
            self._generation.recipe.get("reading", {}).get("split_on", "auto"),
        )


def _list_reported_sources(store: Store, generation: GenerationEntry) -> list[ReportedSource]:
    """List the input files of a generation; none if its report is missing or large."""
    path = store.path / format_generation_file_name(REPORT_NAME, generation.number)
    if not path.exists() or path.stat().st_size > _MAX_REPORT_BYTES:
        return []
    report = read_report(store.path, generation.number)
    return report.sources if report else []
