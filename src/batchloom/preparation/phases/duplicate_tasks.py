"""Phase B: orders that find the same document in several places, and documents that are alike."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchloom.preparation.dedup import (
    KEY,
    SIGNATURE_KEY,
    find_components,
    map_records,
    map_signatures,
    search_duplicates,
    write_signature_keys,
)
from batchloom.preparation.units import (
    ROW,
    ROWS_NAME,
    SIGNATURES_NAME,
    attempt_folder,
    move_into_place,
    open_attempt_file,
)
from batchloom.store import map_signature_file
from batchloom.store.write import make_folder, sync_folder

EXACT, NEAR = "exact", "near"


@dataclass(frozen=True, slots=True)
class FindDuplicatesTask:
    """One range of all keys, to be looked through.

    Attributes:
        files: of keys, one a unit, in the order of documents.
        first_new: units before it are of older generations, whose documents stay.
        range: number of the range, and how many there are.
        output_path: file that what is found is written to.
        attempt: sets the file of this attempt apart from that of another one.
        has_signature_keys: whether the keys are those of bands.
    """

    files: tuple[Path, ...]
    first_new: int
    range: tuple[int, int]
    output_path: Path
    attempt: str
    has_signature_keys: bool = False


@dataclass(frozen=True, slots=True)
class SortSignaturesTask:
    """The bands of one unit, to be sorted.

    Attributes:
        folder: its temporary files.
        number: of the unit among all.
        exact: files that name exact duplicates, which take no part.
        count: bands of a document.
        output_path: file of the sorted keys.
        attempt: sets the file of this attempt apart from that of another one.
    """

    folder: Path
    number: int
    exact: tuple[Path, ...]
    count: int
    output_path: Path
    attempt: str


@dataclass(frozen=True, slots=True)
class StoredSignatures:
    """The bands of a shard that is there.

    Attributes:
        path: its file.
        documents: how many the shard has.
        removed: places of those that were removed, which nothing is like.
    """

    path: Path
    documents: int
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SortStoredSignaturesTask:
    """The bands of a shard that is there, to be sorted.

    Attributes:
        signatures: of the shard.
        output_path: file of the sorted keys.
        attempt: sets the file of this attempt apart from that of another one.
    """

    signatures: StoredSignatures
    output_path: Path
    attempt: str


@dataclass(frozen=True, slots=True)
class LinkComponentsTask:
    """All links between documents that agree in a band, to be followed to their ends.

    Attributes:
        links: files that name them.
        scratch: folder for what is put down on the way.
        output_folder: folder of the files that name what goes.
        first_new: documents of units before it stay.
        attempt: sets the files of this attempt apart from those of another one.
    """

    links: tuple[Path, ...]
    scratch: Path
    output_folder: Path
    first_new: int
    attempt: str


def find_duplicates(task: FindDuplicatesTask) -> int:
    """Write down the documents of a range that stood before; how many they are."""
    kind = SIGNATURE_KEY if task.has_signature_keys else KEY
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        return search_duplicates(task.files, task.range, task.first_new, attempt_path, kind)


def sort_signatures(task: SortSignaturesTask) -> None:
    """Write the sorted keys of the bands of one unit."""
    rows = map_records(task.folder / ROWS_NAME, ROW)
    signatures = map_signatures(task.folder / SIGNATURES_NAME, task.count)
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        write_signature_keys(attempt_path, signatures, rows["part"], task.exact, task.number)


def sort_stored_signatures(task: SortStoredSignaturesTask) -> None:
    """Write the sorted keys of the bands of a shard that is there."""
    signatures = task.signatures
    keys = map_signature_file(signatures.path, signatures.documents).keys
    # Which file part it came of is told of what goes alone.
    parts = np.zeros(signatures.documents, np.uint32)
    with open_attempt_file(task.output_path, task.attempt) as attempt_path:
        write_signature_keys(attempt_path, keys, parts, excluded=np.array(signatures.removed, np.int64))


def link_components(task: LinkComponentsTask) -> tuple[Path, ...]:
    """Write down which documents go because one that is like them stands before."""
    folder = attempt_folder(task.output_folder, task.attempt)
    scratch = attempt_folder(task.scratch, task.attempt)
    make_folder(folder)
    drop_files = find_components(task.links, scratch, folder, task.first_new)
    sync_folder(folder)
    move_into_place(folder, task.output_folder)
    return tuple(task.output_folder / path.name for path in drop_files)
