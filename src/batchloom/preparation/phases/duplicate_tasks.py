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
        place: file that what is found is written to.
        attempt: sets the file of this attempt apart from that of another one.
        bands: whether the keys are those of bands.
    """

    files: tuple[Path, ...]
    first_new: int
    range: tuple[int, int]
    place: Path
    attempt: str
    bands: bool = False


@dataclass(frozen=True, slots=True)
class SortSignaturesTask:
    """The bands of one unit, to be sorted.

    Attributes:
        folder: its temporary files.
        number: of the unit among all.
        exact: files that name exact duplicates, which take no part.
        count: bands of a document.
        place: file of the sorted keys.
        attempt: sets the file of this attempt apart from that of another one.
    """

    folder: Path
    number: int
    exact: tuple[Path, ...]
    count: int
    place: Path
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
        bands: of the shard.
        place: file of the sorted keys.
        attempt: sets the file of this attempt apart from that of another one.
    """

    bands: StoredSignatures
    place: Path
    attempt: str


@dataclass(frozen=True, slots=True)
class LinkComponentsTask:
    """All links between documents that agree in a band, to be followed to their ends.

    Attributes:
        links: files that name them.
        scratch: folder for what is put down on the way.
        place: folder of the files that name what goes.
        first_new: documents of units before it stay.
        attempt: sets the files of this attempt apart from those of another one.
    """

    links: tuple[Path, ...]
    scratch: Path
    place: Path
    first_new: int
    attempt: str


def find_duplicates(order: FindDuplicatesTask) -> int:
    """Write down the documents of a range that stood before; how many they are."""
    kind = SIGNATURE_KEY if order.bands else KEY
    with open_attempt_file(order.place, order.attempt) as aside:
        return search_duplicates(order.files, order.range, order.first_new, aside, kind)


def sort_signatures(order: SortSignaturesTask) -> None:
    """Write the sorted keys of the bands of one unit."""
    rows = map_records(order.folder / ROWS_NAME, ROW)
    bands = map_signatures(order.folder / SIGNATURES_NAME, order.count)
    with open_attempt_file(order.place, order.attempt) as aside:
        write_signature_keys(aside, bands, rows["part"], order.exact, order.number)


def sort_stored_signatures(order: SortStoredSignaturesTask) -> None:
    """Write the sorted keys of the bands of a shard that is there."""
    said = order.bands
    keys = map_signature_file(said.path, said.documents).keys
    # Which file part it came of is told of what goes alone.
    parts = np.zeros(said.documents, np.uint32)
    with open_attempt_file(order.place, order.attempt) as aside:
        write_signature_keys(aside, keys, parts, gone=np.array(said.removed, np.int64))


def link_components(order: LinkComponentsTask) -> tuple[Path, ...]:
    """Write down which documents go because one that is like them stands before."""
    folder = attempt_folder(order.place, order.attempt)
    scratch = attempt_folder(order.scratch, order.attempt)
    make_folder(folder)
    found = find_components(order.links, scratch, folder, order.first_new)
    sync_folder(folder)
    move_into_place(folder, order.place)
    return tuple(order.place / path.name for path in found)
