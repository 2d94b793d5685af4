"""Phase B: tasks that find exact duplicates and near duplicates."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchloom.preparation.dedup.duplicate_search import search_duplicates
from batchloom.preparation.dedup.near_duplicates import find_components, map_signatures, write_signature_keys
from batchloom.preparation.dedup.sorted_keys import KEY, SIGNATURE_KEY, map_records
from batchloom.preparation.units.unit_files import ROW, ROWS_NAME, SIGNATURES_NAME
from batchloom.preparation.units.work_folder import attempt_folder, move_into_place, open_attempt_file
from batchloom.store import map_signature_file
from batchloom.store.write import make_folder, sync_folder

EXACT, NEAR = "exact", "near"


@dataclass(frozen=True, slots=True)
class FindDuplicatesTask:
    """Task of searching one range of all keys.

    Attributes:
        files: key files, one per unit, in document order.
        first_new: index of the first new file; documents of the files before it are always kept.
        range: (index of the range, number of ranges).
        output_path: file that receives the duplicates.
        attempt: suffix that keeps the file of this attempt apart from those of other attempts.
        has_signature_keys: the keys are those of MinHash signatures.
    """

    files: tuple[Path, ...]
    first_new: int
    range: tuple[int, int]
    output_path: Path
    attempt: str
    has_signature_keys: bool = False


@dataclass(frozen=True, slots=True)
class SortSignaturesTask:
    """Task of sorting the MinHash signatures of one unit.

    Attributes:
        folder: temporary files of the unit.
        number: number of the unit among all files.
        exact: files that list exact duplicates, which are skipped.
        count: number of signature keys per document.
        output_path: file of the sorted keys.
        attempt: suffix that keeps the file of this attempt apart from those of other attempts.
    """

    folder: Path
    number: int
    exact: tuple[Path, ...]
    count: int
    output_path: Path
    attempt: str


@dataclass(frozen=True, slots=True)
class StoredSignatures:
    """MinHash signatures of a stored shard.

    Attributes:
        path: signature file.
        documents: number of documents of the shard.
        removed: positions of removed documents, which are never matched.
    """

    path: Path
    documents: int
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SortStoredSignaturesTask:
    """Task of sorting the MinHash signatures of a stored shard.

    Attributes:
        signatures: signatures of the shard.
        output_path: file of the sorted keys.
        attempt: suffix that keeps the file of this attempt apart from those of other attempts.
    """

    signatures: StoredSignatures
    output_path: Path
    attempt: str


@dataclass(frozen=True, slots=True)
class LinkComponentsTask:
    """Task of finding the connected components of all links.

    Attributes:
        links: files of links between documents that share a signature key.
        scratch: folder of intermediate files.
        output_folder: folder of the files that list dropped documents.
        first_new: documents of units before this one are always kept.
        attempt: suffix that keeps the files of this attempt apart from those of other attempts.
    """

    links: tuple[Path, ...]
    scratch: Path
    output_folder: Path
    first_new: int
    attempt: str


def find_duplicates(task: FindDuplicatesTask) -> int:
    """Write the later copies of a key range to a file and return their number."""
    kind = SIGNATURE_KEY if task.has_signature_keys else KEY
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        return search_duplicates(task.files, task.range, task.first_new, attempt_path, kind)


def sort_signatures(task: SortSignaturesTask) -> None:
    rows = map_records(task.folder / ROWS_NAME, ROW)
    signatures = map_signatures(task.folder / SIGNATURES_NAME, task.count)
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        write_signature_keys(attempt_path, signatures, rows["part"], task.exact, task.number)


def sort_stored_signatures(task: SortStoredSignaturesTask) -> None:
    signatures = task.signatures
    keys = map_signature_file(signatures.path, signatures.documents).keys
    # Only dropped documents need their part, and stored ones are never dropped.
    parts = np.zeros(signatures.documents, np.uint32)
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        write_signature_keys(attempt_path, keys, parts, excluded=np.array(signatures.removed, np.int64))


def link_components(task: LinkComponentsTask) -> tuple[Path, ...]:
    """Write the files that list the documents dropped as near duplicates."""
    folder = attempt_folder(task.output_folder, task.attempt)
    scratch = attempt_folder(task.scratch, task.attempt)
    make_folder(folder)
    drop_files = find_components(task.links, scratch, folder, task.first_new)
    sync_folder(folder)
    move_into_place(folder, task.output_folder)
    return tuple(task.output_folder / path.name for path in drop_files)
