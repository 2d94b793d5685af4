"""Phase B: orders that find the same document in several places, and documents that are alike."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchloom.dedup.aside import mapped
from batchloom.dedup.components import components
from batchloom.dedup.find import find
from batchloom.dedup.keys import BAND_KEY, KEY
from batchloom.dedup.near import read_bands, write_band_keys
from batchloom.preparation.unit_files import BANDS_NAME, ROW, ROWS_NAME
from batchloom.store.bands import map_bands
from batchloom.store.writer import make_folder

EXACT, NEAR = "exact", "near"


@dataclass(frozen=True, slots=True)
class FindOrder:
    """One range of all keys, to be looked through.

    Attributes:
        files: of keys, one a unit, in the order of documents.
        first_new: units before it are of older generations, whose documents stay.
        range: number of the range, and how many there are.
        place: file that what is found is written to.
        bands: whether the keys are those of bands.
    """

    files: tuple[Path, ...]
    first_new: int
    range: tuple[int, int]
    place: Path
    bands: bool = False


@dataclass(frozen=True, slots=True)
class BandsOrder:
    """The bands of one unit, to be sorted.

    Attributes:
        folder: its temporary files.
        number: of the unit among all.
        exact: files that name exact duplicates, which take no part.
        count: bands of a document.
        place: file of the sorted keys.
    """

    folder: Path
    number: int
    exact: tuple[Path, ...]
    count: int
    place: Path


@dataclass(frozen=True, slots=True)
class StoredBands:
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
class StoredBandsOrder:
    """The bands of a shard that is there, to be sorted.

    Attributes:
        bands: of the shard.
        place: file of the sorted keys.
    """

    bands: StoredBands
    place: Path


@dataclass(frozen=True, slots=True)
class ComponentsOrder:
    """All links between documents that agree in a band, to be followed to their ends.

    Attributes:
        links: files that name them.
        scratch: folder for what is put down on the way.
        place: folder of the files that name what goes.
        first_new: documents of units before it stay.
    """

    links: tuple[Path, ...]
    scratch: Path
    place: Path
    first_new: int


def find_duplicates(order: FindOrder) -> int:
    """Write down the documents of a range that stood before; how many they are."""
    make_folder(order.place.parent)
    kind = BAND_KEY if order.bands else KEY
    return find(order.files, order.range, order.first_new, order.place, kind)


def sort_bands(order: BandsOrder) -> None:
    """Write the sorted keys of the bands of one unit."""
    make_folder(order.place.parent)
    rows = mapped(order.folder / ROWS_NAME, ROW)
    bands = read_bands(order.folder / BANDS_NAME, order.count)
    write_band_keys(order.place, bands, rows["part"], order.exact, order.number)


def sort_stored_bands(order: StoredBandsOrder) -> None:
    """Write the sorted keys of the bands of a shard that is there."""
    make_folder(order.place.parent)
    said = order.bands
    keys = map_bands(said.path, said.documents).keys
    # Which file part it came of is told of what goes alone.
    parts = np.zeros(said.documents, np.uint32)
    write_band_keys(order.place, keys, parts, gone=np.array(said.removed, np.int64))


def link_components(order: ComponentsOrder) -> tuple[Path, ...]:
    """Write down which documents go because one that is like them stands before."""
    make_folder(order.place)
    found = components(order.links, order.scratch, order.place, order.first_new)
    return tuple(found)
