"""Phase B: the ``report.duplicates`` file, which ``batchloom view`` reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.dedup.duplicate_search import DUPLICATE, get_document_ids
from batchloom.preparation.dedup.near_duplicates import find_kept_documents, map_signatures
from batchloom.preparation.dedup.sorted_keys import count_records, map_records
from batchloom.preparation.phases.base_generations import BaseGenerations
from batchloom.preparation.phases.duplicate_pairs import iter_duplicate_rows
from batchloom.preparation.phases.find_duplicates import DuplicateFiles
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.work_folder import ROWS_NAME, SIGNATURES_NAME, TokenizedUnit, WorkFolder
from batchloom.store import map_provenance, map_signature_file, wrap_write_errors
from batchloom.store.format import (
    DROPPED_ROW,
    DUPLICATES_NAME,
    EQUAL,
    Banding,
    compute_pair_numbers,
    format_generation_file_name,
    map_removed,
    write_dropped_duplicates,
)
from batchloom.store.write import make_folder

# Documents whose signatures are compared at once.
_COMPARED_DOCUMENTS = 1 << 15
_U32 = np.uint64(32)
_LOW_MASK = np.uint64(0xFFFFFFFF)


def write_duplicates_file(
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    duplicate_files: DuplicateFiles,
    base: BaseGenerations,
    banding: Banding,
) -> None:
    """Write the file that lists the dropped duplicates of this generation."""
    name = format_generation_file_name(DUPLICATES_NAME, base.generation + 1)
    if not sum(count_records(file, DUPLICATE) for file in (*duplicate_files.exact, *duplicate_files.near)):
        # An abandoned job may have been killed while it moved its files here.
        with wrap_write_errors(work.out):
            (work.out / name).unlink(missing_ok=True)
        return
    path = work.store / name
    # Phase C deletes the unit files that this file is made from. If an older version began the job and they are already
    # deleted, no file is written.
    if path.exists() or not all((unit.folder / ROWS_NAME).exists() for unit in units):
        return
    make_folder(work.store)
    documents = _DocumentTable(work.out, units, base, banding.bands)
    rows = _iter_rows(documents, duplicate_files)
    write_dropped_duplicates(path, rows, banding if duplicate_files.near else None)


def _iter_rows(documents: "_DocumentTable", duplicate_files: DuplicateFiles) -> Iterator[NDArray[np.void]]:
    """Yield the dropped duplicates in chunks, DROPPED_ROW."""
    for duplicates in iter_duplicate_rows(duplicate_files.exact):
        equal = documents.to_document_ids(get_document_ids(duplicates, "first_"))
        # The first of equal documents may itself be dropped as a near duplicate.
        kept = find_kept_documents(duplicate_files.near, equal)
        rows = _make_rows(documents, get_document_ids(duplicates), kept)
        rows["shared"] = EQUAL
        similar = np.flatnonzero(kept != equal)
        rows["shared"][similar] = documents.count_shared_bands(equal[similar], kept[similar])
        yield rows
    for duplicates in iter_duplicate_rows(duplicate_files.near):
        dropped = get_document_ids(duplicates)
        kept = get_document_ids(duplicates, "first_")
        rows = _make_rows(documents, dropped, kept)
        rows["shared"] = documents.count_shared_bands(dropped, kept)
        yield rows


def _make_rows(documents: "_DocumentTable", dropped: NDArray[np.uint64], kept: NDArray[np.uint64]) -> NDArray[np.void]:
    rows = np.zeros(len(dropped), DROPPED_ROW)
    rows["dropped"], rows["offset"] = documents.locate(dropped)
    rows["kept"], _ = documents.locate(kept)
    return rows


@final
class _DocumentTable:
    """Records and signatures of documents by id.

    An id of the duplicate search is unit << 32 | number; the stored shards are the first units.
    """

    def __init__(self, out: Path, units: Sequence[TokenizedUnit], base: BaseGenerations, bands: int) -> None:
        self._units = units
        self._base = base
        self._bands = bands
        self._shards = list[tuple[Path, int]]()
        self._removed = list[NDArray[np.int64]]()
        for name, subset in base.base.subsets.items() if base.base else ():
            removed = map_removed(out / name, subset)
            first = 0
            for shard in subset.shards:
                begin, end = removed.searchsorted([first, first + shard.documents])
                self._shards.append((out / name / f"{shard.name}.docs", shard.documents))
                self._removed.append(removed[begin:end] - first)
                first += shard.documents

    def to_document_ids(self, documents: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Convert ids of the exact search, which skips removed ones, to document ids."""
        if not any(map(len, self._removed)):
            return documents
        documents = documents.copy()
        for unit, indices in _group_by_unit(documents):
            if unit < len(self._shards) and len(self._removed[unit]):
                remaining = np.delete(np.arange(self._shards[unit][1], dtype=np.uint64), self._removed[unit])
                documents[indices] = remaining[documents[indices] & _LOW_MASK] | np.uint64(unit << 32)
        return documents

    def locate(self, documents: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the number of each document's record, as in ``.pairs``, and its offset."""
        records = np.empty(len(documents), np.uint64)
        offsets = np.empty(len(documents), np.uint64)
        for unit, indices in _group_by_unit(documents):
            numbers = (documents[indices] & _LOW_MASK).astype(np.int64)
            if unit < len(self._shards):
                provenance = map_provenance(self._shards[unit][0]).take(numbers)
                parts = provenance.parts
                unit_records = provenance.records
                unit_offsets = provenance.offsets
            else:
                tokenized_unit = self._units[unit - len(self._shards)]
                # For records, np.take is several times as fast as indexing.
                rows = np.take(map_records(tokenized_unit.folder / ROWS_NAME, ROW), numbers)
                parts = rows["part"]
                unit_records = rows["record"]
                unit_offsets = rows["offset"]
                parts = parts + np.uint32(tokenized_unit.unit.first_part)
            records[indices], offsets[indices] = compute_pair_numbers(parts, unit_records), unit_offsets
        return records, offsets

    def count_shared_bands(self, documents: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint16]:
        """Return the number of MinHash bands in which the documents agree."""
        counts = np.empty(len(documents), np.uint16)
        for start in range(0, len(documents), _COMPARED_DOCUMENTS):
            chunk = slice(start, start + _COMPARED_DOCUMENTS)
            counts[chunk] = (self._read_keys(documents[chunk]) == self._read_keys(others[chunk])).sum(axis=1)
        return counts

    def _read_keys(self, documents: NDArray[np.uint64]) -> NDArray[np.uint64]:
        keys = np.empty((len(documents), self._bands), np.uint64)
        for unit, indices in _group_by_unit(documents):
            if unit < len(self._shards):
                signatures = self._base.signatures[unit]
                if signatures is None:
                    raise AssertionError("documents of a shard without signatures have no similar ones")
                mapped_keys = map_signature_file(signatures.path, signatures.documents).keys
            else:
                folder = self._units[unit - len(self._shards)].folder
                mapped_keys = map_signatures(folder / SIGNATURES_NAME, self._bands)
            keys[indices] = mapped_keys[documents[indices] & _LOW_MASK]
        return keys


def _group_by_unit(documents: NDArray[np.uint64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each unit with the indices of its documents, by ascending number."""
    order = np.argsort(documents)
    for indices in np.split(order, np.flatnonzero(np.diff(documents[order] >> _U32)) + 1):
        if indices.size:
            yield int(documents[indices[0]] >> _U32), indices
