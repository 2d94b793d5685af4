"""Phase B: search for exact and near duplicates, and counts by pair of sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from batchloom.preparation.dedup.duplicate_search import search_duplicates
from batchloom.preparation.dedup.near_duplicates import find_components, map_signatures, write_signature_keys
from batchloom.preparation.dedup.sorted_keys import KEY, SIGNATURE_KEY, count_keys, count_partitions, map_records
from batchloom.preparation.phases.base_generations import BaseGenerations, StoredSignatures
from batchloom.preparation.settings.recipe import DedupRecipe
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.work_folder import (
    DUPLICATES_SUFFIX,
    KEYS_NAME,
    KEYS_SUFFIX,
    ROWS_NAME,
    SIGNATURES_NAME,
    TokenizedUnit,
    WorkFolder,
    attempt_folder,
    move_into_place,
    open_attempt_file,
)
from batchloom.preparation.workers.protocols import Executor, run_tasks
from batchloom.store import map_signature_file, write_file
from batchloom.store.write import make_folder, sync_folder


@dataclass(frozen=True, slots=True)
class DuplicateFiles:
    """Files that list dropped documents: exact duplicates and near duplicates."""

    exact: tuple[Path, ...] = ()
    near: tuple[Path, ...] = ()


def find_duplicates(
    executor: Executor, work: WorkFolder, units: Sequence[TokenizedUnit], base: BaseGenerations, dedup: DedupRecipe
) -> DuplicateFiles:
    """Find exact and near duplicates; documents of the store are always kept."""
    if dedup.mode == "none" or not units:
        return DuplicateFiles()
    first_new = len(base.files)
    folder = work.duplicates
    files = (*base.files, *(unit.folder / KEYS_NAME for unit in units))
    exact = search_all_ranges(executor, files, folder / "exact", work.attempt, first_new=first_new)
    if dedup.mode != "near" or not any(unit.facts.documents for unit in units):
        return DuplicateFiles(exact)
    signature_files = _sort_signatures(executor, work, units, base, exact, dedup.banding.bands)
    links = search_all_ranges(
        executor, signature_files, folder / "links", work.attempt, first_new=first_new, kind=SIGNATURE_KEY
    )
    near_folder = folder / "near"
    if near_folder.exists():
        return DuplicateFiles(exact, tuple(sorted(near_folder.iterdir())))
    task = partial(link_components, links, first_new, folder / "scratch", near_folder)
    return DuplicateFiles(exact, run_tasks(executor, {0: task}, work.attempt)[0])


def _sort_signatures(
    executor: Executor,
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    base: BaseGenerations,
    exact: tuple[Path, ...],
    bands: int,
) -> tuple[Path, ...]:
    """Return the files of sorted signature keys: of stored shards, then of all units."""
    folder = work.duplicates / "bands"
    empty_path = folder / f"none{KEYS_SUFFIX}"
    paths: list[Path] = []
    tasks: dict[int, Callable[[str], None]] = {}
    for number, shard_signatures in enumerate(base.signatures):
        paths.append(empty_path if shard_signatures is None else folder / f"{number:05d}{KEYS_SUFFIX}")
        if shard_signatures is not None:
            tasks[number] = partial(sort_stored_signatures, shard_signatures, paths[-1])
    for number, unit in enumerate(units, len(base.files)):
        paths.append(folder / f"{number:05d}{KEYS_SUFFIX}")
        tasks[number] = partial(sort_signatures, unit.folder, number, exact, bands, paths[-1])
    run_tasks(executor, {number: task for number, task in tasks.items() if not paths[number].exists()}, work.attempt)
    if empty_path in paths:
        write_file(empty_path, b"")
    return tuple(paths)


def search_all_ranges(
    executor: Executor,
    files: tuple[Path, ...],
    folder: Path,
    attempt: str,
    *,
    first_new: int = 0,
    kind: np.dtype[np.void] = KEY,
) -> tuple[Path, ...]:
    """Search all key ranges and return the files that list the later copies.

    ``files`` are key files in document order; documents of files before ``first_new`` are always kept.
    """
    ranges = count_partitions(count_keys(files, kind))
    paths = tuple(folder / f"{number:05d}{DUPLICATES_SUFFIX}" for number in range(ranges))
    tasks = {
        number: partial(search_key_range, files, (number, ranges), first_new, kind, path)
        for number, path in enumerate(paths)
        if not path.exists()
    }
    run_tasks(executor, tasks, attempt)
    return paths


def search_key_range(
    files: tuple[Path, ...],
    key_range: tuple[int, int],
    first_new: int,
    kind: np.dtype[np.void],
    output_path: Path,
    attempt: str,
) -> int:
    """Write the later copies of a key range (index, number of ranges); count them."""
    with open_attempt_file(output_path, attempt) as attempt_path:
        return search_duplicates(files, key_range, first_new, attempt_path, kind)


def sort_signatures(
    folder: Path, number: int, exact: tuple[Path, ...], bands: int, output_path: Path, attempt: str
) -> None:
    """Write the sorted signature keys of a unit, without its ``exact`` duplicates."""
    rows = map_records(folder / ROWS_NAME, ROW)
    signatures = map_signatures(folder / SIGNATURES_NAME, bands)
    with open_attempt_file(output_path, attempt) as attempt_path:
        write_signature_keys(attempt_path, signatures, rows["part"], exact, number)


def sort_stored_signatures(signatures: StoredSignatures, output_path: Path, attempt: str) -> None:
    keys = map_signature_file(signatures.path, signatures.documents).keys
    # Only dropped documents need their part, and stored ones are never dropped.
    parts = np.zeros(signatures.documents, np.uint32)
    with open_attempt_file(output_path, attempt) as attempt_path:
        write_signature_keys(attempt_path, keys, parts, excluded=np.array(signatures.removed, np.int64))


def link_components(
    links: tuple[Path, ...], first_new: int, scratch: Path, output_folder: Path, attempt: str
) -> tuple[Path, ...]:
    """Find connected components; return the files that list near duplicates."""
    folder = attempt_folder(output_folder, attempt)
    make_folder(folder)
    drop_files = find_components(links, attempt_folder(scratch, attempt), folder, first_new)
    sync_folder(folder)
    move_into_place(folder, output_folder)
    return tuple(output_folder / path.name for path in drop_files)
